#pragma once
#include <kbrl/python.h>
