#pragma once
#include <kbrl/check.h>
