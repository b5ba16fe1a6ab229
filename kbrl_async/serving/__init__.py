"""The verifier as a service, without a socket: what is asked and answered, whose turn it is, what is kept.

::

    Ask ─▶ Job ─▶ Journal (on disk before it is answered) ─▶ FairQueue ─▶ an executor ─▶ Outcome ─▶ Journal ─▶ Answer

`services/verification/` gives it HTTP and executors.
"""
