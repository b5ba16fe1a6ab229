"""`kbrl eval`: n answers a problem from any policy, verified by the services of training, and what they are worth.

::

    what ─resolve─▶ policy ─▶ folder runs/evals/NAME (the same command continues it) ─▶ publish ─▶ services ─▶ tables
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from kbrl_async.cli import preflight
from kbrl_async.cli.launch import ProcessesEnded, gave_up, start_and_wait
from kbrl_async.cli.shared import EVALUATIONS, add_settings, completed, newest, runs_and_settings
from kbrl_async.errors import UserError
from kbrl_async.runs.config import CONFIG_FILE, KEYS, Config, config_hash, environment, load, process_counts
from kbrl_async.runs.config.loading import find_key, gather
from kbrl_async.runs.folder import Run, is_finished, load_run, plan, prepare

if TYPE_CHECKING:
    from kbrl_async.runs.targets import Target

KIND = "evaluation"
"""Of its summary.json."""
EXAMPLES = """\
examples:
  kbrl eval default                      a run's newest policy, on its levels
  kbrl eval default --version best --heldout
                                         the best one, on problems it never saw
  kbrl eval model_name=small --samples 16 --level 1
                                         a model, before any training
  kbrl eval runs/default/checkpoints/final --ids L1/13,L1/14 --temperature 0
  kbrl eval ./my-adapter model_name=Qwen/Qwen2.5-Coder-7B-Instruct \\
      backend=triton --problems kernelbench --limit 20
  kbrl eval http://127.0.0.1:8000/v1 --model my-model --turns 4 --raicl index
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        EXAMPLES
        + """
The word without '=' is the policy: a run, a folder, a model, an endpoint. Left
out, it is what model_name=… names, else the newest run's newest policy."""
    )
    add = parser.add_argument
    add("--version", default="newest", metavar="newest|best|N", help="which policy of a run")
    add("--samples", type=int, metavar="N", help="answers per problem (default 4)")
    add("--temperature", type=float, metavar="T", help="0 is greedy; default: that of training")
    add("--turns", type=int, metavar="N", help="refinement turns of an answer; the best one counts")
    add("--raicl", metavar="INDEX", help="show retrieved examples from this index, see 'kbrl index build'")
    add("--raicl-k", type=int, metavar="K", help="most examples in a prompt")
    add("--level", metavar="L[,L]", help="problem levels; default: those of the run")
    add("--ids", metavar="ID[,ID]", help="single problems, such as L1/13 or softmax")
    add("--limit", type=int, metavar="N", help="at most N problems, the first of those chosen")
    add("--heldout", action="store_true", help="only problems that training never sees")
    add("--problems", metavar="SOURCE", help="folder, file, JSONL, hub name, or 'kernelbench' (KERNELBENCH_ROOT)")
    add("--precision", choices=("fp32", "fp16", "bf16"), help="number format of model and inputs")
    add("--deadline", type=float, metavar="S", help="seconds that all samples of one problem may take together")
    add("--model", metavar="NAME", help="an endpoint's model")
    add("--tensorboard-log-dir", metavar="DIR", help="add the figures to these event files")
    add("--tensorboard-step", type=int, metavar="N", help="at this step; default: the policy's version")
    add("--output", type=Path, metavar="FILE", help="copy evaluation.json there")
    add("--kernelbench", type=Path, metavar="DIR", help="copy the KernelBench run folders and baseline.json there")
    words = add_settings(parser, "POLICY|key=value", "what is evaluated; settings, as 'kbrl config' lists them")
    completed(words, runs_and_settings)


def run(args: argparse.Namespace) -> int:
    path, ended = ask(*resolve(args))
    return conclude(path, ended, args)


def ask(target: Target, config: Config) -> tuple[Path, ProcessesEnded]:
    """Has the policy's answers written and verified, going on where the folder's run was stopped."""
    from kbrl_async.runs import publishing

    todo = plan(config)
    check(todo)
    run = prepare(config)
    doing = "continuing" if run.resumed else "starting"
    print(f"{doing} {run.path}: {target.label}; Ctrl-C stops it, the same command continues it", flush=True)
    with Console(stderr=True).status("publishing the policy …") as status:
        facts = publishing.publish(
            target, run.path / "policies", run.config, lambda what, share: status.update(f"{what} ({share:.0%}) …")
        )
    publishing.write_policy(run.path, facts)
    return run.path, start_and_wait(run.path, process_counts(run.config))


def resolve(args: argparse.Namespace) -> tuple[Target, Config]:
    """What is evaluated, and the configuration of its evaluation: that of its run, unless something else was said."""
    from kbrl_async.runs import targets

    what, overrides = _words(args)
    env = environment(os.environ)
    log_path = Path(load(args.config, [w for w in overrides if w.startswith("log_path=")], env).log_path)
    named = "" if what else _named_model(args, overrides, env)
    target = targets.resolve(what or named or str(newest(log_path)), log_path, args.version)
    inherited = [Path(target.run) / CONFIG_FILE] if target.run else []
    own = [*_target_settings(target, args), *_settings(args)]
    ours = [f"model_name={load_run(target.run).model_name}"] if named and target.run else []
    config = load([*inherited, *args.config], [*own, *overrides, *ours], env)
    given = {word.partition("=")[0] for word in overrides}
    root = log_path if "log_path" in given or target.run is None else Path(target.run).parent
    broker = config.broker if any(key.startswith("broker.") for key in given) else load(args.config, [], env).broker
    config = msgspec.structs.replace(config, log_path=str(root / EVALUATIONS), resume=None, name=None, broker=broker)
    name = next((word.partition("=")[2] for word in overrides if word.startswith("name=")), "")
    return target, msgspec.structs.replace(config, name=name or f"{target.label}-{config_hash(config)[:6]}")


def _words(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The policy, and the settings. What others call checkpoint_path and output_path are no settings here."""
    words = [word for word in args.overrides if not word.startswith(("checkpoint_path=", "output_path="))]
    others = dict(word.split("=", 1) for word in args.overrides if word not in words)
    named = [word for word in words if "=" not in word or Path(word).exists() or word.startswith("http")]
    settings = [_full_key(word) for word in words if word not in named]
    named += filter(None, [others.get("checkpoint_path")])
    if len(named) > 1:
        raise UserError(f"one policy at a time, not {named[0]} and {named[1]}", "Settings are written key=value")
    if output := others.get("output_path"):
        args.output = args.output or (Path(output) if output.endswith(".json") else Path(output) / "evaluation.json")
    return next(iter(named), ""), settings


def _full_key(word: str) -> str:
    """`tensorboard_step=3` means evaluation.tensorboard_step."""
    key = word.partition("=")[0].removeprefix("--")
    return f"evaluation.{word}" if key not in KEYS and f"evaluation.{key}" in KEYS else word


def _named_model(args: argparse.Namespace, overrides: list[str], env: Mapping[str, str]) -> str:
    """What the settings alone name, as an address where it is an endpoint's; empty where nothing does.

    :raises ConfigError: a key is unknown; else a misspelt model_name would mean the newest run.
    """
    settings = gather(args.config, overrides, env)
    for setting in settings:
        find_key(setting.key, setting.origin)
    last = {setting.key: str(setting.value) for setting in settings}
    return last.get("sampler.base_url", "") if last.get("sampler.engine") == "openai" else last.get("model_name", "")


def _target_settings(target: Target, args: argparse.Namespace) -> Iterator[str]:
    yield f"evaluation.policy={target.label} {target.identity}"
    if target.kind == "endpoint":
        if args.model:
            yield f"model_name={args.model}"
        yield from ("sampler.engine=openai", f"sampler.base_url={target.name}")
    elif target.kind == "model":
        yield f"model_name={target.name}"


def _settings(args: argparse.Namespace) -> Iterator[str]:
    """The options as settings."""
    single = {
        "evaluation.samples": args.samples,
        "evaluation.temperature": args.temperature,
        "evaluation.deadline_s": args.deadline,
        "evaluation.ids": args.ids,
        "evaluation.limit": args.limit,
        "evaluation.tensorboard_log_dir": args.tensorboard_log_dir,
        "evaluation.tensorboard_step": args.tensorboard_step,
        "level": args.level,
        "problems": args.problems,
        "prompt.index": args.raicl,
        "prompt.examples": args.raicl_k,
    }
    yield from (f"{key}={value}" for key, value in single.items() if value is not None)
    if args.heldout:
        yield "evaluation.split=heldout"
    if args.raicl:
        yield "prompt.option=raicl"
    if args.turns is not None:
        yield from ("mode=multi_turn", f"max_turns={args.turns}") if args.turns > 1 else ("mode=single_turn",)
    if args.precision:
        yield f"precision={args.precision}"


def check(todo: Run) -> None:
    """What must be right before anything is written.

    :raises KbrlError: the first thing that is wrong.
    """
    from kbrl_async.runs.planning import evaluated_problems

    preflight.check_cores(todo.config)
    evaluated_problems(todo.config)
    preflight.check_files(todo.config)
    preflight.check_host(todo)


def conclude(run_dir: Path, ended: ProcessesEnded, args: argparse.Namespace) -> int:
    """Show the figures and copy files, or say why there are none.

    :raises RunError: a service gave up.
    """
    if is_finished(run_dir):
        show(run_dir)
        _copy(run_dir, args)
        print(f"everything is in {run_dir}: evaluation.json, kernelbench/, tensorboard/")
        return 0
    if ended.interrupted:
        print("stopped; the same command continues it", file=sys.stderr)
        return ended.code
    raise gave_up(ended, "evaluation", f"Read {run_dir / 'logs'}; the same command continues it")


def show(run_dir: Path, console: Console | None = None) -> None:
    """Print the tables of a finished evaluation."""
    from kbrl_async.evaluation import document
    from kbrl_async.evaluation.show import render

    (console or Console()).print(render(document.read(run_dir / document.FILE)))


def _copy(run_dir: Path, args: argparse.Namespace) -> None:
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run_dir / "evaluation.json", args.output)
    if args.kernelbench:
        shutil.copytree(run_dir / "kernelbench", args.kernelbench, dirs_exist_ok=True)
