"""What a built kernel calls stands in its symbol table, however the source spells it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbrl_async.kernels.backends.c import build as backend
from kbrl_async.kernels.funnel import Builder
from protocols.records import Candidate, Fault

Make = Callable[..., Candidate]
BODY = "void f(const float *x, float *y, long n) {{ {} }}"


@pytest.mark.parametrize(
    ("before", "call", "name"),
    [
        ("int PyRun_SimpleString(const char *);", 'PyRun_SimpleString("import torch");', "PyRun_SimpleString"),
        ("#define JOIN(a, b) a##b\nvoid *JOIN(dl, sym)(void *, const char *);", 'JOIN(dl, sym)(0, "x");', "dlsym"),
        ("#define JOIN(a, b) a##b\nlong JOIN(sys, call)(long, ...);", "JOIN(sys, call)(39);", "syscall"),
        ("int open(const char *, int);", 'open("/etc/passwd", 0);', "open"),
    ],
)
def test_calls_that_no_kernel_needs_are_found_in_what_was_built(
    builder: Builder, candidate: Make, monkeypatch: pytest.MonkeyPatch, before: str, call: str, name: str
) -> None:
    source = f"{before}\n{BODY.format(call)}"
    report = builder.build(candidate(source))
    assert (report.fault, report.rule) == (Fault.COMPILE_ERROR, "foreign_call")
    assert name in report.message
    monkeypatch.setattr(backend, "foreign_calls", lambda built: [])
    assert builder.build(candidate(f"{source}\n/* again */")).fault is Fault.OK, "nothing else stands in its way"


@pytest.mark.parametrize(
    "source",
    [
        '#pragma GCC optimize("Ofast")\n#include <math.h>\n'
        + BODY.format("for (long i = 0; i < n; i++) y[i] = expf(x[i]);"),
        "#include <math.h>\n"
        + BODY.format("y[0] = tgammaf(x[0]) + fmodf(x[1], 2) + erff(x[0]) + (float)lround(x[0]);"),
        "#include <omp.h>\n"
        + BODY.format(
            "\n#pragma omp parallel for reduction(+:n)\n"
            "for (int i = 0; i < 4; i++) n += omp_get_thread_num();\ny[0] = n;"
        ),
        "#include <stdlib.h>\n#include <string.h>\n"
        + BODY.format("float *t = malloc(n * 4); memcpy(t, x, n * 4); memset(y, 0, n * 4); free(t);"),
        BODY.format("_Complex float z = x[0]; z *= z; y[0] = __real__ z;"),
        BODY.format("__int128 a = n; a = a * a / 7 % 5; y[0] = (float)a; _Float16 h = x[0]; y[1] = h;"),
    ],
)
def test_mathematics_memory_and_openmp_are_a_kernels_own(builder: Builder, candidate: Make, source: str) -> None:
    report = builder.build(candidate(source))
    assert report.fault is Fault.OK, report.message
