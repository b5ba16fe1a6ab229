#pragma once
#include <kbrl/dispatch.h>
#ifdef KBRL_PYTHON
#include <kbrl/python.h>
#endif
