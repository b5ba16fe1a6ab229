#pragma once
#include <kbrl/tensor.h>
