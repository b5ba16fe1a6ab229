"""The folder of a run: made, found again, and continued.

::

    runs/.lock            held while a folder is chosen or made
    runs/latest           → the newest run that has begun, replaced atomically
    runs/NAME/config.yaml the resolved configuration, which every service of the run reads
    runs/NAME/logs/  metrics/  tensorboard/  …
    runs/NAME/processes/  who lives, and how the others ended: see `standing`
    runs/NAME/summary.json   written last: the run has ended

A name that is taken by an unfinished run continues it; one taken by a finished run gives way to NAME-2, NAME-3, ….

Invariants
* A run folder appears with its config.yaml in it, or not at all.
* An unfinished run is only continued by a configuration of the same experiment (`loading.CHANGEABLE`).
* A start that failed before the first answer is not `latest` to any command, nor, once it is over, by the link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kbrl_async.durable import numbered, write_atomically
from kbrl_async.errors import CheckpointError, ConfigError, DiskFull, KbrlError
from kbrl_async.runs.archive.archive import FILE as ARCHIVE
from kbrl_async.runs.archive.archive import ArchiveReader
from kbrl_async.runs.config.loading import CONFIG_FILE, environment, forbidden_changes, format_value, load, to_yaml
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.standing import SUMMARY_FILE as SUMMARY_FILE
from kbrl_async.runs.standing import RunStatus, forget, standing
from kbrl_async.runs.standing import is_finished as is_finished
from kbrl_async.weights import POLICY_PREFIX

LATEST = "latest"
FOLDERS = ("logs", "metrics", "tensorboard")


class Run(msgspec.Struct, frozen=True):
    """A run's folder: from `plan` before anything is on disk, from `prepare` as it lies there."""

    path: Path
    config: Config
    """As stored: `name` is the folder's."""
    resumed: bool


def load_run(run_dir: Path | str) -> Config:
    """The configuration that a run folder stores.

    :raises ConfigError: no run folder, or its config.yaml was edited into something wrong.
    """
    stored = Path(run_dir) / CONFIG_FILE
    if not stored.is_file():
        raise ConfigError(f"{run_dir} is no run folder: it has no {CONFIG_FILE}", "Prepare a run with 'kbrl prepare'")
    return load([stored])


def plan(config: Config) -> Run:
    """Which folder this configuration runs in, and whether it continues a run there.

    :raises ConfigError: the unfinished run of that name is another experiment.
    :raises CheckpointError: `resume` names no unfinished run.
    """
    if config.rounds:
        raise ConfigError("rounds are several runs, and this begins one", "Use 'kbrl train', or leave rounds out")
    return _plan_resume(config) if config.resume else _plan_named(config)


def _plan_resume(config: Config) -> Run:
    path = Path(config.resume or "")
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"cannot resume {path}: it is no run folder with a {CONFIG_FILE}", "'kbrl runs' lists them"
        )
    path = path.resolve() if path.is_symlink() else path
    if is_finished(path):
        cure = f"See it with 'kbrl summary {path}', or start another run with name=…"
        raise CheckpointError(f"cannot resume {path}: that run has finished", cure)
    return _continued(path, replace(config, resume=None))


def _plan_named(config: Config) -> Run:
    for path in _candidates(Path(config.log_path), config.run_name):
        if not path.exists():
            return Run(path=path, config=replace(config, name=path.name), resumed=False)
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(f"{path} exists and is no run folder: it has no {CONFIG_FILE}", "Move it, or set name=…")
        if not is_finished(path):
            return _continued(path, config)
    raise AssertionError("names never end")


def _candidates(root: Path, name: str) -> Iterator[Path]:
    yield root / name
    for number in itertools.count(2):
        yield root / f"{name}-{number}"


def _continued(path: Path, config: Config) -> Run:
    wanted = replace(config, name=path.name, log_path=str(path.parent))
    _refuse_another_experiment(path, load_run(path), wanted)
    return Run(path=path, config=wanted, resumed=True)


def _refuse_another_experiment(path: Path, stored: Config, wanted: Config) -> None:
    if changes := forbidden_changes(stored, wanted):
        key, (old, new) = next(iter(changes.items()))
        cause = f"{path} is an unfinished run with {key}={format_value(old)}, not {format_value(new)}"
        raise ConfigError(cause, f"Continue it with {key}={format_value(old)}, or start another run with name=…")


def prepare(config: Config) -> Run:
    """Make or find the run folder of `config`, store the resolved configuration, point `latest` at it."""
    root = _root(config)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / ".lock"):
            todo = plan(config)
            forget(todo.path)
            return _carry_out(todo)


def ensure_run(env: Mapping[str, str] | None = None) -> Path:
    """The run that a service belongs to: `KBRL_RUN_DIR`, else the one that the variables describe.

    Where they name a file, a run or one to resume, that is what `kbrl train` would make or continue. Else it is the
    unfinished latest run with what the variables may change of it, or a new default one.

    Safe to call from many processes at once: all get the same folder. A service calls it once and hands
    `KBRL_RUN_DIR` on to its children, so that a child that starts after the run has ended opens no new run.

    :raises ConfigError: the variables describe another experiment than the unfinished run that they lead to.
    """
    env = os.environ if env is None else env
    if given := env.get("KBRL_RUN_DIR"):
        load_run(given)
        return Path(given)
    files = [env["KBRL_CONFIG"]] if env.get("KBRL_CONFIG") else []
    variables = environment(env)
    config = load(files, env=variables)
    root = _root(config)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / ".lock"):
            is_named = bool(files or config.name or config.resume)
            return _carry_out(plan(config) if is_named else _plan_latest(config, variables)).path.resolve()


def _plan_latest(config: Config, variables: Mapping[str, str]) -> Run:
    latest = (Path(config.log_path) / LATEST).resolve()
    if not (latest / CONFIG_FILE).is_file() or is_finished(latest):
        return plan(config)
    stored, asked = load_run(latest), load([latest / CONFIG_FILE], env=variables)
    # Where it lies stays: services may see the folder by different paths.
    wanted = replace(asked, name=stored.name, log_path=stored.log_path)
    _refuse_another_experiment(latest, stored, wanted)
    return Run(path=latest, config=wanted, resumed=True)


def _root(config: Config) -> Path:
    return Path(config.resume).parent if config.resume else Path(config.log_path)


def _carry_out(todo: Run) -> Run:
    if todo.resumed:
        write_atomically(todo.path / CONFIG_FILE, to_yaml(todo.config))
    else:
        _create(todo)
    for folder in FOLDERS:
        (todo.path / folder).mkdir(exist_ok=True)
    _point_latest(todo.path)
    return todo


def _create(todo: Run) -> None:
    fresh = todo.path.with_name(f".{todo.path.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        write_atomically(fresh / CONFIG_FILE, to_yaml(todo.config))
        fresh.rename(todo.path)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def runs_in(log_path: Path) -> list[Path]:
    """The run folders there, the one that was started last first."""
    found = [path for path in log_path.glob("[!.]*") if (path / CONFIG_FILE).is_file() and not path.is_symlink()]
    return sorted(found, key=lambda path: (path / CONFIG_FILE).stat().st_mtime, reverse=True)


def latest(log_path: Path) -> Path | None:
    """The newest run, which is what `latest` points at, unless that start has failed; None where there is none."""
    linked = (log_path / LATEST).resolve()
    candidates = [linked, *runs_in(log_path)]
    return next((p for p in candidates if (p / CONFIG_FILE).is_file() and not _failed_to_start(p)), None)


def settle_latest(run_dir: Path) -> None:
    """Once a run's processes are gone: where it has failed to start, `latest` is again what it was before."""
    root = run_dir.parent
    with writing(root), locked(root / ".lock"):
        if (root / LATEST).resolve() != run_dir.resolve() or not _failed_to_start(run_dir):
            return
        before = latest(root)
        if before is None:
            (root / LATEST).unlink()
        else:
            _point_latest(before)


def _failed_to_start(run_dir: Path) -> bool:
    return standing(run_dir).state is RunStatus.CRASHED and not _has_begun(run_dir)


def _has_begun(run_dir: Path) -> bool:
    """Whether anything has come of it: an answer, or an update."""
    if any(version for version, _ in numbered(run_dir / "policies", POLICY_PREFIX)):
        return True
    try:
        with ArchiveReader(run_dir / ARCHIVE) as archive:
            return archive.count() > 0
    except KbrlError:
        return False


def _point_latest(run_dir: Path) -> None:
    link = run_dir.with_name(LATEST)
    fresh = run_dir.with_name(f".{LATEST}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(run_dir.name)
    fresh.replace(link)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file lock `path`; who holds it only makes a folder, so the wait is short."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write into errors with a cure."""
    try:
        yield
    except OSError as error:
        raise refused(error, where) from error


def refused(error: OSError, where: Path, cure: str = "Set log_path=… to a folder that you may write") -> KbrlError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"no space left for {where}", "Free some, or set log_path=… to another disk")
    return ConfigError(f"cannot write to {where}: {error.strerror}", cure)
