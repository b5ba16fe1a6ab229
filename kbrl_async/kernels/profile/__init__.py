"""What limits a kernel, in words that fit into a prompt: never a verdict, and never part of a reward.

::

    a correct, timed kernel ┬─▶ roofline: bytes and flops of the reference, peaks of this host
                            ├─▶ a processor: counters where the host has them, the compiler's vectorisation report
                            └─▶ a GPU: Nsight Compute where it is allowed, else a timeline of its kernels
                                                                        ─▶ Profile ─▶ text()
"""

from kbrl_async.kernels.profile.facts import KernelFacts, Profile, Roofline

__all__ = ["KernelFacts", "Profile", "Roofline"]
