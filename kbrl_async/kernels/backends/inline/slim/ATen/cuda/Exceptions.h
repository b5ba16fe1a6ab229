#pragma once
#include <kbrl/context.h>
