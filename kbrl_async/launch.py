"""What candidates import to launch their kernels. The launchers lie with their backends, in `kernels/backends`."""

from kbrl_async.kernels.backends.c.launch import c_kernel
from kbrl_async.kernels.backends.nvrtc.launch import cuda_kernel

__all__ = ["c_kernel", "cuda_kernel"]
