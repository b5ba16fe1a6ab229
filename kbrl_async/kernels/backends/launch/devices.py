"""The one table of where each backend's kernels run. Triton's run on a CPU in its interpreter."""

from __future__ import annotations

ON_CPU = frozenset({"c", "cpp", "triton"})
ON_GPU = frozenset({"cuda", "cuda-nvrtc", "triton"})
CPU_ONLY = ON_CPU - ON_GPU
GPU_ONLY = ON_GPU - ON_CPU
