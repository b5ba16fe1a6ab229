"""A language of kernels, complete: what its candidates may hold, how they are built and launched, and what a policy is
told of it.

To add one: a class over `Backend` with an object of it, named in the setting as `package.module:OBJECT` or by an entry
point of the group `kbrl_async.backends`. Ours, in `settings.BACKENDS`, are found the same way. Of a user's own, the
module is imported before any fork, so that confined children have it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from kbrl_async.errors import ConfigError, UserError
from kbrl_async.kernels.backends.sanitize.parts import Sanitized, Sanitizes, SanitizeTask
from kbrl_async.kernels.settings import BACKENDS
from protocols.records import BuildReport, Candidate, Problem

if TYPE_CHECKING:
    from kbrl_async.kernels.backends.building.context import BuildContext


class Shot(msgspec.Struct, frozen=True):
    """A worked example: a reference, and the kernel that replaces it."""

    reference: str
    kernel: str
    speedup: float | None = None


class Backend:
    """See the module. Importing one loads no torch: what needs it is imported where it is used."""

    name: str = ""
    runs_on: ClassVar[frozenset[str]] = frozenset({"cpu"})
    """Kinds of device that its kernels run on, the first part of `"cuda:0"`."""
    prompt: ClassVar[str] = ""
    """The module of its `CONTRACTS` and `SHOTS`; empty: it tells a policy nothing, or has them in another way."""
    hints: ClassVar[Mapping[str, str]] = {}
    """What a policy is told after a turn, by category of `rollouts.prompts.feedback`; where it has its own words."""
    needs_own_kernels: ClassVar[bool] = True
    """Whether a candidate that is the reference's own code is refused."""
    is_recorded: ClassVar[bool] = False
    """Whether all its launches on a CPU go through `launch.recorder.RECORDER`, so that they can be proven there."""
    is_replayed: ClassVar[bool] = False
    """Whether forward on a CPU can be written down: all its own launches are calls of C functions in its artifacts."""
    is_closed: ClassVar[bool] = False
    """Whether its kernels have no way to call a library, so that an operator inside of one is cheating."""
    is_extension: ClassVar[bool] = False
    """Whether its kernels are functions of C++ extensions: those may call the library, return what Python goes on with,
    be local to their file, and be reached past the recorder, so that a launch that was not seen accuses nobody.
    """
    key_prefix: ClassVar[str] = ""
    """How the keys of its artifacts begin, for those of ours: a candidate may have kernels of several. Empty: a bare
    hash."""
    reads_bytes: ClassVar[bool] = False
    """Whether its launcher reads artifacts as bytes, not by path: a child that waits already can be given them."""
    may_tune: ClassVar[bool] = True
    """Whether the first call of its kernels may try several ways."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that a bench with a GPU imports before it forks, beyond what every child has."""

    def missing(self) -> str:
        """Why this host can't build for it, with the cure; empty where it can. Quick: asked at every start."""
        return ""

    def claims(self, source: str) -> float:
        """How surely a source is its own, 0 (not at all) to 1, by its text alone."""
        return 0.0

    def check(self, candidate: Candidate) -> BuildReport | None:
        """The static checks: a report where the candidate must not be built, else None. Executes nothing."""
        return None

    def build(self, candidate: Candidate, problem: Problem | None, context: BuildContext) -> BuildReport:
        """Under the rules `strict` only called after `check` gave None. What of a candidate has to run, runs confined.

        `problem` gives constructor arguments and input shapes to backends that need them; a report says so where
        it is None and was needed. What it puts into `artifacts` is what `prepare` is given on the bench.

        :raises MissingTool: and `DiskFull`, `InfraError`: for what is the host's fault.
        """
        raise NotImplementedError

    def prepare(self, artifacts: dict[str, str], device: str) -> None:
        """In a confined child, before its candidate's source runs: where each built artifact lies.

        `artifacts` are paths by the keys of `BuildReport.artifacts`; `device` is a kind, `"cpu"` or `"cuda"`.
        """

    def remarks(self, candidate: Candidate, context: BuildContext) -> tuple[str, ...]:
        """What its compiler says of the loops of a candidate that it compiles, a line each; none where it can't say."""
        return ()

    def is_interpreted(self, device: str) -> bool:
        """Whether candidates are interpreted on `device`: verified there, and slow, so never timed."""
        return False

    def refuse(self, candidate: str, problem: str) -> None:
        """Called where candidates are interpreted.

        :raises InfraError: the interpreter says nothing about these two sources.
        """

    @property
    def contracts(self) -> Mapping[str, str]:
        """What a candidate has to look like, told to a model that never saw it: an example that scales by two. `""` is
        the usual one; others, such as `"plan"`, are asked for by name. `{source}` is the problem.
        """
        texts: Mapping[str, str] = importlib.import_module(self.prompt).CONTRACTS if self.prompt else {}
        return texts

    @property
    def shots(self) -> tuple[Shot, ...]:
        """Worked examples, the plainest first."""
        found: tuple[Shot, ...] = importlib.import_module(self.prompt).SHOTS if self.prompt else ()
        return found

    def sanitize(self, sanitizer: Sanitizes, task: SanitizeTask, folder: Path) -> Sanitized:
        """Run what was built once under sanitizers on a CPU. `folder` is the caller's, and empty."""
        return Sanitized(not_run=f"there is no sanitizer for {self.name} on {task.device}")


class _Library(Backend):
    """What is measured of torch itself, which needs no kernel of its own. No setting can name it."""

    name = "torch"
    runs_on = frozenset({"cpu", "cuda"})
    needs_own_kernels = False
    is_replayed = True


LIBRARY = _Library()


def backend(name: str) -> Backend:
    """The backend of that name.

    :raises ConfigError: there is none.
    """
    if name == LIBRARY.name:
        return LIBRARY
    try:
        found = BACKENDS.load(name)
    except UserError as error:
        raise ConfigError(error.cause, error.cure) from None
    if not isinstance(found, Backend):
        raise ConfigError(f"{name} is no backend", "Name an object whose class derives from kernels.backends.Backend")
    return found


def prepare(name: str, artifacts: dict[str, str], device: str) -> None:
    """`Backend.prepare` of every backend that built some of these, where a candidate mixes several; `name` is its own.

    In a confined child, before its candidate's source runs.
    """
    if name not in BACKENDS.ours:
        backend(name).prepare(artifacts, device)
        return
    left = dict(artifacts)
    for other in (name, *BACKENDS.ours):
        prefix = backend(other).key_prefix
        mine = {key: path for key, path in left.items() if (key.startswith(prefix) if prefix else ":" not in key)}
        if mine:
            backend(other).prepare(mine, device)
            left = {key: path for key, path in left.items() if key not in mine}


def backends() -> list[str]:
    """Names of all backends that can be had by name."""
    return BACKENDS.names()


def preloads(kind: str) -> tuple[str, ...]:
    """What the children of a bench on such a device have imported before any fork, of every backend of ours for it: an
    import in each child would cost it some 35 ms."""
    found: list[str] = []
    for name, place in BACKENDS.ours.items():
        one = backend(name)
        if kind in one.runs_on:
            found.append(place.partition(":")[0])
            found += one.preload if kind == "cuda" and one.preload and not one.missing() else ()
    return tuple(dict.fromkeys(found))


def runs_on_gpu(name: str) -> bool:
    """Whether backend `name` has use for a GPU."""
    return "cuda" in backend(name).runs_on


def modules_of(name: str) -> tuple[str, ...]:
    """What confined children need imported beforehand for a backend that is not ours: where it is, and its class."""
    if name in BACKENDS.ours or name == LIBRARY.name:
        return ()
    named = (name.partition(":")[0],) if ":" in name else ()
    return (*named, type(backend(name)).__module__)


def guess_backend(source: str, otherwise: str = "c") -> str:
    """The backend that claims `source` most surely; `otherwise` where none does: static checks then explain."""
    claims = {name: backend(name).claims(source) for name in backends()}
    best = max(claims, key=lambda name: claims[name])
    return best if claims[best] > 0 else otherwise
