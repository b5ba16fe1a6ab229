#pragma once
#include <kbrl/cuda.h>
