"""How far off are the usual methods on a kernel against itself? One JSON line last.

Usage: `python benchmarks/timing_methods.py [--device cpu|cuda:0] [--runs N] [--budget S]`

On a GPU: `triton.testing.do_bench`, `do_bench_cudagraph` and KernelBench's cuda_event method; `benchmarks/timing_aa.py`
puts this bench beside them in the same session.
"""

from __future__ import annotations

import argparse
import json
import os
import platform

from kbrl_async.kernels.timing.cpu.host import hardware_of
from kbrl_async.lab.self_test import beside, cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--budget", type=float, default=0.15, help="seconds for one decision")
    asked = parser.parse_args()
    found = {}
    for case in cases(asked.device):
        found[case.name] = {
            name: round(e, 5) for name, e in beside(case, asked.device, asked.runs, asked.budget).items()
        }
        print(f"{case.name:20}", "  ".join(f"{name} {100 * error:.2f} %" for name, error in found[case.name].items()))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {hardware_of(asked.device)}"
    print(json.dumps({"machine": machine, "load": os.getloadavg()[0], "runs": asked.runs, "worst_error": found}))


if __name__ == "__main__":
    main()
