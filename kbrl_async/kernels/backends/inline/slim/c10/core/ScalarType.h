#pragma once
#include <kbrl/types.h>
