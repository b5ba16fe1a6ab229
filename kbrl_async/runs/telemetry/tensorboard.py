"""Event files for TensorBoard without torch or TensorFlow, and the layout of the custom-scalars dashboard.

Invariants
* `flush` puts everything on disk; what was written before it survives `kill -9`.
* A continued run writes another file into the same folder: TensorBoard joins them by step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

HISTOGRAM_BINS = 30
PARTS = ("training", "system")
"""A run's two series: by update (policy version), and by seconds since the run began."""

FIRST = {
    "_overview/1_heldout_correct": "eval/correct_rate",
    "_overview/2_correct": "version/correct_rate",
    "_overview/3_reward": "version/reward_mean",
    "_overview/4_speedup": "version/speedup_mean",
    "_overview/5_rollouts_per_s": "throughput/rollouts_per_s",
}
"""Tags that are written under a second name, in the group that TensorBoard, which sorts them, opens on."""

DASHBOARDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "Overview": {
        "held-out problems": ["eval/(compile_rate|correct_rate|fast_1_proven)", "_overview/1_heldout_correct"],
        "correct, by the version that wrote it": ["version/correct_rate.*", "_overview/2_correct"],
        "reward, by version": ["version/reward_mean.*", "_overview/3_reward"],
        "speedup of correct kernels, by version": ["version/speedup_mean.*", "_overview/4_speedup"],
        "rollouts a second": ["throughput/rollouts_per_s", "_overview/5_rollouts_per_s"],
        "compiles, fast_1 and fast_1_proven, by version": ["version/(compile_rate|fast_1|fast_1_proven)"],
        "how far the run is": ["progress/done_frac"],
        "updates so far": ["progress/batch"],
        "seconds of an update": ["time/(total|train|rollout|checkpoint)_s"],
    },
    "Reward": {
        "mean, by the policy version that wrote the answers": ["version/reward_mean"],
        "of the batch: mean, min and max": ["batch/reward_(mean|min|max)"],
        "of the batch: spread": ["batch/reward_std"],
    },
    "Rates": {
        "stages passed, by policy version": ["version/(format_rate|compile_rate|correct_rate|fast_1|fast_1_proven)"],
        "of the batch: stages passed": ["batch/(format_rate|compile_rate|correct_rate|fast_1|fast_1_proven)"],
        "by the names of other dashboards, by policy version": ["rate/.*"],
        "cheating": ["(version|batch)/cheat_rate"],
        "answers cut at max_tokens": ["batch/truncated_rate"],
        "length of answers, tokens": ["tokens/answer_mean"],
        "groups by outcome": ["groups/groups_.*"],
    },
    "Speed": {
        "speedup of correct kernels, by policy version": ["version/speedup_mean"],
        "of the batch: speedup of correct kernels": ["batch/speedup_(mean|max)"],
    },
    "Staleness": {
        "versions behind when trained on": ["staleness/versions.*"],
        "versions behind after each stage": ["staleness/at_.*"],
        "groups dropped as stale": ["groups/groups_dropped_stale"],
        "tasks ended as stale or lost": ["counter/(stale|lost|expired|poisoned)"],
    },
    "Learner": {
        "importance ratio": ["policy/.*ratio.*"],
        "divergence from the behaviour policy": ["policy/.*kl.*"],
        "entropy": ["policy/.*entropy.*"],
        "effective sample size": ["policy/ess.*"],
        "gradient norm": ["policy/.*grad_norm.*"],
        "learning rate": ["policy/(lr|learning_rate)"],
        "loss": ["policy/.*loss.*"],
        "tokens dropped by the correction": ["policy/.*dropped.*"],
        "alarms": ["alarm/.*"],
        "size of advantages": ["policy/advantage_abs"],
        "seconds of an update": ["policy/(proximal|gradient|total)_s"],
        "tokens a second": ["policy/tokens_per_s"],
        "share of the hardware's peak": ["policy/mfu.*"],
        "peak memory, MB": ["policy/memory_peak_mb"],
    },
    "Turns": {
        "correct by turn": [r"turn_\d+/correct_rate"],
        "reward by turn": [r"turn_\d+/reward_mean"],
        "compiles by turn": [r"turn_\d+/compile_rate"],
        "rollouts with a correct turn": ["multiturn/success_rate"],
        "turns of a rollout": ["multiturn/avg_turns"],
        "all turns": ["multiturn/(format|compile|correct)_rate"],
        "correct turns of the best rollout": ["multiturn/correct_turns_max"],
        "best turn of a rollout": ["multiturn/best_(reward|speedup_mean)"],
        "compile errors repaired": ["multiturn/compile_fix_rate"],
        "of the batch: reward by role": ["batch/reward_mean_.*"],
    },
    "Evaluation": {
        "compiled, correct, solved, hacked": ["eval[^/]*/(compile|correct|solved|hack)_rate.*"],
        "reward": ["eval[^/]*/reward_mean"],
        "pass at k": ["eval[^/]*/pass_at_.*"],
        "faster than p": ["eval[^/]*/fast_.*"],
        "speedup": ["eval[^/]*/speedup_.*"],
    },
    "Per level": {
        "reward": [r"level\d+/reward_mean"],
        "correct": [r"level\d+/correct_rate"],
        "fast_1": [r"level\d+/fast_1.*"],
        "speedup": [r"level\d+/speedup_mean"],
    },
    "Throughput": {
        "rollouts a second": ["throughput/rollouts_per_s"],
        "tokens a second": ["throughput/tokens_per_s"],
        "updates an hour": ["throughput/updates_per_h"],
        "queue depth": ["queue/.*"],
        "in flight": ["in_flight/.*"],
        "oldest waiting, s": ["oldest_s/.*"],
        "seconds by stage": ["time/.*"],
        "busy fraction": ["busy/.*"],
    },
    "Processes": {
        "cores in use": ["cpu_cores/.*"],
        "GPU utilisation": ["gpu/.*"],
        "GPU memory, MB": ["gpu_mb/.*"],
        "memory, MB": ["rss_mb/.*"],
        "KV cache of vLLM": ["kv_usage/.*"],
        "preemptions of vLLM": ["preemptions/.*"],
        "event-loop lag, ms": ["lag_ms/.*"],
        "suspect workers": ["workers/suspect"],
        "task counters": ["counter/.*"],
    },
}
"""Dashboard → chart → patterns of tags, as the custom-scalars plugin takes them."""


class Writer:
    """Writes one run's events. Values that are not finite are left out: a chart cannot show them.

    ::

        with Writer(run_dir / "tensorboard") as board:
            board.scalars({"version/reward_mean": 0.4}, step=3)
            board.flush()
    """

    def __init__(self, folder: Path, without: Collection[str] = ()) -> None:
        """`without`: dashboards that this run has nothing for."""
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        self._write(layout_value(without), step=0)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def scalars(self, values: Mapping[str, float], step: int, at: float | None = None) -> None:
        """One event with all values, and those of `FIRST` once more. `at`: epoch seconds, now if left out."""
        every = {**values, **{first: values[tag] for first, tag in FIRST.items() if tag in values}}
        finite = [Summary.Value(tag=tag, simple_value=v) for tag, v in every.items() if math.isfinite(v)]
        if finite:
            self._write(*finite, step=step, at=at)

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        """Nothing is written for no values."""
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            self._write(histogram_value(tag, finite), step=step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, *values: Summary.Value, step: int, at: float | None = None) -> None:
        wall_time = time.time() if at is None else at
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=list(values))))


def histogram_value(tag: str, values: Sequence[float], bins: int = HISTOGRAM_BINS) -> Summary.Value:
    """Buckets of equal width as the rows (left, right, count)."""
    counts, edges = np.histogram(np.asarray(values, dtype=np.float64), bins=bins)
    rows = np.stack([edges[:-1], edges[1:], counts], axis=1)
    return _tensor_value(tag, rows, histogram_metadata.create_summary_metadata(display_name=tag, description=""))


def layout_value(without: Collection[str] = ()) -> Summary.Value:
    """The dashboards as the custom-scalars plugin reads them."""
    categories = [
        layout_pb2.Category(
            title=dashboard,
            chart=[
                layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=list(tags)))
                for title, tags in charts.items()
            ],
        )
        for dashboard, charts in DASHBOARDS.items()
        if dashboard not in without
    ]
    layout = layout_pb2.Layout(version=0, category=categories).SerializeToString()
    return _tensor_value(layout_metadata.CONFIG_SUMMARY_TAG, layout, layout_metadata.create_summary_metadata())


def _tensor_value(tag: str, content: object, meta: SummaryMetadata) -> Summary.Value:
    return Summary.Value(tag=tag, metadata=meta, tensor=make_tensor_proto(content))


def event_folder(run_dir: Path, log_dir: str | None) -> Path:
    """Where the event files of a run go: into the run, or with those of other runs into `log_dir/NAME`.

    In the second case the run's own `tensorboard` folder leads there, so that whoever reads a run finds them.
    """
    inside = run_dir / "tensorboard"
    if not log_dir:
        return inside
    folder = Path(log_dir).absolute() / run_dir.name
    for part in PARTS:
        link = inside / part
        inside.mkdir(parents=True, exist_ok=True)
        (folder / part).mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(folder / part)
    return folder
