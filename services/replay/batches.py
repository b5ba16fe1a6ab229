"""One batch through the loss again, on the policy version that it was made for."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kbrl_async.errors import CheckpointError, UserError
from kbrl_async.learning import kept
from kbrl_async.runs.archive.archive import FILE, ArchiveReader, TurnRow
from kbrl_async.runs.folder import load_run
from protocols.records import TrainBatch, TrainGroup, TrainSample
from services.replay.updates import again, trainer_at


class BatchReplay(msgspec.Struct):
    """What `kbrl replay BATCH` says."""

    batch_id: str
    version: int
    made_of: str
    """Where the batch is from."""
    policy: str
    """What the policy was made of."""
    groups: int
    samples: int
    reason: str = ""
    """Why it was kept."""
    recorded: dict[str, float] = msgspec.field(default_factory=dict)
    replayed: dict[str, float] = msgspec.field(default_factory=dict)
    failure: str = ""
    """What the update raised."""


def replay(run_dir: Path, batch_id: str, *, as_json: bool = False) -> int:
    report = replay_batch(run_dir, batch_id)
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else in_words(report))
    return 0


def replay_batch(run_dir: Path, batch_id: str) -> BatchReplay:
    """Raises `UserError` where the batch is nowhere, `CheckpointError` where its policy is gone."""
    config = load_run(run_dir)
    found = kept.find(run_dir, batch_id)
    if found is not None:
        batch, groups, about = found
        made_of, reason, recorded = f"{kept.FOLDER}/{batch_id}", about.reason, about.metrics
    else:
        with ArchiveReader(run_dir / FILE) as archive:
            batch, groups = from_archive(archive, batch_id, config.temperature)
            recorded = next((u.metrics for u in archive.updates() if u.batch_id == batch_id), {})
        made_of, reason = "the archive", ""
    trainer, policy = trainer_at(run_dir, config, batch.index)
    result = again(trainer, groups, batch.temperature, batch.index)
    return BatchReplay(
        batch_id,
        batch.index,
        made_of,
        policy,
        len(groups),
        sum(len(group.samples) for group in groups),
        reason,
        recorded,
        result if isinstance(result, dict) else {},
        result if isinstance(result, str) else "",
    )


def from_archive(archive: ArchiveReader, batch_id: str, temperature: float) -> tuple[TrainBatch, list[TrainGroup]]:
    """The batch from its turns' records and their advantages."""
    rows = sorted(archive.rows(batch_id=batch_id), key=lambda row: (row.group_id, row.turn, row.rollout_id))
    if not rows:
        raise UserError(f"there is no batch {batch_id}", "Ids look like batch-000003; see RUN/batches for kept ones")
    groups: dict[str, TrainGroup] = {}
    for row in rows:
        group = groups.setdefault(row.group_id, TrainGroup(row.group_id, row.problem_id, row.level, []))
        group.samples.append(_sample(archive, row))
    index = rows[0].trained_on
    assert index is not None, "rows of a batch were trained on"
    return TrainBatch(batch_id, index, temperature, list(groups)), list(groups.values())


def _sample(archive: ArchiveReader, row: TurnRow) -> TrainSample:
    record = archive.record(row.task_id)
    if record is None or (written := record.generation) is None:
        raise CheckpointError(
            f"the archive no longer holds the record of {row.task_id}", "Raise archive.max_bytes in the next run"
        )
    return TrainSample(
        row.rollout_id,
        written.prompt_ids,
        written.token_ids,
        written.logprobs,
        row.advantage or 0.0,
        row.turn_return or 0.0,
        written.policy_version,
        row.turn,
        record.request.role,
    )


def in_words(report: BatchReplay) -> str:
    lines = [
        f"{report.batch_id}: {report.groups} groups, {report.samples} samples, from {report.made_of}",
        f"on policy version {report.version}, from {report.policy}",
        f"kept because of {report.reason}" if report.reason else "",
        f"the update failed: {report.failure}" if report.failure else "",
    ]
    names = [*report.replayed, *(name for name in report.recorded if name not in report.replayed)]
    width = max(map(len, names), default=0)
    for name in names:
        ours, theirs = report.replayed.get(name), report.recorded.get(name)
        lines.append(
            f"  {name:<{width}}  {_number(ours):>12}" + (f"  recorded {_number(theirs)}" if theirs is not None else "")
        )
    return "\n".join(line for line in lines if line)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
