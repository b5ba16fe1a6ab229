#pragma once
#include <kbrl/guard.h>
