#pragma once
#include <kbrl/dispatch.h>
#include <kbrl/python.h>
