"""What training brings, by method, turns and examples. `python -m benchmarks.learning COMMAND`"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from benchmarks.harness import (
    CORES,
    CORRECT_ONLY,
    ROOT,
    Commands,
    Result,
    markdown,
    rows_of,
    say,
    summary_of,
    with_figures,
)
from benchmarks.learning.curve import curve
from benchmarks.learning.pay import pay
from benchmarks.learning.raicl import raicl, suite_index
from benchmarks.learning.study import Answers, RunStudy, core_seconds, gain, share, splits
from benchmarks.learning.wrong import wrong
from kbrl_async.lab.report import plots

commands = Commands("learning", __doc__)
commands(curve)
commands(pay)
commands(raicl)
commands(wrong)


# ── methods ───────────────────────────────────────────────────────────────────────────────────────────────────────

METHODS = ("grpo", "reinforce", "best_of_n", "reward_weighted_sft", "sft")
IN_STEPS = ("rounds", "distilled")
"""Methods of several runs: `configs/fusion_rounds.yaml`, and that with `kbrl distill` in place of its first round."""
ROUNDS = 3
START = "start"
"""The policy before any training."""
LEVEL = 2
SPENT = {"samples": "", "seconds": " s", "core_seconds": " s"}
PAGE = ROOT / "docs" / "methods.md"
MARKS = "<!-- measured -->", "<!-- /measured -->"
GROUPS, GROUP = 8, 10
"""Of an update in all recipes."""
FIRST_ANSWERS = 320
"""Of the first of the methods in steps: four updates."""
UNEVALUATED = "eval_samples=0"
"""Evaluated afterwards, all alike."""
ENDLESS = 100_000
"""Updates that no run reaches in its seconds."""


class MethodBudget(NamedTuple):
    """What every method may spend."""

    rollouts: int
    seconds: float

    @property
    def updates(self) -> int:
        return max(1, self.rollouts // (GROUPS * GROUP))

    @property
    def kinds(self) -> list[str]:
        """By what the methods are equal."""
        return [*(["seconds"] if self.seconds else []), *(["rollouts"] if self.rollouts else [])] or ["recipes"]


@commands
def methods(
    folder: Annotated[Path, "where runs are kept"] = Path("fusion"),
    seeds: tuple[int, ...] = (0, 1, 2),
    methods: Annotated[tuple[str, ...], "further ones: rounds, distilled, with 800 answers each"] = METHODS,
    samples: Annotated[int, "answers a problem in the evaluation"] = 16,
    rollouts: Annotated[int, "of each run, demonstrations of sft; 0: as each recipe has them"] = 0,
    seconds: Annotated[float, "of each run's training, with as many rollouts as it manages; 0: not by time"] = 0,
    jobs: Annotated[int, "arms beside each other; two cores or more for each"] = 1,
    write: Annotated[bool, "put the tables into docs/methods.md"] = False,
) -> Result:
    """What does each method of training bring? Every method from the same policy, on level 2, at equal cost.

    Runs `configs/fusion_*.yaml` for each seed, evaluates each result and the policy that they began with alike (`kbrl
    eval`, all problems of the level, correctness only, so that a busy machine changes nothing but the time it takes),
    and gives each method's gain with a bootstrap interval over problems. The anchor is that first policy. With both
    --rollouts and --seconds a run by seconds is evaluated twice: the version that had learned from so many rollouts,
    and the last one. Continues where it was stopped; a folder holds runs of one size.
    """
    study, budget = RunStudy(folder, jobs), MethodBudget(rollouts, seconds)
    study.make_policy(config_of("grpo"))

    def arm(wanted: tuple[str, int]) -> dict[str, Answers]:
        method, seed = wanted
        answers = {}
        for kind in budget.kinds:
            name, what = trained(study, method, seed, budget, kind)
            words = ("--config", config_of("grpo"), "--level", LEVEL, "--samples", samples, f"seed={1000 + seed}")
            answers[kind] = study.evaluate(name, *what, *words)
            found = {split: share([answers[kind]], problems) for split, problems in splits(LEVEL).items()}
            say(name, f"equal {kind}", found)
        return answers

    done = study.arms([(method, seed) for seed in seeds for method in (START, *methods)], arm)
    every = (START, *methods)
    report: Result = {"seeds": len(seeds), "samples": samples, "cores": len(CORES), "cores_each": study.cores_each}
    report["equal"] = {
        kind: {
            "methods": figures({method: [done[method, seed][kind] for seed in seeds] for method in every}),
            "cost": {method: cost(study, method, seeds, budget, kind) for method in methods},
        }
        for kind in budget.kinds
    }
    if write:
        write_page(report)
    say(tables(report))
    return report


def trained(study: RunStudy, method: str, seed: int, budget: MethodBudget, kind: str) -> tuple[str, list[object]]:
    """The name of an arm's evaluation, and the policy that is evaluated, in words of `kbrl eval`."""
    if method == START:
        return f"{START}-{seed}", ["small"]
    name = f"{method}-{seed}"
    if method in IN_STEPS:
        return name, [(rounds if method == "rounds" else distilled)(study, name, seed)]
    config = config_of(method)
    of_updates = [f"max_steps={budget.updates}", "max_minutes=null"]
    if kind != "rollouts":
        of_seconds = [f"max_steps={ENDLESS}", f"max_minutes={budget.seconds / 60}"] if budget.seconds else []
        return name, [study.train(name, config, f"seed={seed}", UNEVALUATED, *of_seconds)]
    if (study.folder / name / "policies" / f"policy-v{budget.updates}").is_dir():
        return f"{name}-v{budget.updates}", [study.folder / name, "--version", budget.updates]
    equal = f"{name}-of-{budget.rollouts}"  # a run keeps its last versions only
    return equal, [study.train(equal, config, f"seed={seed}", UNEVALUATED, *of_updates)]


def rounds(study: RunStudy, name: str, seed: int) -> Path:
    """The last run of the recipe in rounds: 320 answers, imitation of the right ones, 480 answers."""
    return study.train(
        name, config_of("rounds"), f"seed={seed}", "max_minutes=null", UNEVALUATED, last=f"{name}-{ROUNDS}"
    )


def distilled(study: RunStudy, name: str, seed: int) -> Path:
    """The same where `kbrl distill` asks for the first 320 answers, of a policy that learns nothing meanwhile."""
    problems = splits(LEVEL)["train"]
    each = round(FIRST_ANSWERS / len(problems))
    words = ("--config", config_of("grpo"), "--level", LEVEL, "--samples", each, f"seed={seed}")
    taught = study.distil(f"{name}-asked", "small", *words)
    always = (f"seed={seed}", "max_minutes=null", UNEVALUATED)
    sft = study.train(f"{name}-taught", config_of("sft"), f"demonstrations.files={taught}", "max_steps=10", *always)
    return study.train(f"{name}-last", config_of("grpo"), f"model_name={sft}", "max_steps=6", *always)


def runs_of(study: RunStudy, method: str, name: str) -> list[Path]:
    """Those that a method's cost is made of."""
    if method == "rounds":
        return [study.folder / f"{name}-{number}" for number in range(1, ROUNDS + 1)]
    if method == "distilled":
        return [study.evaluation(f"{name}-asked"), study.folder / f"{name}-taught", study.folder / f"{name}-last"]
    return [study.folder / name]


def config_of(method: str) -> Path:
    return ROOT / "configs" / f"fusion_{method}.yaml"


def figures(found: Mapping[str, Sequence[Answers]]) -> Result:
    """By method and split: what is correct, by seed too, and the gain."""
    out: Result = {method: {} for method in found}
    for split, problems in splits(LEVEL).items():
        for method, answers in found.items():
            by_seed = [share([one], problems) for one in answers]
            out[method][split] = {"correct": float(np.mean(by_seed)), "by_seed": by_seed}
            if method != START:
                out[method][split]["gain"] = gain(answers, found[START], problems)
    return out


def cost(study: RunStudy, method: str, seeds: Sequence[int], budget: MethodBudget, kind: str) -> dict[str, float]:
    """Rollouts (or demonstrations) that were learned from, seconds and CPU seconds of the run, mean of the seeds."""
    made = []
    for seed in seeds:
        name = trained(study, method, seed, budget, kind)[0]
        if method in IN_STEPS:
            runs = runs_of(study, method, name)
            walls = sum(summary_of(run).get("wall_s", 0.0) for run in runs)
            made.append((GROUPS * GROUP * 10, walls, sum(map(core_seconds, runs))))
            continue
        of_a_version = name.removeprefix(f"{method}-{seed}-v")
        run = study.folder / (f"{method}-{seed}" if of_a_version != name else name)
        found = summary_of(run)
        updates = int(of_a_version) if of_a_version != name else found["updates"]
        part = updates / max(1, found["updates"])
        made.append((updates * GROUPS * GROUP, found["wall_s"] * part, core_seconds(run) * part))
    samples, seconds, cores = np.mean(made, axis=0)
    return {"samples": float(samples), "seconds": float(seconds), "core_seconds": float(cores)}


def tables(report: Result) -> str:
    """Markdown, a table for each thing that is equal."""
    return "\n\n".join(f"**Equal {kind}**\n\n{table(part)}" for kind, part in report["equal"].items())


def table(part: Result) -> str:
    columns = "training problems", "gain (95 %)", "held-out ones", "gain (95 %)", "samples", "training", "CPU time"
    rows = []
    for method, by_split in part["methods"].items():
        cells = [f"`{method}`" if method != START else "SFT policy (start)"]
        for found in by_split.values():
            g = found.get("gain")
            cells += [f"{found['correct']:.1%}", f"{g['mean']:+.1%} ({g['lo']:+.1%} … {g['hi']:+.1%})" if g else ""]
        spent = part["cost"].get(method)
        rows.append([*cells, *(f"{spent[what]:.0f}{unit}" if spent else "" for what, unit in SPENT.items())])
    return markdown(["method", *columns], rows)


def write_page(report: Result) -> None:
    """The measured part of docs/methods.md."""
    where = f"{report['cores']} cores, {report['cores_each']} for each run"
    what = f"{report['seeds']} seeds, {report['samples']} answers a problem in each evaluation; {where}."
    text = with_figures(PAGE.read_text(encoding="utf-8"), MARKS, f"{tables(report)}\n\n{what}")
    PAGE.write_text(text, encoding="utf-8")


# ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────

TURNS = 4
REWARD = ("prompt.option=compact", *CORRECT_ONLY)
SAME = (*REWARD, "batch_size=8", "group_size=8", "max_steps=14", "max_minutes=null", "eval_samples=0")
MULTI = ("mode=multi_turn", f"max_turns={TURNS}", "turns.stop=correct", "turns.returns=max")
FOUR = (*SAME, *MULTI, "learner.minibatches=4")
EQUAL = (*SAME, *MULTI, "batch_size=3")
EXAMPLES = ("prompt.option=raicl", "prompt.base=compact")
ARMS = {
    "single": SAME,
    "multi": FOUR,
    "mixed": (*FOUR, "turns.single_share=0.5"),
    "equal": EQUAL,
    "examples": (*SAME, *EXAMPLES),
    "multi_examples": (*FOUR, *EXAMPLES),
}
"""Four minibatches: about as many samples for each optimizer step as two have of single turns.
`equal` has about as many answers as `single` instead of as many rollouts: a rollout of turns holds 2.8.
First prompts of `examples` hold three retrieved ones, in training alone: all arms are evaluated without."""


@commands
def turns(
    folder: Annotated[Path, "where runs are kept"] = Path("turns-study"),
    seeds: tuple[int, ...] = (0, 1, 2),
    samples: Annotated[int, "rollouts a problem in the evaluation"] = 4,
    policy: Annotated[str, "folder of the policy that all arms start from; default: made for this"] = "",
    arms: Annotated[
        tuple[str, ...],
        "single, multi, mixed (half of the groups take one turn), equal (as many answers), examples (single turns with "
        "retrieved ones), multi_examples, start (no training)",
    ] = ("single", "multi"),
    updates: Annotated[int, "of each run, 64 rollouts each"] = 14,
    jobs: Annotated[int, "arms beside each other; two cores or more for each"] = 1,
    heldout: Annotated[bool, "evaluate held-out problems alone"] = False,
    plot: Annotated[Path | None, "write a chart there"] = None,
) -> Result:
    """Does training on refinement turns pay? One policy, trained on single turns and on as many rollouts of up to four.

    All are then evaluated alike (`kbrl eval --turns 4`): an answer may be refined three times, and counts when one of
    its turns is correct. The reward is correctness alone, so kernels are not timed. The anchor is the first arm, of
    the same seed. Continues where it was stopped.
    """
    study = RunStudy(folder, jobs)
    index = suite_index(study.folder / "index")
    policy = policy or str(study.make_policy(settings=["mode=multi_turn", *EXAMPLES, f"prompt.index={index}"]))

    def arm(wanted: tuple[str, int]) -> Answers:
        name, seed = f"{wanted[0]}-{wanted[1]}", wanted[1]
        run: Path | str = policy
        if wanted[0] != START:
            settings = [*ARMS[wanted[0]], f"max_steps={updates}", f"model_name={policy}", f"seed={seed}"]
            settings += [f"prompt.index={index}"] if EXAMPLES[0] in settings else []
            run = study.train(name, ROOT / "configs" / "default.yaml", *settings)
        words = ["--turns", TURNS, "--samples", samples, "turns.stop=correct", f"seed={1000 + seed}"]
        words += ["--heldout"] if heldout else []
        answers = study.evaluate(name, run, *words, *REWARD, "prompt.index=null")
        say(name, _by_turn([answers], list(answers)))
        return answers

    done = study.arms([(name, seed) for seed in seeds for name in arms], arm)
    found = {name: [done[name, seed] for seed in seeds] for name in arms}
    asked = {split: of for split, of in splits().items() if split != "train" or not heldout}
    report: Result = {"seeds": seeds, "samples": samples, "updates": updates}
    report |= {split: _compared(found, of) for split, of in asked.items()}
    for name in arms:
        if name != START:
            report[f"{name}_answers"] = [len(rows_of(study.folder / f"{name}-{seed}")) for seed in seeds]
        report[f"{name}_compile_fix_rate"] = _fix_rate([study.evaluation(f"{name}-{seed}") for seed in seeds])
    if plot:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_text(_drawn(found, next(iter(asked.values()))), encoding="utf-8")
    return report


def _compared(found: Mapping[str, Sequence[Answers]], problems: Sequence[str]) -> Result:
    """Of each arm by turns taken, and what it has over the first one."""
    first = next(iter(found))
    compared: Result = {name: _by_turn(answers, problems) for name, answers in found.items()}
    more = {f"{name}_minus_{first}": gain(found[name], found[first], problems) for name in found if name != first}
    return compared | more


def _by_turn(answers: Sequence[Answers], problems: Sequence[str]) -> list[float]:
    """With one turn, two, and so on."""
    return [share(answers, problems, limit) for limit in range(1, TURNS + 1)]


def _fix_rate(evaluations: Sequence[Path]) -> float:
    """Of first turns that did not compile, how many second turns do."""
    fixed = []
    for evaluation in evaluations:
        compiled = {(row.rollout_id, row.turn): row.compiled for row in rows_of(evaluation)}
        broken = [rollout for (rollout, turn), ok in compiled.items() if turn == 0 and not ok]
        fixed += [compiled[rollout, 1] for rollout in broken if (rollout, 1) in compiled]
    return float(np.mean(fixed))


def _drawn(found: Mapping[str, Sequence[Answers]], problems: Sequence[str]) -> str:
    names = {"single": "single turns", "multi": "four turns", "mixed": "half of them four turns"}
    names |= {"equal": "four turns, as many answers", "examples": "single turns, examples"}
    names |= {"multi_examples": "four turns, examples", START: "untrained"}
    lines = []
    for arm, answers in found.items():
        each = [_by_turn([one], problems) for one in answers]
        band = [(turn, min(shares), max(shares)) for turn, shares in enumerate(zip(*each, strict=True), start=1)]
        points = [(float(turn), y) for turn, y in enumerate(_by_turn(answers, problems), start=1)]
        lines.append(plots.Series(names[arm], points, band=band))
    words = {"title": "Rollouts with a correct kernel, by what was trained", "x": "turns taken", "y": "share"}
    return str(
        plots.line_chart(
            lines, label=words["title"], box=plots.STANDALONE, standalone=words, labels="names", x_ticks=[1, 2, 3, 4]
        )
    )


if __name__ == "__main__":
    commands.main()
