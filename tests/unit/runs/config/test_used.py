"""Each setting has one default and one name, is read somewhere, and arrives where sections are put together."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.kernels.timing import Recipe
from kbrl_async.kernels.verify.options import bench_options
from kbrl_async.lab.small_policy.configured import small_options
from kbrl_async.rollouts.rewards.presets import find_presets
from kbrl_async.rollouts.settings import Reward
from kbrl_async.runs.config import KEYS, Config
from kbrl_async.runs.config.keys import SECTIONS
from kbrl_async.runs.planning import plan_of, rollout_rules, turn_rules
from protocols.limits import LedgerOptions
from protocols.messages import Stage

ROOT = Path(__file__).parents[4]
SETTINGS = {
    ROOT / "kbrl_async" / path
    for path in (
        "runs/config/schema.py", "runs/settings.py", "kernels/settings.py", "learning/settings.py",
        "rollouts/settings.py", "sampling/settings.py", "evaluation/settings.py", "weights/settings.py",
    )
}  # fmt: skip
DEFAULTS: dict[str, list[Any]] = {}
for _name, _key in KEYS.items():
    DEFAULTS.setdefault(_name.rpartition(".")[2], []).append(_key.default)

SEED = "a resampling or a corpus has a seed of its own, the same for every run"
DEVICE = "a device in PyTorch's words, not the setting auto|cpu|cuda; who has the setting passes it resolved"
DTYPE = "a PyTorch number format, not the choice of the learner or sampler"
ALONE = "the caller of one kernel alone, without a configuration; a run passes its own"
CORPUS = "the corpus without them; the small policy passes its options"
OWN = "a limit of another thing that has the same name"
DRAWN = "a drawing's own, no setting"
COUNTED = "a figure that is counted, not set"
AS_IT_IS = "a model as it is; who trains passes the setting"
SEARCH = "the search's own start, which its command always gives"
OTHERWISE: Mapping[str, str] = {
    "KnownKernel.dtype": DTYPE,
    "Buffer.dtype": DTYPE,
    "export.dtype": DTYPE,
    "load_model.dtype": DTYPE,
    "mean_over_problems.seed": SEED,
    "share.seed": SEED,
    "geometric_mean_speedup.seed": SEED,
    "median_speedup.seed": SEED,
    "SanitizeTask.seed": SEED,
    "generate.seed": SEED,
    "bench.rules": "a kernel of a person's own; a run passes its setting",
    "default_bench.rules": "whoever judges without a run; a run passes its setting",
    "Serve.rules": "what others' trainers and agents ask; over a run's broker it is the run's setting",
    "judge.profile": "whoever judges without a run; a run passes its setting",
    "Profile.device": DEVICE,
    "get_problem.backend": "a coding agent's choice, of one call",
    "SmallPolicyOptions.seed": SEED,
    "__init__.seed": "a transformers engine outside of a run; a run passes that of the process",
    "SanitizeTask.device": DEVICE,
    "AuditTask.device": DEVICE,
    "run.device": DEVICE,
    "check.device": DEVICE,
    "wrapper.device": DEVICE,
    "bench_options.device": DEVICE,
    "Setup.device": DEVICE,
    "ensure_small_policy.device": DEVICE,
    "load_model.device": DEVICE,
    "__init__.device": DEVICE,
    "__init__.backend": ALONE,
    "judge.backend": ALONE,
    "zygote_for.backend": ALONE,
    "verify.precision": ALONE,
    "Ask.precision": ALONE,
    "Careful.cap_s": "a careful measurement takes longer than one of a run",
    "Evaluate.backend": "KernelGYM's own default, of its own wire",
    "Serve.device": DEVICE,
    "Serve.keep": "ended jobs of a service, not records of an archive",
    "RewardOptions.device": DEVICE,
    "RunOptions.precision": ALONE,
    "load_problems.precision": ALONE,
    "examples.backend": CORPUS,
    "write_example.backend": CORPUS,
    "write_turn.backend": CORPUS,
    "write_verdict.backend": CORPUS,
    "examples.turn_share": CORPUS,
    "examples.shot_share": CORPUS,
    "__init__.max_bytes": OWN,
    "SanitizeTask.max_bytes": OWN,
    "freeze.deadline_s": OWN,
    "__init__.deadline_s": OWN,
    "counted.deadline_s": OWN,
    "Limits.processes": OWN,
    "Limits.nice": OWN,
    "cuda_events.flush_bytes": "a second way to measure, for comparison only",
    "Recipe.margin": "of the interval of a timing, not of an alarm",
    "BenchOptions.memory_share": "the bench's own share, not the sampler's",
    "BenchOptions.slots": "children of a bench, not of a sampler or farm",
    "parse_problem.split": "of one problem, not the choice of an evaluation",
    "TensorMeta.kind": "of a tensor, not of the curriculum",
    "__init__.sanitize_share": "a judge outside of a run sanitises nothing; a bench passes the setting",
    "__init__.max_turns": SEARCH,
    "SearchOptions.max_turns": SEARCH,
    "DriveOptions.backend": SEARCH,
    "__init__.max_tokens": "no bound where no policy reads the prompt",
    "StageWork.processes": COUNTED,
    "LearnerProgress.samples": COUNTED,
    "chart.window": DRAWN,
    "compare_page.window": DRAWN,
    "Series.window": DRAWN,
    "linear.steps": DRAWN,
    "load_model.lora_rank": AS_IT_IS,
    "load_model.base_quantisation": AS_IT_IS,
    "submit.max_staleness": "-1 on the wire: may be of any age",
}
"""By struct.field or function.parameter, why it is no second default of the setting of that name."""


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The source that settings are used in."""
    paths = [path for top in ("kbrl_async", "services") for path in sorted((ROOT / top).rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in paths if "problems/suite" not in str(path)}


def constant(node: ast.expr | None) -> Any:
    """What a default is, as far as it is written out, such as `512 << 20`; else None."""
    if node is None or any(isinstance(part, ast.Name | ast.Call | ast.Lambda) for part in ast.walk(node)):
        return None
    return eval(compile(ast.Expression(node), "default", "eval"), {"__builtins__": {}})


def written(tree: ast.Module) -> Iterator[tuple[str, str, Any]]:
    """(owner.name, name, default) of all fields and parameters that have one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield f"{node.name}.{field.target.id}", field.target.id, constant(field.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            places = [*node.args.posonlyargs, *node.args.args]
            first = len(places) - len(node.args.defaults)
            pairs = [*zip(places[first:], node.args.defaults, strict=True)]
            pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d]
            for argument, default in pairs:
                yield f"{node.name}.{argument.arg}", argument.arg, constant(default)


def second_defaults() -> dict[str, list[str]]:
    """By struct.field or function.parameter, the files with a default of a setting's name and kind."""
    found: dict[str, list[str]] = {}
    for path, tree in trees().items():
        for where, name, value in written(tree) if path not in SETTINGS else ():
            if value not in (None, "") and any(type(value) is type(own) for own in DEFAULTS.get(name, [])):
                found.setdefault(where, []).append(str(path.relative_to(ROOT)))
    return found


def test_no_default_of_a_setting_is_written_twice() -> None:
    assert {where: paths for where, paths in second_defaults().items() if where not in OTHERWISE} == {}


def test_every_exception_is_one() -> None:
    assert set(OTHERWISE) <= set(second_defaults())
    assert all(len(why) > 10 for why in OTHERWISE.values())


BY_PROPERTY = {
    **{name: "Broker.leases" for name in KEYS if name.startswith("broker.lease_")},
    **{
        f"reward.{part}_weight": "Reward.weights"
        for part in ("format", "compile", "correctness", "speed", "coverage", "above_1")
    },
}
"""Read by a property of their section, under a composed name."""
ONLY_CHECKED = {"broker.allow_remote"}
"""Consent, which the checks between keys ask for and nobody else needs."""


def read_names() -> set[str]:
    """Attributes that are read, and names that a getattr is given, outside of what only reads and checks settings."""
    names: set[str] = set()
    for path, tree in trees().items():
        if "runs/config" in str(path) and path.name not in ("layout.py", "placement.py", "schema.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path not in SETTINGS:
                names.add(node.value)
    return names


def test_every_setting_is_read_by_its_own_name() -> None:
    names = read_names()
    unread = {name for name in KEYS if name.rpartition(".")[2] not in names}
    assert unread - set(BY_PROPERTY) - ONLY_CHECKED == set()
    assert {prop.partition(".")[2] for prop in BY_PROPERTY.values()} <= names


def changed(value: Any) -> Any:
    """Another value of the same kind that every range allows."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value / 2 if value else 0.25
        case str():
            return value + "x"
        case _:
            return value


def otherwise(section: msgspec.Struct) -> Any:
    """`section` with another value in every field of a plain kind."""
    values = {name: changed(getattr(section, name)) for name in section.__struct_fields__}
    return msgspec.structs.replace(section, **values)


CONFIG = msgspec.structs.replace(
    otherwise(Config()),
    mode="multi_turn",
    method="grpo",
    **{name: otherwise(getattr(Config(), name)) for name in SECTIONS},
)
"""Every plain setting is another one than by default; the sections are put in after the keys at the top."""


def arrives(made: Any, settings: Any, *names: str) -> None:
    """What was made has the settings' values of these names, and none is by accident the default."""
    default = getattr(Config(), next((n for n, kind in SECTIONS.items() if isinstance(settings, kind)), ""), Config())
    for name in names:
        assert getattr(made, name) == getattr(settings, name) != getattr(default, name), name


def test_a_bench_gets_its_settings() -> None:
    bench = CONFIG.timing_bench
    made = bench_options(bench)
    arrives(made, bench, "deadline_s")
    arrives(made.recipe, bench, "min_pairs", "max_pairs", "cap_s", "flush_bytes")
    arrives(Recipe.of(bench), bench, "min_pairs", "max_pairs", "cap_s", "flush_bytes")


def test_the_state_of_a_run_gets_its_settings() -> None:
    plan = plan_of(msgspec.structs.replace(CONFIG, problems=None, precision="fp32", backend="c", level=[1]))
    arrives(plan, CONFIG, "group_size", "seed", "max_minutes", "eval_samples", "eval_every", "eval_credit")
    arrives(plan.buffer, CONFIG, "batch_size", "max_steps", "max_staleness", "advantage")
    arrives(plan.buffer, CONFIG.learner, "scale_advantages")
    assert plan.curriculum is CONFIG.curriculum
    assert plan.alarms is CONFIG.alarms
    assert plan.turns == turn_rules(CONFIG)
    arrives(plan.turns, CONFIG, "max_turns", "gamma", "turns")


def test_rollouts_get_their_settings() -> None:
    rules = rollout_rules(CONFIG)
    arrives(rules, CONFIG, "mode", "backend")
    assert rules.prompt_option == CONFIG.prompt_option


def test_the_small_policy_gets_its_settings() -> None:
    config = msgspec.structs.replace(CONFIG, prompt=msgspec.structs.replace(CONFIG.prompt, option="raicl"))
    options = small_options(config)
    assert options.sft == config.sft
    assert (options.backend, options.prompt_option, options.verdict_share) == (config.backend, config.prompt_option, 0)
    agents = small_options(msgspec.structs.replace(config, mode="agents"))
    assert agents.sft.turn_share == agents.verdict_share == config.sft.turn_share / 2
    alone = small_options(msgspec.structs.replace(CONFIG, mode="single_turn"))
    assert (alone.sft.turn_share, alone.sft.shot_share) == (0, 0)


def test_the_ledger_gets_every_lease_and_the_heartbeat() -> None:
    broker = CONFIG.broker
    ledger = LedgerOptions.of(broker.heartbeat_s, broker.leases)
    arrives(ledger, broker, "heartbeat_s")
    assert {stage: ledger.stage(stage).ttl_s for stage in broker.leases} == broker.leases
    assert set(broker.leases) == {stage.value for stage in Stage}


def test_a_reward_gets_its_weights() -> None:
    weights = {"format": 0.11, "compile": 0.12, "correctness": 0.13, "speed": 0.14}
    reward = Reward(
        plan_part="speed", plan_weight=0.3, **{f"{part}_weight": weight for part, weight in weights.items()}
    )
    (preset,) = find_presets(reward)
    assert (preset.weights, preset.plan_part, preset.plan_weight) == (weights, "speed", 0.3)
