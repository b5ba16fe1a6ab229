"""The configuration of a run: its keys, where they are read from, and what follows from them and the host.

`schema` composes the `settings` of the wings, `loading` reads files, variables and the command line, `layout` derives.
Never touches: torch, sockets, another room.

To add a key: one field with its docstring in `schema` or a wing's `settings`; a rule between two keys: a line in
`checks`.
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

__all__ = [
    "BEHIND",
    "CONFIG_FILE",
    "KEYS",
    "SCALABLE",
    "SERVICES",
    "Config",
    "CpuLayout",
    "Endpoints",
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
