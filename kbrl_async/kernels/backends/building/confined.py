"""Entries of the confined Python that backends start through `BuildContext.python`: what of a candidate has to run in
order to be built (recording its compile calls, compiling its Triton kernels) runs here and nowhere else.
"""

from __future__ import annotations

import torch.utils.cpp_extension  # noqa: F401 - 0.15 s that no child has to pay

from kbrl_async.kernels.backends.inline.recording import record_inline
from kbrl_async.kernels.backends.nvrtc.ahead import compile_nvrtc
from kbrl_async.kernels.backends.triton.ahead import compile_triton, preload

__all__ = ["compile_nvrtc", "compile_triton", "record_inline"]

preload()
