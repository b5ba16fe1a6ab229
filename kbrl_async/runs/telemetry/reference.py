"""The reference of all metrics as Markdown: docs/reference/metrics.md is `kbrl config --metrics`, made by `make docs`.

::

    TAGS (words) + DASHBOARDS (where a tag is drawn) + the Prometheus families themselves ─▶ Markdown

Invariants
* The tests hold `TAGS` to what the code really writes, both ways: no tag without words, no words without a tag.
* `{…}` in a tag stands for a level, stage, process, or what else its words say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from kbrl_async.runs.telemetry import prometheus
from kbrl_async.runs.telemetry.tensorboard import DASHBOARDS
from protocols.messages import Load, StageStanding, StatusReport, WorkerStanding

_RATES = {
    "reward_mean": "mean reward",
    "format_rate": "share from which a kernel could be extracted",
    "compile_rate": "share that compiled",
    "correct_rate": "share that was correct",
    "cheat_rate": "share that was caught cheating",
    "fast_1": "share that was correct and more than once as fast by the point estimate",
    "fast_1_proven": "share that was correct and whose whole interval lies above 1",
    "speedup_mean": "geometric mean of the speedups of correct kernels",
    "workload_rate": "share of workloads that kernels were right on, of problems with several",
}
_BY_UPDATE = {
    **{f"batch/{name}": words for name, words in _RATES.items()},
    "batch/reward_mean_{role}": "mean reward of solver, verifier and corrector (`mode=agents`)",
    "batch/reward_std": "standard deviation of the rewards",
    "batch/reward_min": "the smallest reward",
    "batch/reward_max": "the largest",
    "batch/speedup_max": "the largest speedup of a correct kernel",
    "batch/truncated_rate": "share of answers that were cut at `max_tokens`",
    "batch/replayed_rate": "share of the correct ones whose recorded work a trusted process did again",
    "batch/full_build_rate": "share of extensions that had to be built with torch's own headers, a minute each; why is"
    " in the summary",
    "tokens/answer_mean": "mean length of an answer, tokens",
    "staleness/versions_mean": "versions between writing a rollout and training on it, mean",
    "staleness/versions_max": "the same, largest",
    "staleness/at_{stage}_mean": "versions that a rollout was old at the end of that stage, mean",
    "time/{phase}_s": "mean seconds of a rollout in generate, compile, bench, and waiting (queue)",
    "time/rollout_s": "mean seconds of a rollout in all of these together",
    "time/train_s": "seconds of the learner's update, its checkpoint and publishing included",
    "time/checkpoint_s": "of these, seconds of the checkpoint (`learner.checkpoint_every`)",
    "time/total_s": "seconds since the update before",
    "progress/batch": "updates since the run began",
    "progress/done_frac": "of `max_steps`, share that is done",
    "_overview/5_rollouts_per_s": "rollouts scored a second since the update before; also `throughput/rollouts_per_s`",
    "groups/groups_admitted": "groups admitted since the run began",
    "groups/groups_trained": "of these, trained on",
    "groups/groups_filtered": "of these, dropped because all rewards were alike",
    "groups/groups_dropped_stale": "of these, dropped because they were older than `max_staleness`",
    "groups/groups_failed": "of these, without enough verdicts through a fault that is not the candidates'",
    "groups/rollouts": "scored training rollouts since the run began",
    "groups/updates": "updates since the run began",
    "groups/max_staleness": "largest age of a rollout that was trained on since the run began",
    "alarm/{name}": "level of an alarm: 0 quiet, 1 raised, more: got worse",
    "histogram/rewards": "rewards of the update (every `tensorboard.histograms_every` updates)",
    "histogram/speedups": "speedups of correct kernels",
    "histogram/advantages": "advantages",
}
_LEARNER = {
    "policy/loss": "loss, mean over the optimizer steps of the update",
    "policy/grad_norm": "norm of the gradient before clipping, mean over the steps",
    "policy/grad_norm_max": "the largest",
    "policy/lr": "learning rate of the last step",
    "policy/optimizer_step": "optimizer steps so far",
    "policy/ratio_p01": "importance ratio exp(π − μ) over tokens and epochs: 1st percentile",
    "policy/ratio_p50": "its median",
    "policy/ratio_p99": "its 99th percentile",
    "policy/ratio_max": "the largest",
    "policy/dropped_share": "share of tokens that the loss drops or clips",
    "policy/masked_share": "share of tokens that `corrections` mask",
    "policy/kl_reference": "divergence from the first policy (`learner.kl`)",
    "policy/mismatch_kl": "k3 divergence of sampler and learner in the first minibatch, before any step",
    "policy/mismatch_kl_fresh": "the same over samples as new as the policy: numerics alone",
    "policy/mismatch_ratio_max": "largest ratio, either way, of sampler and learner there",
    "policy/entropy": "mean entropy of the policy's tokens in the first epoch, nats",
    "policy/entropy_last": "the same in the later epochs",
    "policy/ess": "effective sample size of the importance weights in the first epoch, as a share",
    "policy/samples": "samples of the update",
    "policy/response_tokens": "answer tokens of the update",
    "policy/response_length": "answer tokens a sample",
    "policy/input_tokens": "tokens that went through the model, all epochs, shared prompts once",
    "policy/reward_mean": "mean reward as the learner saw it",
    "policy/advantage_abs": "mean size of the advantages",
    "policy/staleness_mean": "age of the samples in versions, mean",
    "policy/staleness_max": "the same, largest",
    "policy/proximal_s": "seconds for log-probs before the first step (proximal and reference policy)",
    "policy/gradient_s": "seconds in forward and backward passes",
    "policy/total_s": "seconds of the whole update",
    "policy/tokens_per_s": "`input_tokens` a second of `gradient_s`",
    "policy/mfu": "share of the hardware's peak (`learner.peak_tflops`) that the update used",
    "policy/memory_peak_mb": "most memory so far: of the GPU's allocator, or resident, MiB",
}
_VERSIONS = {
    f"version/{name}": f"{words}, of all answers that a policy version wrote" for name, words in _RATES.items()
} | {
    "version/{figure}_{end}": "ends of its 95 % interval over groups, lo and hi",
    "rate/{rate}": "`version/{rate}_rate` by the name that other dashboards have: format, compile, correct, cheat",
    "_overview/1_heldout_correct": "`eval/correct_rate`, where TensorBoard shows it first",
    "_overview/2_correct": "`version/correct_rate`, likewise",
    "_overview/3_reward": "`version/reward_mean`, likewise",
    "_overview/4_speedup": "`version/speedup_mean`, likewise",
}
_BROKEN_DOWN = {f"level{{level}}/{name}": f"{words}, of this level" for name, words in _RATES.items()} | {
    f"turn_{{turn}}/{name}": f"{words}, of this turn" for name, words in _RATES.items()
}
_TURNS = {
    "multiturn/success_rate": "share of rollouts with a correct turn",
    "multiturn/avg_turns": "turns of a rollout, mean",
    "multiturn/format_rate": "share of all turns from which a kernel could be extracted",
    "multiturn/compile_rate": "share of all turns that compiled",
    "multiturn/correct_rate": "share of all turns that were correct",
    "multiturn/correct_turns_max": "correct turns of the rollout that has most",
    "multiturn/best_reward": "best reward of a rollout, mean",
    "multiturn/best_speedup_mean": "best speedup of a rollout that has a correct turn, mean",
    "multiturn/compile_fix_rate": "of rollouts whose first turn did not compile, share whose second did",
}
_EVALUATION = {
    "{eval}/compile_rate": "share of samples that compiled",
    "{eval}/correct_rate": "share that was correct",
    "{eval}/correct_rate_{end}": "ends of its bootstrap interval, lo and hi (`kbrl eval` only)",
    "{eval}/hack_rate": "share that was caught cheating",
    "{eval}/pass_at_{k}": "pass@k (`kbrl eval` only)",
    "{eval}/fast_{p}": "share that is correct and more than p times as fast, by the point estimate (`eval_every`: 1)",
    "{eval}/fast_{p}_vs_{baseline}": "the same against torch.compile (`timing_bench.baselines`)",
    "{eval}/fast_1_proven": "share that is correct and whose whole interval lies above 1",
    "{eval}/fast_1_proven_vs_{baseline}": "the same against torch.compile",
    "{eval}/speedup_geometric_mean": "geometric mean of the speedups of correct samples",
    "{eval}/speedup_geometric_mean_vs_{baseline}": "the same against torch.compile",
    "{eval}/speedup_median": "their median (`kbrl eval` only)",
    "{eval}/speedup_median_vs_{baseline}": "the same against torch.compile",
    "eval/reward_mean": "mean reward (of a run only)",
    "eval/solved_rate": "share of problems with a correct sample (of a run only)",
    "eval/policy_version_mean": "mean version that really wrote the answers (of a run only)",
}
_SYSTEM = {
    "queue/{stage}": "tasks that wait at a stage",
    "in_flight/{stage}": "tasks that are leased at a stage",
    "oldest_s/{stage}": "seconds that the head of a stage's queue has waited",
    "counter/{event}": "what the broker's ledger has counted since the run began",
    "busy/{process}": "share of the last second at work",
    "cpu_cores/{process}": "cores in use by the process and its children",
    "lag_ms/{process}": "worst lag of its event loop in the last second, ms",
    "rss_mb/{process}": "resident memory, MiB",
    "gpu/{process}": "utilisation of its GPUs in the mean, 0 to 1",
    "gpu_mb/{process}": "memory in use on its fullest GPU, MiB",
    "kv_usage/{process}": "share of a vLLM sampler's KV cache that is in use; also `kbrl_sampler_kv_usage`",
    "preemptions/{process}": "sequences that its memory made start anew, so far; also `kbrl_sampler_preemptions`",
    "workers/suspect": "workers that miss their heartbeats",
    "throughput/rollouts_per_s": "rollouts scored a second",
    "throughput/tokens_per_s": "tokens generated a second",
    "throughput/updates_per_h": "updates an hour",
}
TAGS: Mapping[str, Mapping[str, str]] = {
    "By policy version: training": _VERSIONS,
    "By update: rollouts": _BY_UPDATE,
    "By update: learner": _LEARNER,
    "By policy version: levels and turns": _BROKEN_DOWN | _TURNS,
    "By policy version: evaluation": _EVALUATION,
    "By second: the system": _SYSTEM,
}
"""Chapter → tag → what it is."""
_NOTES = {
    "By policy version: training": "At the version that wrote the answers, whenever they were scored, once all of them"
    " are in: a few updates later. What the run's end cut off is in none.",
    "By policy version: levels and turns": "Of the same answers as `version/*`.",
    "By update: rollouts": "Of the batch that was trained on: whole groups as they became complete, quick ones first,"
    " of several policy versions, without those whose rewards were all alike. No measure of a policy.",
    "By policy version: evaluation": "Of a run: before training (version 0), after it, and with `eval_every` between."
    " `{eval}` is `eval`, `eval_level1` …, and `eval_filtered` where an audit holds"
    " something against a problem.",
    "By second: the system": "Written by the broker once a second into `metrics/system.jsonl`, from there here.",
}
_LETTERS = re.compile(r"\{\w+\}")


def pattern(tag: str) -> re.Pattern[str]:
    """What a tag of `TAGS` stands for."""
    parts = (re.escape(part) for part in _LETTERS.split(tag))
    return re.compile(r"[\w.:@+-]+?".join(parts))


def described(tag: str) -> str:
    """The tag of `TAGS` that a written tag is; empty where there is none."""
    known = [name for chapter in TAGS.values() for name in chapter]
    found = [name for name in known if pattern(name).fullmatch(tag)]
    return max(found, key=lambda name: len(_LETTERS.sub("", name)), default="")  # the most exact one


def drawn(tag: str) -> str:
    """The first dashboard that draws such a tag; empty where it is among the plain scalars only."""
    example = _LETTERS.sub("1", tag.replace("{eval}", "eval").replace("{event}", "stale"))
    for dashboard, charts in DASHBOARDS.items():
        if any(re.fullmatch(wanted, example) for patterns in charts.values() for wanted in patterns):
            return dashboard
    return ""


def families() -> Iterator[tuple[str, Metric]]:
    """(who serves it, the family) of everything but the figures of the last update."""
    load = Load(gpu=0.0)
    for family in prometheus.load_families(load):
        yield "every process", family
    report = StatusReport(
        stages=[StageStanding("compile")], workers=[WorkerStanding("worker", load=load)], counters={"stale": 0}
    )
    for family in prometheus.status_families(report):
        yield "the broker", family


def as_markdown() -> str:
    """docs/reference/metrics.md."""
    lines = ["# Metrics", "", "Made by `make docs` from the code. How to read them: [watching](../watching.md).", ""]
    lines += ["A mean over nothing is left out, never 0.", "", "## TensorBoard", ""]
    for chapter, tags in TAGS.items():
        lines += [f"### {chapter}", "", *([_NOTES[chapter], ""] if chapter in _NOTES else [])]
        lines += ["| tag | | dashboard |", "|---|---|---|"]
        lines += [f"| `{tag}` | {words} | {drawn(tag)} |" for tag, words in tags.items()]
        lines.append("")
    return "\n".join([*lines, *_prometheus()])


def _prometheus() -> list[str]:
    lines = ["## Prometheus", "", "| name | kind | labels | served by | |", "|---|---|---|---|---|"]
    for server, family in families():
        suffix = "_total" if family.type == "counter" else ""
        labels = ", ".join(dict.fromkeys(name for sample in family.samples for name in sample.labels))
        lines.append(f"| `{family.name}{suffix}` | {family.type} | {labels} | {server} | {family.documentation} |")
    example, by_level = (prometheus.metric_name(tag) for tag in ("version/correct_rate", "level/correct_rate"))
    words = (
        f"The reward aggregator serves the tags' last values as well: `version/correct_rate` is `{example}`, "
        f'`level2/correct_rate` is `{by_level}{{level="2"}}`; `turn_` alike.'
    )
    return [*lines, "", words, ""]
