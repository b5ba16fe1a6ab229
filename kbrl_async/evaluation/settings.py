"""What can be set of an evaluation."""

from __future__ import annotations

from typing import Literal

import msgspec

from kbrl_async.ranges import AtLeastOne, Count, NonNegative, Positive


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What 'kbrl eval' measures; a training run looks at none of it."""

    policy: str | None = None
    """What is evaluated, as 'kbrl eval' found it; null: this is no evaluation."""
    samples: AtLeastOne = 4
    """Answers per problem."""
    temperature: NonNegative | None = None
    """Sampling temperature; 0: greedy, null: that of training."""
    ids: list[str] = msgspec.field(default_factory=list)
    """Problems by id, such as L1/13_softmax or 1/13; empty: all of the levels."""
    split: Literal["all", "heldout", "train"] = "all"
    """Which of these problems: all, those that training never sees, or the others."""
    limit: AtLeastOne | None = None
    """At most so many of them, the first ones; null: all."""
    deadline_s: Positive = 900.0
    """Seconds that all samples of one problem may take together; what is missing then counts as wrong."""
    in_flight: AtLeastOne = 64
    """Samples under way at once."""
    tensorboard_log_dir: str | None = None
    """Folder of event files that the figures are added to; null: that of the evaluation itself."""
    tensorboard_step: Count | None = None
    """Step that the figures stand at; null: the policy's version."""
