"""`kbrl optimize` on ten held-out problems of the suite and on three modules that are in no suite.

    python benchmarks/optimize.py --policy runs/multi-turn --seconds 40

The anchor of each row is the module itself under PyTorch, timed in pairs with the kernel. One JSON line comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kbrl_async.cli import optimize
from kbrl_async.kernels.problems import load_suite
from kbrl_async.lab.optimize import engine, evidence, session
from kbrl_async.lab.optimize.search import Budget
from kbrl_async.lab.optimize.targets import Given, UserModule, read_target

OWN = Path(__file__).with_name("user_modules.py")
MODULES = (
    ("bias_gelu_residual", Given("torch.randn(512, 1024), torch.randn(1024), torch.randn(512, 1024)")),
    ("MaskedSoftmax", Given("torch.randn(512, 512), torch.randn(512, 512)", init="2.0")),
    ("huber_rows", Given(inputs_from="make_pairs")),
)
HELDOUT = 10


def targets(heldout: int) -> list[UserModule]:
    suite = load_suite(split="heldout")[:heldout]
    own = [read_target(f"{OWN}:{name}", given) for name, given in MODULES]
    return [*(UserModule(p, p, "file", "Model", p.problem_id) for p in suite), *own]


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    policy, config = engine.resolve(args.policy, "newest", [], args.overrides)
    rows = []
    console = Console(stderr=True)
    wanted = session.Wanted(Budget(args.seconds), args.turns, args.examples)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        threads = stack.enter_context(session.pinned(config))
        verifiers = stack.enter_context(session.open_verifiers(config))
        opening = engine.open_engine(policy, config, threads, lambda _what, _share: None)
        async with opening as opened:
            for target in targets(args.heldout):
                began = time.monotonic()
                output = Path(folder) / f"optimized_{target.stem}.py"
                done = await optimize.optimise(wanted, config, target, output, opened, verifiers, console)
                rows.append(row(target, done, time.monotonic() - began))
                console.print(json.dumps(rows[-1]), highlight=False, markup=False)
    return rows


def row(target: UserModule, done: evidence.SearchResult, seconds: float) -> dict[str, Any]:
    """What one module came to; `by_policy` counts the kernels that the policy itself was proven right with."""
    proven = done.search.tree.proven()
    final = done.proof.winner if done.proof else max(done.finals, key=lambda f: f.result.ok, default=None)
    timing = final.result.timing if final else None
    by_policy = [a.judgement.lo or 0.0 for a in proven if a.origin == "policy"]
    return {
        "module": target.title,
        "proven": bool(proven),
        "written": done.proof is not None,
        "speedup": None if timing is None else [round(x, 2) for x in (timing.speedup, timing.lo, timing.hi)],
        "stopped": timing.stopped if timing else "",
        "origin": done.search.tree[final.attempt].origin if final else "",
        "by_policy": len(by_policy),
        "best_of_policy_lo": round(max(by_policy), 2) if by_policy else None,
        "refined": sum(a.parent is not None for a in proven),
        "attempts": len(done.search.tree),
        "verified": evidence.counts(done.search)["distinct"],
        "seconds": round(seconds, 1),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("module", "proven", "speedup", "by", "policy's own", "attempts", "seconds")
    for r in rows:
        speed = "" if r["speedup"] is None else "{:.2f}× [{:.2f}, {:.2f}]".format(*r["speedup"])
        own = f"{r['by_policy']} ({r['best_of_policy_lo']}×)" if r["by_policy"] else "0"
        said = "yes" if r["written"] else "not faster" if r["proven"] else "no"
        table.add_row(r["module"], said, speed, r["origin"], own, str(r["attempts"]), f"{r['seconds']:.0f}")
    Console(stderr=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="")
    parser.add_argument("--seconds", type=float, default=40.0, help="for the search of one module")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--heldout", type=int, default=HELDOUT)
    parser.add_argument("--examples", default="")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    before = os.getloadavg()
    rows = asyncio.run(measure(args))
    show(rows)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    load = {"before": [round(x, 1) for x in before], "after": [round(x, 1) for x in os.getloadavg()]}
    sys.stdout.write(json.dumps({"benchmark": "optimize", "machine": machine, "load": load, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
