"""Is an honest second implementation of a problem right by every input set? The reference itself, in another way.

::

    problem ─cut?─▶ its reference, its secret sets ─▶ the same module in this process ─▶ each set: as a candidate
                         └─ random, fails, does not fit: named, nobody's fault

Ways: `eager`, as it is, which says that both have the same weights; `reordered`, see `reordered`; `compiled` by
torch; `tf32_off`, which a processor has none of. A set that refuses one of them has left its problem's domain, or asks
for more than arithmetic can give. Problems are run as they are, in a process that nothing confines: read them before.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
import torch

from benchmarks.harness import Result, say
from benchmarks.harness.crew import Crew, CrewTask, Work
from benchmarks.verification.cuts import cuts
from benchmarks.verification.reordered import Reordered, step_by_step
from kbrl_async.errors import KbrlError, ProblemError
from kbrl_async.kernels.funnel.verifier import default_bench
from kbrl_async.kernels.problems import load_file, model_contract
from kbrl_async.kernels.verify import compare, values
from kbrl_async.kernels.verify.device import device_of
from kbrl_async.kernels.verify.family import Family
from kbrl_async.kernels.verify.fresh import like
from kbrl_async.kernels.verify.input_set import InputSet
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.references import References
from kbrl_async.kernels.verify.session import CandidateFault
from protocols.records import Problem

Way = Literal["eager", "reordered", "compiled", "tf32_off"]
_CUT_CALL_S = 10.0
"""What one call of a reference may take that was cut to be quick."""
_UNKNOWN = 1 << 62
_IS_LOST = "CUDA error"
_AS_DRAWN = 2
"""Sets that are nominal whatever the reference takes."""


class SecondTry(NamedTuple):
    path: Path
    way: Way
    cut: int


class SecondAnswer(msgspec.Struct):
    """What a second implementation was found to be."""

    sets: int = 0
    wrong: dict[str, str] = {}
    """Of sets by their names: what it was off by, and what is allowed."""
    changed: int = 0
    """Operators that added up in another order, or kernels that torch compiled."""
    nearest: float = 0.0
    """The largest share of what is allowed that any right set needed."""
    kinds: list[str] = []
    """Of the sets: a `nominal` one beyond the second stands for one that the reference did not take."""


def second(
    *,
    problems: Annotated[Path, "a folder of problem files, of level*/ with such, or of pairs"],
    ways: Annotated[tuple[str, ...], "of eager, reordered, compiled, tf32_off"] = get_args(Way),
    cut: Annotated[int, "sizes are made no larger than this; 0: they stay"] = 0,
    compiled_share: Annotated[float, "of the problems, drawn, that are compiled"] = 1.0,
    device: str = "cpu",
    memory_share: Annotated[float, "of the device's memory, that one process may plan with"] = 1.0,
    jobs: int = 1,
    seconds: Annotated[float, "after which nothing further is begun"] = 3600.0,
    patience_s: Annotated[float, "that one way of one problem may take"] = 120.0,
    only: Annotated[str, "of names as level1/19_ReLU, a regular expression"] = "",
    again: Annotated[tuple[str, ...], "states that are tried again all the same"] = (),
    out: Annotated[Path | None, "a file with one JSON object a try; what is in it is not tried again"] = None,
) -> Result:
    """`ok` where something was right and nothing wrong. Problems with the smallest inputs come first."""
    chosen = [way for way in get_args(Way) if way in ways and not (way == "tf32_off" and device == "cpu")]
    tasks = _tasks(problems, chosen, cut, compiled_share, only)
    crew = Crew(jobs, seconds, patience_s, out, again, is_apart=True)
    rows = []
    for row in crew.run(tasks, partial(trying, device, memory_share)):
        rows.append(row)
        say(" ".join(f"{key}={value}" for key, value in row.items()))
    by_way = {way: dict(Counter(row["state"] for row in rows if row["name"].endswith(f" {way}"))) for way in chosen}
    wrong = {row["name"]: row["wrong"] for row in rows if row["state"] == "wrong"}
    right = [row for row in rows if row["state"] == "right"]
    milder = [row["name"] for row in right if row.get("kinds", {}).get("nominal", 0) > _AS_DRAWN]
    return {
        "ok": bool(right) and not wrong, "asked": len(tasks), "tried": len(rows), "states": by_way, "wrong": wrong,
        "left_out": [way for way in ways if way not in chosen],
        "unchanged": sum(row["changed"] == 0 for row in right if row["name"].endswith((" reordered", " compiled"))),
        "milder_sets": len(milder),
        "nearest": dict(sorted(((row["name"], row["nearest"]) for row in right), key=lambda one: -one[1])[:5]),
        "not_tried": {row["name"]: row["message"][:160] for row in rows if row["state"] not in ("right", "wrong")},
    }  # fmt: skip


def _tasks(folder: Path, ways: Sequence[Way], cut: int, compiled_share: float, only: str) -> list[CrewTask]:
    """Ways of one problem follow each other, so that one reference serves them; equal problems count once."""
    files: dict[bytes, tuple[str, Path]] = {}
    for path in sorted([*folder.glob("*.py"), *folder.glob("level*/*.py"), *folder.glob("*/problem.py")]):
        name = path.parent.name if path.name == "problem.py" else f"{path.parent.name}/{path.stem}"
        if re.search(only, name):
            files.setdefault(path.read_bytes(), (name, path))
    known = list(files.values())
    drawn = random.Random(0).sample(known, round(compiled_share * len(known)))
    known.sort(key=lambda one: input_bytes(one[1]))
    return [
        CrewTask(f"{name} {way}", SecondTry(path, way, cut))
        for name, path in known
        for way in ways
        if way != "compiled" or (name, path) in drawn
    ]


def input_bytes(path: Path) -> int:
    """Of one call at its own sizes, of tensors that have no memory; those of which nobody knows come last."""
    try:
        with torch.device("meta"):
            module = model_contract.load("outline", path.read_text())
            tensors: list[torch.Tensor] = []
            values.flatten(list(module.get_inputs()), tensors)
    except Exception:  # whatever the problem's own code raises where tensors have no values
        return _UNKNOWN
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextlib.contextmanager
def trying(device: str, memory_share: float, _number: int, _jobs: int) -> Iterator[Work]:
    """What a worker does with one way of one problem."""
    here = device_of(device)
    options = here.fitted(
        msgspec.structs.replace(default_bench(()), device=device, memory_share=memory_share, references=1)
    )
    quick = msgspec.structs.replace(options, reference_deadline_s=_CUT_CALL_S)
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)  # as a reference's process has it
    with here.zygote(()) as zygote:
        here.open(memory_share)
        of_own_size, of_cut = (References(zygote, each, random.Random(0), here) for each in (options, quick))
        with contextlib.closing(of_own_size), contextlib.closing(of_cut):
            found: dict[Path, Problem] = {}
            generation = zygote.generation

            def tried(given: SecondTry) -> Result:
                nonlocal generation
                references = of_cut if given.cut else of_own_size
                zygote.start()
                here.enter()
                if generation != zygote.generation:  # references died with their zygote
                    generation = zygote.generation
                    references.restart()
                began = time.monotonic()
                told = _tried(given, references, found, torch.device(device))
                if told["state"] in ("right", "wrong"):
                    references.rest()
                else:  # it may be in doubt, or hold what the next one needs
                    references.forget()
                return {"seconds": round(time.monotonic() - began, 1)} | told

            yield tried


def _tried(given: SecondTry, references: References, found: dict[Path, Problem], device: torch.device) -> Result:
    """Whatever it is, it is a row and no exception."""
    way_cut = ""
    try:
        family, way_cut = _family(given, references, found, device)
        answers = [answered(case.reference, given.way, device, case.workload.name) for case in family.cases]
    except ProblemError as error:
        return {"state": "too_large" if "does not fit" in str(error) else "problem", "message": str(error)[:400]}
    except (KbrlError, CandidateFault) as error:  # the latter: its reference's, while it was used
        return {"state": "host", "message": str(error)[:400]}
    except torch.OutOfMemoryError as error:
        return {"state": "no_memory", "message": str(error)[:400], "cut": way_cut}
    except Exception as error:  # the problem's own code in another way, or torch's compiler
        if _IS_LOST in str(error):
            raise  # this process is no use any more: another one goes on
        return {"state": "failed", "message": f"{type(error).__name__}: {error}"[:400], "cut": way_cut}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    wrong = {name: text for one in answers for name, text in one.wrong.items()}
    return {
        "state": "wrong" if wrong else "right", "message": "", "cut": way_cut, "wrong": wrong,
        "sets": sum(one.sets for one in answers), "changed": sum(one.changed for one in answers),
        "nearest": round(max(one.nearest for one in answers), 3),
        "kinds": dict(Counter(kind for one in answers for kind in one.kinds)),
    }  # fmt: skip


def _family(
    given: SecondTry, references: References, found: dict[Path, Problem], device: torch.device
) -> tuple[Family, str]:
    """The references of the problem, and how it was cut: the first way that its reference takes.

    :raises ProblemError: it takes none; of its first one.
    """
    problem = found.get(given.path)
    if problem is not None:
        return references.get(problem), problem.name
    whole = load_file(given.path, shapes=device.type if device.type == "cpu" else "gpu")
    failed: ProblemError | None = None
    for way, text in [*(cuts(whole.source, given.cut) if given.cut else ()), ("", whole.source)]:
        problem = msgspec.structs.replace(whole, source=text, name=way)
        try:
            family = references.get(problem)
        except ProblemError as error:
            failed = failed or error
            continue
        found[given.path] = problem
        return family, way
    assert failed is not None, "its own size was tried"
    raise failed


def answered(reference: Reference, way: Way, device: torch.device, workload: str = "") -> SecondAnswer:
    """By every set of one reference."""
    told = SecondAnswer(sets=len(reference.sets), kinds=[one.name for one in reference.sets])
    with _switched(way):
        call = _called(way, _model(reference, device), told)
        for number, one in enumerate(reference.sets):
            name = f"{workload} {number} {one.name}".strip()
            wrong, share = _compared(reference, one, call)
            told.nearest = max(told.nearest, share)
            if wrong:
                told.wrong[name] = wrong
    return told


@contextlib.contextmanager
def _switched(way: Way) -> Iterator[None]:
    if way != "tf32_off":
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.backends.cuda.matmul.allow_tf32 = False
        yield


def _model(reference: Reference, device: torch.device) -> torch.nn.Module:
    """As the reference's process makes it: of the same seed, on the device where that works."""
    module = model_contract.load("second", reference.problem.source)
    model_contract.seed(reference.seed)
    args, kwargs = model_contract.arguments(module.get_init_inputs())
    args, kwargs = ([_there(one, device) for one in args], {name: _there(one, device) for name, one in kwargs.items()})
    model_contract.seed(reference.seed)
    state = torch.get_rng_state()
    try:
        with device:
            made = module.Model(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        torch.set_rng_state(state)
        made = module.Model(*args, **kwargs)
    moved: torch.nn.Module = made.to(device)
    return moved


def _there(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _called(way: Way, model: torch.nn.Module, told: SecondAnswer) -> Callable[..., Any]:
    if way == "compiled":
        return _compiled(model, told)
    if way != "reordered":
        return model
    mode = Reordered()

    def call(*given: Any) -> Any:
        with step_by_step(model), mode:
            made = model(*given)
        told.changed = mode.changed
        return made

    return call


def _compiled(model: torch.nn.Module, told: SecondAnswer) -> Callable[..., Any]:
    """Afresh, and without a pool of compilers beside this process."""
    import torch._inductor.config
    import torch._inductor.metrics

    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1
    torch._inductor.metrics.reset()
    compiled = torch.compile(model)

    def call(*given: Any) -> Any:
        made = compiled(*given)
        told.changed = torch._inductor.metrics.generated_kernel_count
        return made

    return call


def _compared(reference: Reference, one: InputSet, call: Callable[..., Any]) -> tuple[str, float]:
    """What is wrong, in words; and, where it is right, the largest share of what is allowed that it needed."""
    expected = one.expected
    shaped = [like(block, example) for block, example in zip(one.blocks, reference.examples, strict=True)]
    given = [tensor.clone() for tensor in shaped] if one.mutated else shaped
    got: list[torch.Tensor] = []
    values.flatten(call(*values.restore(reference.tree, given)), got)
    if [(t.shape, t.dtype) for t in got] != [(t.shape, t.dtype) for t in expected]:
        return "its outputs have other shapes or types", 0.0
    found = [compare.difference(*three) for three in zip(got, expected, one.tolerances, strict=True)]
    wrong = [each for each in found if each.wrong]
    shares = [each.worst / each.allowed for each in found if each.allowed > 0 and not each.wrong]
    return "; ".join(map(_in_words, wrong)), max(shares, default=0.0)


def _in_words(found: compare.Difference) -> str:
    return (
        f"{found.wrong} of {found.total}, worst at {list(found.where)}: {found.got:.8g} for {found.expected:.8g}, "
        f"off by {found.worst:.3g} where {found.allowed:.3g} is allowed"
    )
