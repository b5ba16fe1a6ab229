"""Problems that are left out before training: by id, or by what a policy's answers to them came to.

::

    exclude=L1/03_gelu,runs/evals/probe ─by_id─▶ exclude: [L1/03_gelu, ids that probe's answers never or always solved]

A run stores the ids, so that a restart, a replay and another host leave out the same, whatever became of the folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kbrl_async.errors import ConfigError
from kbrl_async.runs.archive.archive import FILE, ArchiveReader
from kbrl_async.runs.config.sources import Setting, parts_of
from protocols.messages import Status
from protocols.records import VERIFIER

EXCLUDE = "exclude"
MEASURED = 4
"""Rollouts of a problem from which on they say that it is never, or always, solved."""


def by_id(setting: Setting) -> Setting:
    """`exclude` with the problems of each folder of answers in the folder's place.

    :raises ConfigError: a folder without answers.
    """
    if setting.key != EXCLUDE or not isinstance(setting.value, str | list):
        return setting
    words = parts_of(setting.value) if isinstance(setting.value, str) else [str(item).strip() for item in setting.value]
    found = [id_ for word in words if word for id_ in _ids(word, setting.origin)]
    return msgspec.structs.replace(setting, value=list(dict.fromkeys(found)))


def _ids(word: str, origin: str) -> list[str]:
    folder = Path(word).expanduser()
    if not folder.is_dir():
        return [word]
    if not (folder / FILE).is_file():
        cause = f"{EXCLUDE}: {word} holds no answers ({origin})"
        raise ConfigError(cause, "Name a run, an evaluation (runs/evals/NAME) or the ids of problems")
    solved: dict[tuple[str, str], bool] = {}
    with ArchiveReader(folder / FILE) as archive:
        for row in archive.rows():
            if row.status == Status.OK and row.reward is not None and row.role != VERIFIER:
                rollout = row.problem_id, row.rollout_id
                solved[rollout] = solved.get(rollout, False) or row.correct
    return unlearnable([(problem_id, right) for (problem_id, _), right in solved.items()])


def unlearnable(rollouts: Sequence[tuple[str, bool]]) -> list[str]:
    """The problems with `MEASURED` rollouts or more of which none, or each, was solved.

    :param rollouts: of each its problem, and whether one of its turns was right.
    """
    asked, right = Counter(id_ for id_, _ in rollouts), Counter(id_ for id_, solved in rollouts if solved)
    return sorted(id_ for id_, n in asked.items() if n >= MEASURED and right[id_] in (0, n))
