"""What a runner prepares before a candidate runs: where each backend finds what was built for it.

To add a backend: its launcher in its folder, and one line in `prepare`.
"""

from kbrl_async.kernels.backends.c import launch as c
from kbrl_async.kernels.backends.inline import launch as inline
from kbrl_async.kernels.backends.nvrtc import launch as cuda
from kbrl_async.kernels.backends.triton import cache as triton_cache
from kbrl_async.kernels.backends.triton.cache import is_interpreted, refuse_what_is_not_interpreted

__all__ = ["is_interpreted", "prepare", "refuse_what_is_not_interpreted"]


def prepare(artifacts: dict[str, str], device: str) -> None:
    """Called in a confined child before its candidate's source runs: where each built artifact lies.

    Keys are those of `BuildReport.artifacts`; a backend's launcher finds its own by their prefix (`c` has none).
    `device` is `"cpu"` or `"cuda"`.
    """
    c.register({key: path for key, path in artifacts.items() if ":" not in key})
    cuda.prepare({key: path for key, path in artifacts.items() if key.startswith(cuda.PREFIX)})
    for path in (path for key, path in artifacts.items() if key.startswith(triton_cache.PREFIX)):
        triton_cache.prepare(path, device)
    inline.install({key: path for key, path in artifacts.items() if key.startswith(inline.PREFIX)})
