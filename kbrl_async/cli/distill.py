"""`kbrl distill`: a file of proven answers to training problems, from whoever can give them, to learn from by SFT.

::

    policy, model, endpoint ─ asked as by `kbrl eval`, training problems alone ─▶ runs/evals/NAME ┐
    --from RUN,RUN: runs and evaluations that are there ──────────────────────────────────────────┴▶ a JSONL file
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kbrl_async.cli import eval as evaluate
from kbrl_async.cli.shared import add_settings, completed, find, runs_and_settings, say
from kbrl_async.errors import UserError
from kbrl_async.runs.config import config_hash
from kbrl_async.runs.folder import is_finished, load_run

FILE = "demonstrations.jsonl"
KEEP = 3
EXAMPLES = """\
examples:
  kbrl distill http://127.0.0.1:8000/v1 --model my-model --samples 8 \\
      --problems generated:500           ask an endpoint, keep what is proven
  kbrl distill default --turns 4         a run's newest policy; repairs too
  kbrl distill --from default,evals/mine --output taught.jsonl
                                         what runs hold; nobody is asked
  kbrl train method=sft demonstrations.files=taught.jsonl

The word without '=' is who is asked, as of 'kbrl eval'. Held-out problems are
not asked, and no answer to one is taken from an archive.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--from",
        dest="sources",
        metavar="RUN[,RUN]",
        help="runs whose answers are taken; nobody is asked",
    )
    add("--keep", type=int, default=KEEP, metavar="N", help=f"best answers per problem, and repairs (default {KEEP})")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"where the set is written; default: {FILE} in the folder of the answers",
    )
    add("--version", default="newest", metavar="newest|best|N", help="which policy of a run")
    add("--samples", type=int, metavar="N", help="answers asked per problem (default 4)")
    add("--temperature", type=float, metavar="T", help="0 is greedy; default: that of training")
    add("--turns", type=int, metavar="N", help="refinement turns of an answer")
    add("--raicl", metavar="INDEX", help="show retrieved examples from this index")
    add("--raicl-k", type=int, metavar="K", help="most examples in a prompt")
    add("--level", metavar="L[,L]", help="problem levels; default: those of the run")
    add("--ids", metavar="ID[,ID]", help="single problems")
    add("--limit", type=int, metavar="N", help="at most N problems, the first of those chosen")
    add("--problems", metavar="SOURCE", help="folder, file, JSONL, hub name, generated:N …")
    add("--deadline", type=float, metavar="S", help="seconds that all samples of one problem may take together")
    add("--model", metavar="NAME", help="an endpoint's model")
    parser.set_defaults(heldout=False, precision=None, tensorboard_log_dir=None, tensorboard_step=None)
    words = add_settings(parser, "POLICY|key=value", "who is asked; settings, as 'kbrl config' lists them")
    completed(words, runs_and_settings)


def run(args: argparse.Namespace) -> int:
    from kbrl_async.runs.demonstrations import distilled

    if args.keep < 1:
        raise UserError(f"--keep {args.keep} keeps nothing", "Give 1 or more")
    output = args.output
    if args.sources:
        if args.overrides:
            raise UserError(f"--from asks nobody, and {args.overrides[0]} would be asked", "Leave one of both out")
        sources = [find(name) for name in args.sources.split(",")]
    else:
        folder, code = _asked(args)
        if code:
            return code
        sources = [folder]
    output = output or sources[0] / FILE
    found = distilled.distil(sources, args.keep)
    distilled.write(found, output)
    timed = sum(answer.lo is not None for answer in found.answers)
    counts = {
        "proven answers": len(found.answers),
        "repairs": found.repairs,
        "timed": timed,
        "problems": found.problems,
    }
    say(f"{output}: {', '.join(f'{name} {count}' for name, count in counts.items())}")
    for reason, count in found.left_out.most_common():
        say(f"  left out: {count} {reason}")
    say(f"learn from it with 'kbrl train method=sft demonstrations.files={output}'")
    return 0


def _asked(args: argparse.Namespace) -> tuple[Path, int]:
    """The folder of the answers, and the exit code where they are not all there. A set that was asked for whole is not
    asked for again."""
    for word in args.overrides:
        if word.startswith("evaluation.split=") and word != "evaluation.split=train":
            raise UserError(f"{word}: only training problems are distilled", "Leave it out")
    args.overrides.append("evaluation.split=train")
    target, config = evaluate.resolve(args)
    folder = Path(config.log_path) / str(config.name)
    if is_finished(folder) and config_hash(load_run(folder)) == config_hash(config):
        say(f"{folder} has the answers already")
        return folder, 0
    folder, ended = evaluate.ask(target, config)
    wanted, args.output = args.output, None
    args.kernelbench = None
    code = evaluate.conclude(folder, ended, args)
    args.output = wanted
    return folder, code
