"""The calls of CUDA's driver API that torch has no name for, through ctypes: machine code and its launches, memory that
can be shared by descriptor, graphs. The one binding, for launchers in children and for the trusted side.

Thin: each raises `CudaError` and decides nothing. Importing it loads no library; `driver()` does, and only `device`
initialises CUDA (else torch does that). Function pointers are taken once, before any candidate code can run in the
process.

By ctypes, though wheels of torch bring `cuda.bindings`: only those from 2.10 on and only for GPUs do, a launch through
ctypes takes two microseconds, and hosts that only build have neither the driver nor the bindings.
"""

from kbrl_async.kernels.cuda_driver.calls import Arguments, CudaError, Launch
from kbrl_async.kernels.cuda_driver.driver import (
    CHILD,
    DEFAULT_SHARED,
    EMPTY,
    HOST,
    KERNEL,
    MEMCPY,
    MEMSET,
    Driver,
    driver,
)

__all__ = [
    "CHILD",
    "DEFAULT_SHARED",
    "EMPTY",
    "HOST",
    "KERNEL",
    "MEMCPY",
    "MEMSET",
    "Arguments",
    "CudaError",
    "Driver",
    "Launch",
    "driver",
]
