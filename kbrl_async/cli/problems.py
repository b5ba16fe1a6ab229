"""`kbrl problems`: what the policy can be trained on, and whether its scores can mean something."""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from kbrl_async.cli.shared import completed, find, run_names, table
from kbrl_async.errors import UserError
from kbrl_async.kernels.problems import audit_file, load_problems
from kbrl_async.kernels.problems.audit_file import Audit, ProblemAudit
from kbrl_async.kernels.problems.cases import described
from kbrl_async.kernels.problems.finding import choose
from protocols.records import Problem

if TYPE_CHECKING:
    from kbrl_async.kernels.generator import GeneratedProblem

SUITE = "suite"
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list", "audit", "generate", "import"], help="what to do")
    parser.add_argument(
        "target",
        nargs="?",
        default="",
        metavar="DIR|suite|N",
        help="a folder in the KernelBench layout, or any other source; default: suite. Of generate: how many. "
        "Of import: a checkout, a JSONL or Parquet file, kernelbook, drkernel or another data set of the hub",
    )
    parser.add_argument("folder_out", nargs="?", type=Path, metavar="OUT", help="import: the folder to write")
    parser.add_argument("--folder", default="", help="the same as DIR")
    parser.add_argument("--level", type=int, action="append", default=[], help="only this level; may be repeated")
    audit = parser.add_argument_group("audit")
    audit.add_argument("--ids", default="", help="only these problems, as L1/23,L2/9")
    audit.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write; default: audit.json in the folder, of generate generated-N-SEED",
    )
    audit.add_argument(
        "--time-limit", type=float, default=120.0, metavar="S", help="seconds for a problem; import: 30 at most"
    )
    audit.add_argument(
        "--memory-limit", type=float, metavar="GIB", help="for one problem; default: half of what is free"
    )
    audit.add_argument(
        "--resume", action="store_true", help="what the file has already is kept, but for what was not audited"
    )
    audit.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where references run")
    generate = parser.add_argument_group("generate")
    generate.add_argument("--seed", type=int, default=0, help="the same seed gives the same problems")
    generate.add_argument(
        "--difficulty", default="0-1", metavar="LOW-HIGH", help="from 0 (one cheap operator) to 1 (many); default: 0-1"
    )
    near = generate.add_argument(
        "--near",
        action="append",
        default=[],
        metavar="RUN",
        help="only what this run's policy may solve",
    )
    completed(near, run_names)
    generate.add_argument(
        "--jobs",
        type=int,
        help="worker processes, of import and audit too; default: one a core, of an audit one",
    )
    importing = parser.add_argument_group("import", "what was decided is in OUT/import.jsonl; the same command goes on")
    importing.add_argument("--format", default="", help="what the place holds; default: by the look of it")
    importing.add_argument(
        "--avoid", action="append", default=[], metavar="DIR", help="take nothing near these problems; of generate too"
    )
    importing.add_argument("--limit", type=int, default=0, metavar="N", help="no more than N rows")
    audit.add_argument("--shapes", choices=["cpu", "gpu"], help="of size lines with both; default: the device's")


def run(args: argparse.Namespace) -> int:
    source = args.target or args.folder
    source = "" if source == SUITE else source
    return {"audit": _audit, "generate": _generate, "import": _import, "list": _list}[args.action](args, source)


def _list(args: argparse.Namespace, source: str) -> int:
    problems = load_problems(source, levels=args.level)
    loads = {problem.problem_id: words for problem in problems if (words := described(problem))}
    rows = table(("problem", "level", "difficulty", "split", "audit", *(["workloads"] if loads else [])))
    for problem in problems:
        facts = (problem.problem_id, str(problem.level), f"{problem.difficulty:.2f}", problem.split)
        rows.add_row(*facts, ", ".join(problem.flags), *([loads.get(problem.problem_id, "1")] if loads else []))
    console = Console()
    console.print(rows)
    heldout = sum(problem.split == "heldout" for problem in problems)
    console.print(f"{len(problems)} problems, {heldout} of them held out")
    return 0


def _audit(args: argparse.Namespace, source: str) -> int:
    from kbrl_async.kernels.audit import Limits, audit_problems

    shapes = args.shapes or ("gpu" if args.device == "cuda" else "cpu")
    problems = _chosen(load_problems(source, levels=args.level, shapes=shapes), args.ids)
    memory = args.memory_limit or psutil.virtual_memory().available / _GIB / 2
    device = "cuda:0" if args.device == "cuda" else args.device
    limits = Limits(device, args.time_limit, round(memory, 2))
    out = args.out or _default_out(source, shapes)
    errors = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors) as progress:
        bar = progress.add_task("auditing", total=len(problems))

        def done(so_far: Audit, audit: ProblemAudit) -> None:
            audit_file.write(out, so_far)
            progress.update(bar, completed=len(so_far.problems), description=escape(audit.problem_id))
            if audit.status != audit_file.CLEAN:
                progress.console.print(escape(_line(audit)))

        created = datetime.datetime.now(datetime.UTC).date().isoformat()
        audit = audit_problems(
            problems,
            limits,
            suite=Path(source).name or SUITE,
            shapes=shapes,
            created=created,
            known=audit_file.read(out).problems if args.resume and out.is_file() else (),
            jobs=args.jobs or 1,
            done=done,
        )
    audit_file.write(out, audit)
    _show(audit)
    print(f"written: {out}")
    return 0


def _generate(args: argparse.Namespace, wanted: str) -> int:
    from kbrl_async.kernels.generator import generate, known, write_folder
    from kbrl_async.lab.edge import parents_in, propose

    if not wanted.isdigit() or not int(wanted):
        raise UserError("kbrl problems generate needs a number", "As in: kbrl problems generate 500 --seed 1")
    count, out = int(wanted), args.out or Path(f"generated-{wanted}-{args.seed}")
    if out.exists():
        raise UserError(f"{out} is there already", "Name another folder with --out, or remove it")
    left_out: Counter[str] = Counter()
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    began = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("drawing", total=count)

        def advance(one: GeneratedProblem) -> None:
            left_out.update([_kind(one.reason)] if one.reason else [])
            progress.update(bar, advance=not one.reason)

        avoid = known() + _avoided(args)
        between = _between(args.difficulty)
        if args.near:
            drawn = propose(parents_in([find(run) for run in args.near]), count, args.seed, avoid)
        else:
            drawn = list(generate(count, args.seed, difficulty=between, avoid=avoid, jobs=_jobs(args), told=advance))
    write_folder(out, drawn)
    if args.near:  # what is proposed for a policy is trained on unseen
        args.action, args.out = "audit", None
        _audit(args, str(out))
    rows = table(("left out because", "problems"), f"{count + left_out.total()} drawn, {count} taken")
    for reason, number in left_out.most_common():
        rows.add_row(reason, str(number))
    Console().print(rows)
    heldout = sum(one.split == "heldout" for one in drawn)
    a_minute = count / (time.monotonic() - began) * 60
    print(f"written: {out}, {heldout} of them held out; {a_minute:.0f} a minute. Train on them: problems={out}")
    return 0


def _import(args: argparse.Namespace, place: str) -> int:
    from kbrl_async.kernels.audit import Limits
    from kbrl_async.kernels.importing import JOURNAL, Importer, read

    out = args.folder_out or args.out
    if not place or out is None:
        raise UserError("kbrl problems import needs SOURCE and OUT", "As in: kbrl problems import rows.jsonl imported")
    name, found = read(place, args.format)
    memory = args.memory_limit or psutil.virtual_memory().available / _GIB / 4
    device = "cuda:0" if args.device == "cuda" else args.device
    jobs = 1 if args.device == "cuda" else _jobs(args)
    importer = Importer(out, Limits(device, min(args.time_limit, 30.0), round(memory, 2)), _avoided(args), jobs)
    with Progress(*Progress.get_default_columns()[:1], TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"importing {name}", total=None)
        for number, row in enumerate(importer.run(itertools.islice(found, args.limit or None)), start=1):
            progress.update(bar, description=escape(f"{number} rows: {row.problem_id[:40]}"))
    if not importer.rows:
        cure = "Name the folder that holds the problems' files; --format takes another format than it looks like"
        raise UserError(f"nothing in {place} is of the format {name}", cure)
    outcomes = Counter(row.outcome for row in importer.rows)
    reasons = Counter(_cause(row.reason) for row in importer.rows if row.outcome == "left out")
    rows = table(("rows", "what became of them"), f"{place}: {len(importer.rows)} rows, format {name}")
    for outcome, count in sorted(outcomes.items()):
        rows.add_row(str(count), outcome)
    for reason, count in reasons.most_common(20):
        rows.add_row(str(count), f"  {escape(reason)}")
    Console().print(rows)
    print(f"written: {out}; origin, licence and reason of each row: {out / JOURNAL}; see kbrl problems list {out}")
    return 0


def _jobs(args: argparse.Namespace) -> int:
    return args.jobs or len(os.sched_getaffinity(0))


def _avoided(args: argparse.Namespace) -> list[Problem]:
    """What nothing may be near to: what our suite holds out, and all that --avoid names."""
    return load_problems(split="heldout") + [problem for source in args.avoid for problem in load_problems(source)]


def _cause(reason: str) -> str:
    """Reasons that quote the row's own words, as one."""
    return re.sub(
        r"^(cannot_run: \w+|its reference fails [^:]+|fixed_device|keeps_state).*", r"\1", reason, flags=re.DOTALL
    )


def _kind(reason: str) -> str:
    """Reasons that name an operator, as one."""
    return "a step changes nothing" if reason.endswith("changes nothing") else reason.partition(":")[0]


def _between(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    try:
        found = float(low), float(high)
    except ValueError:
        found = (1.0, 0.0)
    if not 0.0 <= found[0] < found[1] <= 1.0:
        raise UserError(f"--difficulty {text} is no range", "Write two numbers from 0 to 1, such as 0.1-0.4")
    return found


def _chosen(problems: list[Problem], ids: str) -> list[Problem]:
    wanted = [word for word in ids.split(",") if word]
    return [choose(word, problems) for word in wanted] if wanted else problems


def _default_out(source: str, shapes: str) -> Path:
    folder = Path(source)
    if source and not folder.is_dir():
        raise UserError(f"an audit of {source} has no place of its own", "Say --out FILE")
    return folder / audit_file.AUDIT_FILE if source else Path(f"audit-suite-{shapes}.json")


def _line(audit: ProblemAudit) -> str:
    what = "; ".join(f"{finding.flag}: {finding.evidence}" for finding in audit.findings)
    return f"{audit.problem_id} {audit.status.replace('_', ' ')}: {'; '.join(filter(None, (audit.reason, what)))}"


def _show(audit: Audit) -> None:
    rows = table(("what", "problems", "which"), f"{len(audit.problems)} problems audited on {audit.device}")
    groups: dict[str, list[str]] = {
        status: [] for status in (audit_file.CLEAN, audit_file.FLAGGED, audit_file.NOT_AUDITED)
    }
    for problem in audit.problems:
        groups[problem.status].append(problem.problem_id)
        for flag in dict.fromkeys(finding.flag for finding in problem.findings):
            groups.setdefault(flag, []).append(problem.problem_id)
    for name, ids in groups.items():
        listed = "" if name == audit_file.CLEAN else ", ".join(id_.partition("_")[0] for id_ in ids)
        rows.add_row(name.replace("not_audited", "not audited"), str(len(ids)), listed)
    Console().print(rows)
