"""Runs one problem's reference in a child of its own: cheap outputs at KernelBench's tolerances, chance, state, casts.

On the CPU the child is confined like a candidate's; with `device="cuda"` it runs in the worker process itself, because
problems are read before they are used and their files are not hostile. What is found is sent step by step, so that
a step that does not fit leaves the earlier ones.
"""

from __future__ import annotations

import math
import re
import socket
import types
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import torch

from kbrl_async.kernels.audit import state, trials
from kbrl_async.kernels.problems import model_contract as contract
from kbrl_async.kernels.problems.audit_file import (
    FIXED_DEVICE,
    HALF,
    KEEPS_STATE,
    KERNELBENCH,
    RANDOM,
    AuditFinding,
    OutputTrial,
)
from kbrl_async.kernels.sandbox import Isolation

FIGURES = {KERNELBENCH: 1e-4, HALF: 1e-2}
_HALF_TYPES = (torch.float16, torch.bfloat16)
_ELSEWHERE = re.compile(r"(?=.*\bcpu\b).*(expected device|same device)", re.DOTALL)
_RANDOM_SHARE = 1e-5
"""Of the output's scale: larger differences between two runs are not rounding in another order."""
_STEPS = 2.0
"""Of the output's type and scale: so far apart may be what two models answer whose weights lie in other places."""
_OTHER_SEED = 4
"""Of what a call draws itself: a candidate need not draw the same."""


class AuditTask(msgspec.Struct, frozen=True):
    source: str
    device: str = "cpu"
    part: str = "scores"
    """`scores`: randomness, cheap outputs and state; `casts`: what other devices and types do."""
    seeds: tuple[int, ...] = (1, 2, 3)


Step = Literal["start", "run", "trials", "state", "elsewhere", "casts"]


class AuditProbe(msgspec.Struct, frozen=True):
    """What is known so far. `step` is the step that this message ended; after `LAST` of a part nothing follows."""

    step: Step
    findings: tuple[AuditFinding, ...] = ()
    trials: tuple[OutputTrial, ...] = ()
    outputs: tuple[str, ...] = ()
    output_scale: float = 0.0
    bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Inputs and outputs of one call."""
    error: str = ""
    """Why it went no further."""
    out_of_memory: bool = False


def read(data: bytes) -> AuditProbe | None:
    """None for what no probe sends: a problem's own code may have written it."""
    try:
        found = msgspec.msgpack.decode(data, type=AuditProbe)
    except Exception:  # the decoder, too, raises what it likes: RecursionError, UnicodeDecodeError
        return None
    numbers = (found.output_scale, *(n for t in found.trials for n in (t.worst_error, t.wrong_share)))
    return None if any(map(math.isnan, numbers)) else found


Send = Callable[[AuditProbe], None]
_Next = Callable[[AuditProbe], AuditProbe]
LAST: dict[str, Step] = {"scores": "state", "casts": "casts"}


def main(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the confined child; its first message is its isolation."""
    channel.send(msgspec.msgpack.encode(isolation))
    warnings.simplefilter("ignore")  # whoever audits hundreds of problems has not written them
    task = msgspec.msgpack.decode(payload, type=AuditTask)
    run(task, lambda probe: channel.sendall(msgspec.msgpack.encode(probe)))


def run(task: AuditTask, send: Send) -> None:
    """Every step, each told as it ends. What the problem raises is told too."""
    steps = _Steps(task)
    last = AuditProbe("start")
    parts: dict[str, dict[Step, _Next]]
    parts = {
        "scores": {"trials": steps.cheap, "state": steps.state},
        "casts": {"elsewhere": steps.elsewhere, "casts": steps.casts},
    }
    first: dict[Step, _Next] = {"run": steps.first}
    for name, step in (first | parts[task.part]).items():
        try:
            last = msgspec.structs.replace(step(last), step=name)
        except Exception as error:  # the problem's own code: whatever it raises is a result of the audit
            text = f"{type(error).__name__}: {error}"[:400]
            send(msgspec.structs.replace(last, step=name, error=text, out_of_memory=is_out_of_memory(error)))
            return
        send(last)


def is_out_of_memory(error: BaseException) -> bool:
    words = ("can't allocate memory", "not enough memory", "out of memory", "Unable to allocate", "Cannot allocate")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


class _Steps:
    def __init__(self, task: AuditTask) -> None:
        torch.set_grad_enabled(False)
        self.task = task
        self.module = types.ModuleType("problem")
        self.model: torch.nn.Module | None = None
        self.inputs: list[Any] = []
        self.expected: list[torch.Tensor] = []
        self.later: list[torch.Tensor] = []
        """Of the inputs of the second seed, when others had been asked for before."""

    def first(self, probe: AuditProbe) -> AuditProbe:
        """Build it, run it twice on the same inputs."""
        self.model = self._anew()
        self.inputs = self._draw(self.task.seeds[0])
        before = [_checksum(item) for item in self.inputs]
        self.expected = self._forward(self.inputs)
        scale = max((_scale(tensor) for tensor in self.expected), default=0.0)
        size = sum(t.numel() * t.element_size() for t in (*_tensors(self.inputs), *self.expected))
        found = []
        if self.task.part == "casts":
            return probe
        changed = [i for i, item in enumerate(self.inputs) if not _same(_checksum(item), before[i])]
        if changed:
            found.append(AuditFinding("mutates_inputs", f"forward changes input {changed[0]}"))
            self.inputs = self._draw(self.task.seeds[0])
        again = self._forward(self.inputs)
        if not _are_same(again, self.expected):
            found.append(self._unsteady(f"{_apart(again, self.expected)}; the largest output is {scale:.3g}"))
        if not self.expected or not any(tensor.numel() for tensor in self.expected):
            raise ValueError("forward returns no tensor with elements")
        outputs = tuple(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in self.expected)
        return AuditProbe("run", tuple(found), (), outputs, scale, size)

    def cheap(self, probe: AuditProbe) -> AuditProbe:
        """Outputs that do not do the work, at KernelBench's two tolerances, on inputs of every seed."""
        self.later = self._forward(self._draw(self.task.seeds[1]))  # before anything else of another shape is asked
        names = ("zeros", "constant", "input_independent", "half_rows", "half_batch")
        fits: dict[tuple[str, str], list[trials.Fit]] = {(n, f): [] for n in names for f in FIGURES}
        seen = self.expected
        typical = trials.constants(seen)

        def offered(name: str, got: list[torch.Tensor] | None, expected: list[torch.Tensor]) -> None:
            for tolerance, figure in FIGURES.items():
                if got is not None and _fits_in_shape(got, expected):
                    fits[name, tolerance].append(trials.all_fit(got, expected, figure))

        for number, seed in enumerate(self.task.seeds):
            given = self.inputs if number == 0 else self._draw(seed)
            self.inputs = []  # of large ones no more are kept than are looked at next
            expected = (seen, self.later)[number] if number < 2 else self._forward(given)
            offered("half_batch", self._half_batch(given, expected), expected)
            del given
            offered("zeros", trials.zeros(expected), expected)
            offered("half_rows", trials.half_rows(expected), expected)
            if number > 0:
                offered("constant", typical, expected)
                offered("input_independent", seen, expected)
            del expected
        made = tuple(trials.trial(name, tolerance, listed) for (name, tolerance), listed in fits.items() if listed)
        found = tuple(finding(trial) for trial in made if trial.passes)
        return msgspec.structs.replace(probe, findings=(*probe.findings, *found), trials=made)

    def state(self, probe: AuditProbe) -> AuditProbe:
        """Whether a first call leaves behind what later answers depend on: one that was asked for other inputs before,
        and one that was not, as are two candidates whose inputs come in another order.
        """
        if {RANDOM, KEEPS_STATE} & {one.kind for one in probe.findings}:
            return probe
        self.model, self.inputs = None, []  # the new one gets its room
        try:
            text = self._left_behind()
        except Exception:  # the problem's own code, which may not be loaded twice: then this is not known
            return probe
        found = [AuditFinding(KEEPS_STATE, text)] if text else []
        return msgspec.structs.replace(probe, findings=(*probe.findings, *found))

    def _left_behind(self) -> str:
        """What, or nothing."""
        model = self._anew()
        given = self._draw(self.task.seeds[1])
        contract.seed(_OTHER_SEED)
        found = self._forward(given, model)
        if _are_same(found, self.later, _STEPS):
            return ""
        model = self._anew()
        before, given = state.kept(model), self._draw(self.task.seeds[0])
        if not _are_same(self._forward(given, model), self.expected, _STEPS):
            return ""  # it is built of numbers that no seed decides, and a candidate is given those
        text = f"answers to the same inputs differ by {_apart(found, self.later)} with the inputs of the first call"
        return f"{text}{_of(state.changed(before, state.kept(model)))}"

    def _unsteady(self, apart: str) -> AuditFinding:
        """Of one that answers the same inputs in two ways: by chance, or, where what it draws is the same too, because
        the call before has changed something.
        """
        text = f"two runs on the same inputs differ by {apart}"
        try:
            (first, second, what), (again, *_) = self._twice(), self._twice()
        except Exception:  # the problem's own code; what is known is enough to leave it out
            return AuditFinding(RANDOM, text)
        if _are_same(first, again) and not _are_same(first, second):
            return AuditFinding(KEEPS_STATE, f"{text}{what}")
        return AuditFinding(RANDOM, text)

    def _twice(self) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
        """Two answers of a new one to the same inputs with the same draws, and what it has changed."""
        model, answers = self._anew(), []
        before = state.kept(model)
        for _ in range(2):
            given = self._draw(self.task.seeds[0])
            contract.seed(_OTHER_SEED)
            answers.append(self._forward(given, model))
        return answers[0], answers[1], _of(state.changed(before, state.kept(model)))

    def casts(self, probe: AuditProbe) -> AuditProbe:
        """Everything cast to one type, as KernelBench does: what integers among the inputs say to that."""
        found = [text for dtype in (torch.float32, *_HALF_TYPES) if (text := self._cast(dtype))]
        return msgspec.structs.replace(
            probe, findings=(*probe.findings, *(AuditFinding("dtype_cast", text) for text in found))
        )

    def elsewhere(self, probe: AuditProbe) -> AuditProbe:
        """What it says to weights and inputs that are not on the CPU, shown without a GPU by tensors without memory;
        one that asks for CUDA by name may behave otherwise there.
        """
        if self.task.device != "cpu" or "cuda" in self.task.source:
            return probe
        given = [item.to("meta") if isinstance(item, torch.Tensor) else item for item in self.inputs]
        try:
            self._forward(given, self._build().to("meta"))
        except Exception as error:  # the problem's own code, and what works on values only
            if _ELSEWHERE.search(str(error)):
                fixed = AuditFinding(FIXED_DEVICE, str(error)[:160])
                return msgspec.structs.replace(probe, findings=(*probe.findings, fixed))
        return probe

    def _cast(self, dtype: torch.dtype) -> str:
        """What goes wrong; empty: nothing, or nothing that this device can show."""
        name = str(dtype).removeprefix("torch.")
        whole = [i for i, t in enumerate(self.inputs) if isinstance(t, torch.Tensor) and not t.is_floating_point()]
        if dtype is torch.float32 and not whole:
            return ""
        given = [item.to(dtype) if isinstance(item, torch.Tensor) else item for item in self.inputs]
        lost = [i for i in whole if not torch.equal(given[i].to(self.inputs[i].dtype), self.inputs[i])]
        if lost:
            return f"input {lost[0]} is {self.inputs[lost[0]].dtype}, and {name} can't hold its values"
        try:
            got = self._forward(given, self._build().to(dtype))
        except Exception as error:  # the problem's own code
            if is_out_of_memory(error) or "not implemented for" in str(error):
                return ""
            integers = f" (input {whole[0]} is {self.inputs[whole[0]].dtype})" if whole else ""
            return f"{name}{integers}: {type(error).__name__}: {error}"[:300]
        finite = all(bool(torch.isfinite(t).all()) for t in self.expected if t.is_floating_point())
        broken = any(not bool(torch.isfinite(t).all()) for t in got if t.is_floating_point())
        return f"{name} gives values that are not finite" if finite and broken else ""

    def _half_batch(self, given: list[Any], expected: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The answer to half of the rows, where its shape does not tell it apart."""
        rows = {item.shape[0] for item in _tensors(given) if item.dim()}
        if len(rows) != 1 or min(rows) < 2 or any(t.dim() and t.shape[0] in rows for t in expected):
            return None
        half = min(rows) // 2
        cut = [item[:half] if isinstance(item, torch.Tensor) and item.dim() else item for item in given]
        try:
            return self._forward(cut)
        except Exception:  # the problem's own code: a reference that needs whole batches has no half
            return None

    def _anew(self) -> torch.nn.Module:
        """One that was never called, of a module whose names nothing was written to; what that draws is the same."""
        contract.seed(0)
        self.module = contract.load("problem", self.task.source)
        return self._build()

    def _build(self) -> torch.nn.Module:
        contract.seed(0)
        args, kwargs = contract.arguments(self.module.__dict__["get_init_inputs"]())
        contract.seed(0)
        model = self._there(lambda: self.module.__dict__["Model"](*args, **kwargs))
        assert isinstance(model, torch.nn.Module)
        return model.to(self.task.device)

    def _draw(self, seed: int) -> list[Any]:
        contract.seed(seed)
        items = list(self._there(self.module.__dict__["get_inputs"]))
        return [item.to(self.task.device) if isinstance(item, torch.Tensor) else item for item in items]

    def _there(self, make: Callable[[], Any]) -> Any:
        """Made on the device, where that goes: a processor needs seconds for gigabytes of random numbers."""
        try:
            with torch.device(self.task.device):
                return make()
        except (RuntimeError, TypeError, ValueError) as error:
            if self.task.device == "cpu" or is_out_of_memory(error):
                raise
            return make()

    def _forward(self, given: list[Any], model: torch.nn.Module | None = None) -> list[torch.Tensor]:
        asked = model or self.model
        assert asked is not None
        return state.apart_from(asked, _tensors(asked(*given)))


def finding(trial: OutputTrial) -> AuditFinding:
    """For a trial that passes."""
    text = f"passes on {trial.passed} of {trial.inputs} input sets; largest error {trial.worst_error:.3g}"
    return AuditFinding(trial.name, text, trial.tolerance)


def _apart(got: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    shapes = [[list(tensor.shape) for tensor in each] for each in (got, expected)]
    return f"{trials.all_fit(got, expected, 0.0).worst:.3g}" if shapes[0] == shapes[1] else "their shapes"


def _are_same(got: list[torch.Tensor], expected: list[torch.Tensor], steps: float = 0.0) -> bool:
    """But for rounding in another order, or `steps` of the outputs' type where that is more."""
    if [tensor.shape for tensor in got] != [tensor.shape for tensor in expected]:
        return False
    scale = max((_scale(tensor) for tensor in expected), default=0.0)
    step = max((torch.finfo(tensor.dtype).eps for tensor in expected if tensor.is_floating_point()), default=0.0)
    return trials.all_fit(got, expected, 0.0).worst <= max(_RANDOM_SHARE, steps * step) * max(scale, 1e-30)


def _of(names: str) -> str:
    return f": forward changes {names}" if names else ""


def _fits_in_shape(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    pairs = zip(got, expected, strict=True) if len(got) == len(expected) else ()
    return len(got) == len(expected) and all(a.numel() in (1, b.numel()) for a, b in pairs)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _scale(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    if tensor.is_floating_point():
        tensor = torch.nan_to_num(trials.widened(tensor))
    low, high = torch.aminmax(tensor)
    return max(abs(float(low)), abs(float(high)))


def _checksum(item: Any) -> tuple[float, float] | None:
    """Enough to see a change; a copy of the inputs may not fit."""
    if not isinstance(item, torch.Tensor) or item.numel() == 0:
        return None
    flat = item.flatten()
    chunks = (flat[i : i + trials.CHUNK] for i in range(0, flat.numel(), trials.CHUNK))
    total = sum(float(chunk.sum(dtype=torch.float64)) for chunk in chunks)
    return total, float(flat[:: max(1, flat.numel() // 4096)].double().square().sum())


def _same(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    return a == b or (a is not None and b is not None and all(x != x and y != y for x, y in zip(a, b, strict=True)))
