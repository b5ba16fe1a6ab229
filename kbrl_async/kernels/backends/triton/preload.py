"""For a zygote whose children run Triton kernels on a GPU: importing this module imports and asks, before any fork,
what they could not afford or may not do (start a program) later.
"""

from __future__ import annotations

from kbrl_async.kernels.backends.triton import cache as triton_cache

triton_cache.preload()
