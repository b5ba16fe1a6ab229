"""What must be right before anything is written or started; each check raises one error with its cure."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from kbrl_async.errors import (
    AddressTaken,
    CheckpointError,
    ConfigError,
    DiskFull,
    HostError,
    MissingTool,
    ProblemError,
    UserError,
)
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.problems import downloads
from kbrl_async.kernels.problems.split import HELDOUT
from kbrl_async.keyring import Keyring
from kbrl_async.rollouts.retrieval.store import MANIFEST as INDEX_MANIFEST
from kbrl_async.runs.config import Config, available_cores, bound, cpu_layout, endpoints, placement
from kbrl_async.runs.demonstrations import archives
from kbrl_async.runs.demonstrations.reading import files_of
from kbrl_async.runs.folder import Run, refused, runs_in
from kbrl_async.runs.origins import SMALL, cache_folder
from kbrl_async.runs.problems import excluded_told, problems_of, split_told
from kbrl_async.runs.sizing import layout
from kbrl_async.runs.sizing.footprint import GB
from kbrl_async.sampling.vllm.options import check_installed
from kbrl_async.secret import secret
from kbrl_async.shapes import ModelShape, read_shape
from kbrl_async.tinker_service import KEY as TINKER_KEY
from kbrl_async.weights import MANIFEST
from protocols.sockets import AddressError, BoundRouter

SPARE_BYTES = 2**30
"""Room for checkpoints, journals and logs beside the artifact store."""
PROBE = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"


def check(plan: Run, *, starts_here: bool = True) -> None:
    """All checks, the cheap ones first. Nothing is left behind.

    :param starts_here: its processes start on this host, which must have what they compute with.
    :raises KbrlError: the first thing that is wrong.
    """
    config = plan.config
    check_cores(config)
    check_problems(config)
    check_files(config)
    check_policy(config)
    check_length(config)
    check_policy_url(config.policy_url)
    check_engine(config)
    check_extras(config)
    check_host(plan, starts_here=starts_here)


def check_host(plan: Run, *, starts_here: bool = True) -> None:
    """What a run and an evaluation need of this host."""
    config = plan.config
    gpus = placement.inventory(os.environ) if starts_here or config.placement is not None else []
    if config.placement is not None:
        placement.check_fit(config, gpus)
    if starts_here:
        check_devices(config, gpus)
        check_backend(config)
        check_memory(config, gpus)
    shape = shape_named(config.model_name) if config.learner.engine == "torch" else None
    checkpoints = 0 if shape is None else round(layout.checkpoints_on_disk(config, shape))
    check_disk(plan.path, config.compile_farm.store_max_bytes + SPARE_BYTES, checkpoints)
    if config.model_name == SMALL:
        check_writable(cache_folder(config), "Set cache_path=… to a folder that you may write")
    if config.tensorboard.log_dir is not None:
        check_writable(Path(config.tensorboard.log_dir), "Set tensorboard.log_dir=… to a folder that you may write")
    check_addresses(plan)
    if config.backend == "c":
        check_compiler()


def check_cores(config: Config) -> None:
    cores = available_cores()
    cpu_layout(config, cores)
    if len(cores) < 2:
        print("warning: one core only: timings will be noisy and the run slow", file=sys.stderr)


def check_problems(config: Config) -> None:
    """Every problem file parses, and there is one to train on; what is held out of a user's problems is said."""
    found = problems_of(config, config.levels)
    if all(problem.split == HELDOUT for problem in found):
        raise ProblemError(f"all problems of {config.problems} are held out", "Lower heldout_share, or unmark some")
    downloads.check(found)
    for told in filter(None, (split_told(config, found), excluded_told(config, found))):
        print(f"warning: {told}", file=sys.stderr)


def check_files(config: Config) -> None:
    """What the configuration names is there. Demonstrations are read later, with the policy's tokenizer.

    :raises UserError: a file or run that is not there, or of a kind that can't be read.
    """
    prompt = config.prompt
    if prompt.file is not None and not Path(prompt.file).expanduser().is_file():
        raise ConfigError(f"prompt.file: there is no file {prompt.file}", "Give a template's path; see docs/prompts.md")
    if prompt.index is not None and not (Path(prompt.index).expanduser() / INDEX_MANIFEST).is_file():
        cure = "Make one with: kbrl index build"
        raise ConfigError(f"prompt.index: {prompt.index} holds no index, it has no {INDEX_MANIFEST}", cure)
    if config.timing_bench.likely_first:
        from kbrl_async.runs.value import chances_of  # takes numpy

        chances_of(config.timing_bench.likely_first)
    for source in config.demonstrations.files if config.evaluation.policy is None else ():
        path = Path(source).expanduser()
        if not archives.is_run(path):
            files_of(path)


def check_policy(config: Config) -> None:
    """A policy that is a folder is there and holds a model; a name is looked up when it is loaded."""
    if config.model_name == SMALL:  # else refused as a missing run, where one works below log_path
        return
    folder, root = Path(config.model_name).expanduser(), Path(config.log_path).expanduser()
    if any((folder / name).is_file() for name in ("config.json", MANIFEST)):  # a model, or a policy
        return
    if root in folder.parents or root.resolve() in folder.resolve().parents:
        near = difflib.get_close_matches(folder.name, [path.name for path in runs_in(root)], 1)
        cure = f"Did you mean model_name={root / near[0]}?" if near else "'kbrl runs' lists those that there are"
        raise CheckpointError(f"model_name: there is no run {folder}", cure)
    if folder.is_absolute() or config.model_name.startswith((".", "~")):
        cure = "Give a folder that a model was saved to, or model_name=small"
        raise CheckpointError(f"model_name: {folder} holds no model, it has no config.json", cure)


def check_policy_url(url: str | None) -> None:
    """Its driver is installed, and a folder of this host may be written. Whether a store elsewhere answers shows when
    the first version is published.

    :raises KbrlError: versions can't be uploaded there.
    """
    if url is None:
        return
    from fsspec.core import url_to_fs

    try:
        files, root = url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"policy_url={url} can't be opened: {error}", "Use file://…, or install its driver") from None
    except OSError as error:
        raise HostError(f"policy_url={url} does not answer: {error}", "Check the address and the network") from None
    if "file" in files.protocol:
        check_writable(Path(root), "Set policy_url=… to a folder that you may write")


def check_engine(config: Config) -> None:
    """An endpoint can be trained on only where it proves what it samples from; the engine refuses it too."""
    if config.sampler.engine == "openai" and not config.sampler.train_logprobs:
        cause = "sampler.engine=openai cannot train: endpoints return no log-probs of the sampling distribution"
        raise ConfigError(cause, "Train with sampler.engine=transformers, or see sampler.train_logprobs")
    if config.sampler.engine == "vllm":
        check_installed()
    if config.sampler.engine == "tinker":
        secret(config.sampler.api_key_env or TINKER_KEY, "sampler.api_key_env", os.environ)


def check_extras(config: Config) -> None:
    """Libraries that only some settings need."""
    wanted = {
        "torchao": ("learner.optimizer", config.learner.optimizer == "adamw_8bit", "torchao"),
        "bitsandbytes": ("learner.base_quantisation", config.learner.base_quantisation != "none", "bitsandbytes"),
        "tinker": ("learner.engine=tinker", config.learner.engine == "tinker", "'kbrl-async[tinker]'"),
        "wandb": ("metrics.wandb_project", config.metrics.wandb_project is not None, "'kbrl-async[wandb]'"),
        "mlflow": ("metrics.mlflow_uri", config.metrics.mlflow_uri is not None, "'kbrl-async[mlflow]'"),
        "opentelemetry": ("metrics.otlp_endpoint", config.metrics.otlp_endpoint is not None, "'kbrl-async[otel]'"),
    }
    for module, (key, is_wanted, package) in wanted.items():
        if is_wanted and importlib.util.find_spec(module) is None:
            raise MissingTool(f"{key} needs {module}, and it is not installed", f"pip install {package}")


def check_devices(config: Config, gpus: Sequence[placement.Gpu]) -> None:
    """Who shall compute on a GPU has one, and a PyTorch that can use it. Imports no torch, which takes a second.

    :param gpus: those that this process may use.
    """
    needs_gpu = "cpu" not in backend(config.backend).runs_on
    if needs_gpu and config.timing_bench.device == "cpu":
        cause = f"timing_bench.device=cpu: kernels of backend={config.backend} run on a GPU"
        raise ConfigError(cause, "Leave it out, or use backend=c")
    if config.device == "cuda":
        wanted = "device=cuda"
    elif needs_gpu:
        wanted = f"backend={config.backend}, which a bench times on a GPU"
    else:
        return
    otherwise = "backend=c" if needs_gpu else "device=cpu"
    if not gpus:
        raise HostError(f"{wanted}: this host has no GPU that may be used", f"See nvidia-smi, or use {otherwise}")
    if importlib.metadata.version("torch").endswith("+cpu"):
        raise MissingTool(f"{wanted}: this PyTorch computes on CPUs only", f"Install one for CUDA, or use {otherwise}")


def check_length(config: Config) -> None:
    """An answer may be so long, and a prompt still has room before it, as far as the policy's shape is known."""
    shape = shape_named(config.model_name)
    if shape is not None and 0 < shape.positions <= config.max_tokens:
        cause = f"max_tokens={config.max_tokens} leaves no room in the {shape.positions} positions of its model"
        raise ConfigError(cause, "Lower it, and of a rehearsal its --length")


def check_memory(config: Config, gpus: Sequence[placement.Gpu]) -> None:
    """What the policy needs is there, as far as its shape is known before it is loaded.

    :raises HostError: it can't fit.
    """
    if (shape := shape_named(config.model_name)) is not None:
        layout.check(config, shape, gpus, layout.host_memory())


def shape_named(model: str) -> ModelShape | None:
    """Of a model or of a run's policy; None for the small policy, and for what only the network knows."""
    if model == SMALL:
        return None
    manifest = Path(model).expanduser() / MANIFEST
    if manifest.is_file():
        return shape_named(str(msgspec.json.decode(manifest.read_bytes())["base_model"]))
    try:
        return read_shape(model)
    except UserError:
        return None


def check_backend(config: Config) -> None:
    """The farm can build the run's kernels."""
    if why := backend(config.backend).missing():
        raise MissingTool(f"backend={config.backend}: {why}")


def check_disk(run_dir: Path, needed: int, checkpoints: int = 0) -> None:
    """There is room for so many bytes, and for those of checkpoints, and we may write."""
    who, cure = "the run", "set log_path=… to another disk, or lower compile_farm.store_max_bytes"
    if checkpoints > needed:
        who = f"the run with its checkpoints of {checkpoints / GB:.0f} GB"
        cure = "set log_path=… to another disk, raise learner.checkpoint_every, or lower learner.keep_checkpoints"
    check_room(run_dir, needed + checkpoints, who, cure)


def check_room(folder: Path, needed: int, who: str, cure: str) -> None:
    """So many bytes are free for `who`, where we may write."""
    parent = check_writable(folder)
    free = shutil.disk_usage(parent).free
    if free < needed:
        size, unit = (2**30, "GiB") if needed >= 2**30 else (2**20, "MiB")
        cause = f"{parent} has {free / size:.1f} {unit} free, {who} needs {needed / size:.1f} {unit}"
        raise DiskFull(cause, f"Free some, {cure}")


def check_writable(folder: Path, *cure: str) -> Path:
    """The folder, or the nearest one above it that there is; files can be made there.

    :raises KbrlError: they can't.
    """
    parent = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=parent) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
    except OSError as error:
        raise refused(error, parent, *cure) from error
    return parent


def check_addresses(plan: Run) -> None:
    """Nobody else holds the broker's addresses: they are bound for a moment."""
    config, wanted = plan.config, bound(endpoints(plan.config, plan.path), os.environ)
    keys = Keyring(config.broker.keys).server() if config.broker.keys else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for address in (wanted.submit, wanted.work, wanted.status):
            if not address.startswith("ipc://") or Path(address.removeprefix("ipc://")).parent.is_dir():
                BoundRouter(context, address, keys=keys).close()
    except AddressError as error:
        raise AddressTaken(error.cause, error.cure) from None
    finally:
        context.term()


def check_compiler() -> None:
    """gcc is there and builds OpenMP."""
    cure = "Install it, such as 'apt-get install gcc libc6-dev'"
    if shutil.which("gcc") is None:
        raise MissingTool("gcc was not found, and backend=c compiles with it", cure)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text(PROBE)
        command = ["gcc", "-fopenmp", str(source), "-o", str(source.with_suffix(""))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingTool(f"gcc does not run: {error}", cure) from None
    if done.returncode:
        first = next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
        raise MissingTool(f"gcc cannot build an OpenMP program: {first}", cure)
