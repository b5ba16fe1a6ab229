"""What candidates import to launch kernels, one module a backend. To add one: one file here, one line below."""

from kbrl_async.launch.c import c_kernel

__all__ = ["c_kernel"]
