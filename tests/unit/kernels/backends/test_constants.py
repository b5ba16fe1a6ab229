"""Kernel sources that a candidate builds from constants are known without running it; everything else is refused."""

from __future__ import annotations

import ast

import pytest

from kbrl_async.kernels.backends.checks.constants import Constants


def value(expression: str, before: str = "") -> str | None:
    tree = ast.parse(f"{before}\nTHE_ONE = {expression}\n")
    node = tree.body[-1]
    assert isinstance(node, ast.Assign)
    return Constants(tree).texts((node.value,), ())[0][0]


CONSTANT = [
    ("f'{A}-{B:>3}'", "A, B = 1, 2", "1-  2"),
    ("f'{A}-{B:>3}{A!r}'", "A = 'x'\nB = 7", "x-  7'x'"),
    ("'a' + 'b' * 3", "", "abbb"),
    ("'%d of %s' % (1, 'x')", "", "1 of x"),
    ("'{} {n}'.format(1, n=2)", "", "1 2"),
    ("'-'.join(str(i * 2) for i in range(3))", "", "0-2-4"),
    ("'-'.join([f'{n}' for n in ('a', 'b')])", "", "a-b"),
    ("textwrap.dedent('  a')", "import textwrap", "a"),
    ("TABLE['k'].upper()", "TABLE = {'k': 'v'}", "V"),
    ("make('x', n=2)", "def make(a, n=1):\n    'Doc.'\n    return a * n", "xx"),
    ("Config.TEXT", "class Config:\n    N = 3\n    TEXT = f'{N}'", "3"),
    ("'a;b'.split(';')[1]", "", "b"),
]


@pytest.mark.parametrize(("expression", "before", "wanted"), CONSTANT)
def test_constant_expressions_have_their_value(expression: str, before: str, wanted: str) -> None:
    assert value(expression, before) == wanted
    scope: dict[str, object] = {"textwrap": __import__("textwrap")}
    exec(before, scope)
    assert eval(expression, scope) == wanted, "the same as Python says"


@pytest.mark.parametrize(
    ("expression", "before"),
    [
        ("str(torch.rand(1))", ""),
        ("A", "A = 'x'\nA = 'y'"),
        ("A", "A = 'x'\nA += 'y'"),
        ("A", "A = 'x'\nA, B = 'p', 'q'"),
        ("A", "A, B = 'pq'"),
        ("A", "A = 'x'\nfor A in ('p', 'q'): pass"),
        ("str(1)", "str = repr"),
        ("'{0.__class__}'.format(1)", ""),
        ("'{:99999999}'.format(1)", ""),
        ("f'{1:999999999}'", ""),
        ("'%*d' % (999999999, 1)", ""),
        ("'a' * 10 ** 9", ""),
        ("'a' * 1000 * 1000 * 1000", ""),
        ("'aa'.replace('a', 'b' * 1000000)", ""),
        ("''.join('a' * 1000 for i in range(100000))", ""),
        ("f(1)", "def f(n):\n    return f(n)"),
        ("open('/etc/passwd').read()", ""),
        ("1 + 2", ""),
    ],
)
def test_what_is_no_constant_or_too_large_is_none(expression: str, before: str) -> None:
    assert value(expression, before) is None
