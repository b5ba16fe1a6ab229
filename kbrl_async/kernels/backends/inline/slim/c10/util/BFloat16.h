#pragma once
#include <kbrl/half.h>
