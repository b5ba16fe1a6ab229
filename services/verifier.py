"""Verifier: all of a bench's work but the timing, on any GPU and at any time, so that benches only time what is right.

`python -m services.verifier`

::

    verify ─▶ [Bench in one thread, see `services.timing_bench`] ─▶ bench, with what was found | score
"""

from __future__ import annotations

import functools

from services.runtime.nanny import run_service
from services.runtime.service import choose_run
from services.timing_bench import main

if __name__ == "__main__":
    run_service("verifier", functools.partial(main, name="verifier"), choose_run)
