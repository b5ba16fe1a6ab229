"""Which foreign functions a built C kernel may call: mathematics, plain memory, OpenMP, and what the compiler adds.

A list of forbidden words can be written around (`#define CALL(a, b) a##b`); the symbol table of the built object can't:
whatever a kernel reaches without an inline system call stands there by name. So Python's own interface, `dlsym`, files
and processes are out of reach, however the source spells them.
"""

from __future__ import annotations

import re
import struct

from kbrl_async.kernels.backends.launch import elf

_MATHS = [
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh"),
    *("erf", "erfc", "exp", "exp10", "exp2", "expm1", "fabs", "fdim", "floor", "fma", "fmax", "fmin", "fmod"),
    *("frexp", "hypot", "ilogb", "j0", "j1", "jn", "ldexp", "lgamma", "llrint", "llround", "log", "log10"),
    *("log1p", "log2", "logb", "lrint", "lround", "modf", "nan", "nearbyint", "nextafter", "nexttoward", "pow"),
    *("remainder", "remquo", "rint", "round", "roundeven", "scalbln", "scalbn", "significand", "sin", "sincos"),
    *("sinh", "sqrt", "tan", "tanh", "tgamma", "trunc", "y0", "y1", "yn", "cabs", "carg", "cexp", "clog"),
    *("cpow", "csqrt", "creal", "cimag", "conj"),
]
_PLAIN = [
    *("memcpy", "memmove", "memset", "memcmp", "memchr", "mempcpy", "strlen", "strcmp", "strncmp", "strcpy"),
    *("strncpy", "bcmp", "bzero", "malloc", "calloc", "realloc", "free", "aligned_alloc", "posix_memalign"),
    *("memalign", "abs", "labs", "llabs", "div", "ldiv", "qsort", "bsearch", "rand", "srand", "rand_r"),
    *("printf", "puts", "putchar", "signgam", "__errno_location", "__stack_chk_fail", "__memcpy_chk"),
    *("__memset_chk", "__memmove_chk", "__printf_chk"),
]
_COMPILER = re.compile(
    r"_ITM_\w+|__gmon_start__|__cxa_finalize|(omp|GOMP|GOACC)_\w+|_ZGV\w+"  # runtime, OpenMP, vectorised maths
    r"|__\w+_finite|__(fpclassify|signbit|isnan|isinf|finite|issignaling)[fl]?"
    r"|__(mul|div|add|sub|pow|float|fix|ext|trunc|ashl|lshr|ashr|cmp|mod|udiv|umod|popcount|clz|ctz|bswap)\w*[0-9tdfshxi]"
)
_ALLOWED = frozenset(_PLAIN) | {name + suffix for name in _MATHS for suffix in ("", "f", "l")}
HEADERS = frozenset(
    [
        *("math.h", "stdint.h", "stddef.h", "string.h", "stdlib.h", "float.h", "omp.h", "immintrin.h"),
        *("stdbool.h", "limits.h", "stdalign.h", "tgmath.h"),
    ]
)
REFUSED = (
    *("constructor", "destructor", "ifunc", "syscall", "dlopen", "dlsym", "fork", "execve", "system", "popen", "_exit"),
    "abort",
)
"""Words that the code of a kernel has no use for."""
RULES = (
    f"The C code includes nothing but {', '.join(sorted(HEADERS))}, has no inline assembly, and calls only the "
    f"mathematics of math.h, plain memory functions and OpenMP. Refused in it: {', '.join(REFUSED)}. Its source is a "
    "constant: it is known without a run of the file.\n"
)


def foreign_calls(data: bytes) -> list[str]:
    """Names that the built object calls and a kernel has no use for; empty where all is well."""
    try:
        names = elf.needed_names(data)
    except (struct.error, ValueError, IndexError):
        return ["a file that is no shared object"]
    return [name for name in names if name not in _ALLOWED and not _COMPILER.fullmatch(name)]
