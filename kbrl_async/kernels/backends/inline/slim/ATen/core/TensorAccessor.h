#pragma once
#include <kbrl/accessor.h>
