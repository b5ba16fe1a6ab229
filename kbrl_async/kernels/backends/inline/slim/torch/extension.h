#pragma once
#include <torch/all.h>
#ifdef KBRL_PYTHON
#include <kbrl/python.h>
#endif
