#pragma once
#include <kbrl/dispatch.h>
