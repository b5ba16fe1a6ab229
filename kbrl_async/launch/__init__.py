"""What candidates import to launch kernels, one module a backend, and what a runner prepares for them.

To add one: one file here, its public names below, and one line in `prepare`.
"""

from kbrl_async.launch import c, cuda, inline, triton_cache
from kbrl_async.launch.c import c_kernel
from kbrl_async.launch.cuda import cuda_kernel
from kbrl_async.launch.triton_cache import is_interpreted, refuse_what_is_not_interpreted

__all__ = ["c_kernel", "cuda_kernel", "is_interpreted", "prepare", "refuse_what_is_not_interpreted"]


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
