"""The configuration of a run, and the folder that it lives in.

Owns: the keys (`schema`, `sections`, `ranges`), reading them from files, variables and the command line (`loading`),
the run folder (`rundir`), and what follows from keys and host (`layout`). Never touches: torch, sockets, another room.

To add a key: one field with its docstring in `schema` or `sections`; a rule between two keys: one line in `checks`.
"""

from kbrl_async.runs.config.keys import KEYS
from kbrl_async.runs.config.layout import (
    BEHIND,
    SCALABLE,
    SERVICES,
    CpuLayout,
    Endpoints,
    available_cores,
    behind,
    bound,
    compile_slots,
    cpu_layout,
    endpoints,
    learner_threads,
    process_counts,
    sampler_threads,
)
from kbrl_async.runs.config.loading import CONFIG_FILE, config_hash, environment, load, to_yaml
from kbrl_async.runs.config.schema import Config
from kbrl_async.runs.config.sections import (
    Broker,
    Cpu,
    Processes,
    Tensorboard,
)

__all__ = [
    "BEHIND",
    "CONFIG_FILE",
    "KEYS",
    "SCALABLE",
    "SERVICES",
    "Broker",
    "Config",
    "Cpu",
    "CpuLayout",
    "Endpoints",
    "Processes",
    "Tensorboard",
    "available_cores",
    "behind",
    "bound",
    "compile_slots",
    "config_hash",
    "cpu_layout",
    "endpoints",
    "environment",
    "learner_threads",
    "load",
    "process_counts",
    "sampler_threads",
    "to_yaml",
]
