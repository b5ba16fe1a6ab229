"""Options by which a kernel's arithmetic may differ from its source are found however they are given."""

from __future__ import annotations

import pytest

from kbrl_async.kernels.backends.checks.arithmetic import arithmetic_options


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('#pragma GCC optimize("Ofast")', ("-Ofast",)),
        ('#pragma GCC optimize ("O3,fast-math,unroll-loops")', ("-ffast-math",)),
        ('__attribute__((optimize("-ffast-math", "O3"))) void f(void);', ("-ffast-math",)),
        ('load_inline(extra_cflags=["-O3 -ffast-math", "-fopenmp"])', ("-ffast-math",)),
        ('load_inline(extra_cflags=["-Ofast"]) # and again -Ofast', ("-Ofast",)),
        ('load_inline(extra_cuda_cflags=["--use_fast_math"])', ("--use_fast_math",)),
        ('extra_cuda_cflags=["-ftz=true", "--prec-div=false"]', ("-ftz=true", "--prec-div=false")),
    ],
)
def test_options_that_change_arithmetic_are_found(source: str, found: tuple[str, ...]) -> None:
    assert arithmetic_options(source) == found


@pytest.mark.parametrize(
    "source",
    ["// -Ofast would be faster", "/* -ffast-math */", '"-O3", "-march=native"', "-fno-fast-math", "optimize(model)"],
)
def test_other_words_are_none(source: str) -> None:
    assert arithmetic_options(source) == ()
