"""Environments in which a model writes kernels: `taskset` (verifiers), `openenv_server`, `inspect_task`,
`cookbook`.

`KernelTaskset` and `KernelEnv` are what verifiers looks for; they are loaded when they are asked for, so that each of
them needs its own library only.
"""

from typing import Any

__all__ = ["KernelEnv", "KernelTaskset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kbrl_kernels import taskset

        return getattr(taskset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
