"""What candidates import to launch kernels, one module a backend, and what a runner prepares for them.

To add one: one file here, its public names below, and one line in `prepare`.
"""

from kbrl_async.launch import c
from kbrl_async.launch.c import c_kernel

__all__ = ["c_kernel", "prepare"]


def prepare(artifacts: dict[str, str], device: str) -> None:
    """Called in a confined child before its candidate's source runs: where each built artifact lies.

    Keys are those of `BuildReport.artifacts`; a backend's launcher finds its own by their prefix (`c` has none).
    `device` is `"cpu"` or `"cuda"`.
    """
    c.register({key: path for key, path in artifacts.items() if ":" not in key})
