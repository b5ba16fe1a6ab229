"""`kbrl index`: build an index of worked examples, and ask it what it would show for a problem, and why."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kbrl_async.cli.shared import say, table
from kbrl_async.errors import UserError
from kbrl_async.kernels.backends import backend, backends
from kbrl_async.kernels.problems import load_file, load_problems
from kbrl_async.kernels.problems.cases import described_text

if TYPE_CHECKING:
    from kbrl_async.rollouts.retrieval import Manifest, Retrieved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="make an index; a killed build goes on where it was")
    build.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="*",
        help="GPUMODE/KernelBook, SakanaAI/AI-CUDA-Engineer-Archive, their .jsonl or .parquet files, a folder of "
        "kernels, or a run folder; default: these two data sets, from the hub",
    )
    build.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder of the index")
    only = build.add_mutually_exclusive_group()
    only.add_argument("--triton-only", action="store_true", help="keep Triton kernels only")
    only.add_argument("--cuda-only", action="store_true", help="keep CUDA kernels only")
    build.add_argument(
        "--model",
        metavar="NAME",
        help="embedder: lexical (needs no download), or a model of sentence-transformers such as BAAI/bge-code-v1 or "
        "nomic-ai/nomic-embed-code; default: BAAI/bge-code-v1 with a GPU and sentence-transformers, else lexical",
    )
    build.add_argument(
        "--sakana-levels", metavar="1,2,3", default="1,2,3", help="levels of the AI-CUDA-Engineer-Archive to take"
    )
    build.add_argument("--include-incorrect", action="store_true", help="take its incorrect kernels, too")
    build.set_defaults(action=_build)
    query = actions.add_parser("query", help="show what would be retrieved for a problem")
    query.add_argument("file", metavar="FILE", type=Path, help="a problem file")
    query.add_argument("--index", metavar="DIR", type=Path, required=True, help="folder of the index")
    query.add_argument("-k", type=int, default=3, help="examples; default 3")
    query.add_argument(
        "--model", metavar="NAME", default="", help="embedder that the index may load, if not one of ours"
    )
    query.add_argument("--backend", default="", help="prefer kernels of this backend")
    query.add_argument(
        "--problems", metavar="FOLDER", default="", help="where held-out problems are; default: our suite"
    )
    query.add_argument("--why", action="store_true", help="show the parts of each score, and what the rules kept out")
    query.set_defaults(action=_query)


def run(args: argparse.Namespace) -> int:
    action: Callable[[argparse.Namespace], int] = args.action
    return action(args)


# ── build ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _build(args: argparse.Namespace) -> int:
    from kbrl_async.lab.indexing import IndexOptions, build_index
    from kbrl_async.rollouts.retrieval import SourceOptions, open_source
    from kbrl_async.rollouts.retrieval.corpora import known_corpora

    wanted = SourceOptions(_backends(args), _levels(args.sakana_levels), args.include_incorrect)
    console = Console()
    places = args.sources or known_corpora()
    if not args.sources:
        say(f"sources: {' and '.join(places)}", console)
    sources = [open_source(place, wanted, _problem_sources) for place in places]
    model, why = (args.model, "") if args.model else default_model()
    if why:
        say(f"embedder: {model}, {why}", console)
    options = IndexOptions(embedder=model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as bars:

        def show_bar(phase: str, done: int, total: int | None) -> None:
            """One bar per phase."""
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        manifest = build_index(sources, args.output, options, show_bar)
    _report(console, manifest, args.output)
    return 0


def _backends(args: argparse.Namespace) -> frozenset[str]:
    """Whose kernels are taken; empty: all."""
    if args.triton_only:
        return frozenset({"triton"})
    return frozenset(n for n in backends() if backend(n).runs_on == {"cuda"}) if args.cuda_only else frozenset()


def default_model() -> tuple[str, str]:
    """A dense model where there is a GPU to run it on, and the package that loads it; and why it was chosen."""
    import torch

    from kbrl_async.rollouts.retrieval.embedders import DENSE

    if not torch.cuda.is_available():
        return "lexical", f"as there is no GPU for a model such as {DENSE[0]}; --model names another"
    if importlib.util.find_spec("sentence_transformers") is None:
        return "lexical", f"as sentence-transformers is not installed, which loads {DENSE[0]}; --model names another"
    return DENSE[0], "as there is a GPU for it; --model names another"


def _levels(text: str) -> frozenset[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"--sakana-levels {text} is no list of levels", "Write such as 1,2,3")
    return frozenset(int(part) for part in text.split(","))


def _problem_sources(setting: str) -> Mapping[str, str]:
    return {problem.problem_id: problem.source for problem in load_problems(setting)}


def _report(console: Console, manifest: Manifest, output: Path) -> None:
    rows = table(("source", "rows", "kept", "left out"))
    for source in manifest.sources:
        reasons = "\n".join(f"{count} {reason}" for reason, count in source.skipped.items())
        rows.add_row(source.name, str(source.rows), str(source.kept), reasons)
    console.print(rows)
    size = sum(manifest.files.values()) / 1e6
    console.print(
        f"{manifest.count} examples, {manifest.kind}, {manifest.embedder} in {manifest.dimension} dimensions, "
        f"{size:.1f} MB in {output}"
    )


# ── query ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _query(args: argparse.Namespace) -> int:
    from kbrl_async.rollouts.retrieval import Query, Retriever

    problem = load_file(args.file)
    heldout = [(p.problem_id, p.source) for p in load_problems(args.problems) if p.split == "heldout"]
    retriever = Retriever.open(args.index, heldout, args.model)
    found = retriever.retrieve(Query(problem.source, problem.problem_id, args.backend, k=args.k))
    console = Console()
    _show_hits(console, found, args.why)
    if args.why:
        _show_refusals(console, found)
    console.print(f"index {found.version}")
    return 0


def _show_hits(console: Console, found: Retrieved, why: bool) -> None:
    parts = list(found.hits[0].parts) if found.hits and why else []
    rows = table(("example", "backend", "workloads", "speedup", "score", *parts))
    for hit in found.hits:
        speedup = f"{hit.speedup:.2f}×" if hit.speedup is not None else ""
        values = [f"{hit.parts[part]:+.3f}" for part in parts]
        name = f"{hit.entry.uid} {hit.entry.problem_id}".strip()
        rows.add_row(name, hit.entry.backend, described_text(hit.entry.reference), speedup, f"{hit.score:.3f}", *values)
    console.print(rows)
    if not found.hits:
        console.print("nothing may be shown for this problem")


def _show_refusals(console: Console, found: Retrieved) -> None:
    for rule, count in found.refused.most_common():
        console.print(f"{count} kept out: {rule}")
    for refusal in found.nearest_refused:
        console.print(f"  {refusal.uid}  similarity {refusal.similarity:.3f}, {refusal.rule}")
