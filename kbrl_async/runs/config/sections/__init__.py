"""The sections of a configuration, by subject. Each is a frozen struct, each string under a field its documentation.

| module | sections |
|---|---|
| `training` | what is learned, from what, and what is done when it goes wrong |
| `actors` | the processes: what each kind does, how many, on which cores, where they meet |
| `watching` | what is kept and shown of a run; what an evaluation measures |
"""

from kbrl_async.runs.config.sections.actors import Broker, Cpu, Processes
from kbrl_async.runs.config.sections.training import (
    Demonstrations,
)
from kbrl_async.runs.config.sections.watching import Archive, Metrics, Tensorboard

__all__ = [
    "Archive",
    "Broker",
    "Cpu",
    "Demonstrations",
    "Metrics",
    "Processes",
    "Tensorboard",
]
