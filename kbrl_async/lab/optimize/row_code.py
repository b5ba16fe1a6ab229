"""The C lines that compute one row, as they are written: sums and other passes over it, under names of their own.

A `Value` is C text of one kind: a Python number (`number`), one float an element (`each`), one a row (`row`), or one in
all (`all`).
"""

from __future__ import annotations

import msgspec

LOOP = "for (long c = 0; c < cols; c++) "
REDUCTIONS = frozenset(["sum", "mean", "max", "amax", "min", "amin", "logsumexp", "norm", "var", "std"])


class Value(msgspec.Struct, frozen=True):
    kind: str
    code: str
    keep: bool = False
    """Of a row: its dimension is kept, as keepdim=True."""


class RowCode:
    """`lines` stand in the loop over rows, `globals` before it; so many `buffers`, `t0`, `t1` …, hold a row each."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.globals: list[str] = []
        self.buffers = 0
        self._count = 0

    def short(self, value: Value) -> Value:
        """The value under a short name, so that using it twice does not compute it twice."""
        if value.kind != "each" or "(" not in value.code:
            return value
        name = f"t{self.buffers}"
        self.buffers += 1
        self.lines.append(f"{LOOP}{name}[c] = {value.code};")
        return Value("each", f"{name}[c]")

    def reduced(self, name: str, value: Value, unbiased: bool) -> str:
        """One number a row: `name` is one of REDUCTIONS."""
        if name in ("sum", "mean"):
            total = self._accumulate("0.0f", "{s} += {v};", value)
            return total if name == "sum" else f"({total} / cols)"
        if name in ("max", "amax", "min", "amin"):
            less = "fmaxf" if "max" in name else "fminf"
            start = "-INFINITY" if "max" in name else "INFINITY"
            return self._accumulate(start, f"{{s}} = {less}({{s}}, {{v}});", value)
        if name == "norm":
            return f"sqrtf({self._accumulate('0.0f', '{s} += {v} * {v};', self.short(value))})"
        value = self.short(value)
        if name == "logsumexp":
            top = self._accumulate("-INFINITY", "{s} = fmaxf({s}, {v});", value)
            total = self._accumulate("0.0f", f"{{s}} += expf({{v}} - {top});", value)
            return f"({top} + logf({total}))"
        mean = f"({self._accumulate('0.0f', '{s} += {v};', value)} / cols)"
        name_of_mean = self._named(mean)
        deviation = f"{{s}} += ({{v}} - {name_of_mean}) * ({{v}} - {name_of_mean});"
        spread = f"({self._accumulate('0.0f', deviation, value)} / {'(cols - 1)' if unbiased else 'cols'})"
        return spread if name == "var" else f"sqrtf({spread})"

    def softmax(self, name: str, value: Value) -> Value:
        """`name`: softmax or log_softmax."""
        value = self.short(value)
        top = self._accumulate("-INFINITY", "{s} = fmaxf({s}, {v});", value)
        if name == "log_softmax":
            total = self._accumulate("0.0f", f"{{s}} += expf({{v}} - {top});", value)
            return Value("each", f"({value.code} - {self._named(f'{top} + logf({total})')})")
        powers = self.short(Value("each", f"expf({value.code} - {top})"))
        total = self._accumulate("0.0f", "{s} += {v};", powers)
        return Value("each", f"({powers.code} * {self._named(f'1.0f / {total}')})")

    def standardised(self, value: Value, eps: str, *, centred: bool) -> Value:
        """Divided by its row's root mean square; `centred`: after its mean was taken off."""
        value = self.short(value)
        mean = "0.0f"
        if centred:
            mean = self._named(f"{self._accumulate('0.0f', '{s} += {v};', value)} / cols")
        squares = f"{{s}} += ({{v}} - {mean}) * ({{v}} - {mean});"
        spread = self._accumulate("0.0f", squares, value)
        root = self._named(f"1.0f / sqrtf({spread} / cols + {eps})")
        return Value("each", f"(({value.code} - {mean}) * {root})")

    def total(self, name: str, value: Value) -> Value:
        """Sum or mean of all rows together."""
        total = self._fresh("g")
        self.globals.append(f"double {total} = 0.0;")
        part = value.code if value.kind == "row" else self._accumulate("0.0f", "{s} += {v};", value)
        self.lines.append(f"{total} += {part};")
        count = "rows" if value.kind == "row" else "((double)rows * cols)"
        return Value("all", total if name == "sum" else f"({total} / {count})")

    def _accumulate(self, start: str, step: str, value: Value) -> str:
        name = self._fresh("s")
        self.lines += [f"float {name} = {start};", f"{LOOP}{{ {step.format(s=name, v=value.code)} }}"]
        return name

    def _named(self, code: str) -> str:
        name = self._fresh("k_")
        self.lines.append(f"const float {name} = {code};")
        return name

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"
