"""Ten updates of the default problems at Tinker, without an account: both killed on the way, then counted by SQL.

    python -m tests.tinker_demo [--folder FOLDER] [settings …]

A service of `tests/tinker_service.py` in a process of its own trains and samples from the project's small policy; this
host builds, verifies, times and pays. After the third update the learner is killed (`kill -9`), after the sixth the
sampler, and after the eighth the whole run, which the same command continues.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.running import REPOSITORY, Run, assert_counters_add_up

KEY = "tml-of-the-demonstration"
ENGINES = ("learner.engine=tinker", "sampler.engine=tinker", "lora_rank=16", "learning_rate=2e-3", "eval_samples=0")
DEFAULT = ("level=1,2,3", "batch_size=4", "group_size=4", "max_steps=10", "max_minutes=60")


@contextlib.contextmanager
def service(cache: Path, settings: Sequence[str]) -> Iterator[list[str]]:
    """A service in a process of its own, with the small policy of these settings; how a run is told of it.

    The run names the policy's folder, so that it makes none itself.
    """
    command = [sys.executable, "-m", "tests.tinker_service", "--port", "0", "--key", KEY, f"cache_path={cache}"]
    process = subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None
    try:
        said = next(filter(None, (re.match(r"serves small and (\S+) at (\S+)", line) for line in process.stdout)))
        yield [f"model_name={said[1]}", "prompt.option=compact", f"sampler.base_url={said[2]}"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run(folder: Path, cache: Path, settings: Sequence[str]) -> Run:
    environment = {"TINKER_API_KEY": KEY, "PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY))}
    return Run(folder, cache, *ENGINES, *settings, environment=environment)


def killed_on_the_way(folder: Path, cache: Path, settings: Sequence[str], at: Sequence[int]) -> Run:
    """A run whose learner, sampler and everything are killed after so many updates."""
    made = run(folder, cache, settings)
    for service_, updates in zip(("learner", "sampler"), at, strict=False):
        made.until(lambda updates=updates: made.updates() >= updates)
        print(f"kill -9 of the {service_} after {made.updates()} updates", flush=True)
        made.kill(service_)
    if len(at) > 2:
        made.until(lambda: made.updates() >= at[2])
        print(f"kill -9 of the whole run after {made.updates()} updates", flush=True)
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait()
        time.sleep(5.0)  # the nannies and their children notice
        made = run(folder, cache, settings)
    assert made.wait() == 0, made.tail()
    return made


def ask(made: Run, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"file:{made.path / 'rollouts.sqlite'}?mode=ro", uri=True)) as archive:
        return archive.execute(query).fetchall()


UPDATES = "select version, metrics from updates order by version"
TWICE = "select count(*) from (select task_id from outcomes group by task_id having count(*) > 1)"
STALENESS = """
select max(o.trained_on - r.policy_version), count(distinct r.policy_version), count(*)
from outcomes o join rollouts r using (task_id)"""
BATCHES = "select batch_id, count(*) from outcomes group by batch_id order by batch_id"
ENDS = "select outcome, count(*) from groups group by outcome"


def report(made: Run) -> None:
    """What the archive and the logs say, and what must hold."""
    print("version  loss     entropy  mismatch_kl (fresh)  staleness  reward")
    versions = []
    for version, metrics in ask(made, UPDATES):
        one = msgspec.json.decode(metrics) if metrics[:1] == b"{" else msgspec.msgpack.decode(metrics)
        versions.append(version)
        shown = [one.get(name, float("nan")) for name in ("loss", "entropy", "mismatch_kl", "mismatch_kl_fresh")]
        rest = f"{one.get('staleness_max', 0):.0f}          {one.get('reward_mean', 0):.3f}"
        print(f"{version:7}  {shown[0]:+.4f}  {shown[1]:.4f}  {shown[2]:.2e} ({shown[3]:.1e})  {rest}")
    served = [line for line in made.log("sampler") if line["event"] == "serving"]
    proofs = {line["policy_version"]: line["canary_error"] for line in served}
    print("attested (rms of canary log-probs):", {v: float(f"{e:.1e}") for v, e in sorted(proofs.items())})
    resumed = [line["policy_version"] for line in made.log("learner") if line["event"] == "resumed"]
    print("learner resumed at:", resumed)
    oldest, wrote, samples = ask(made, STALENESS)[0]
    ends, batches = dict(ask(made, ENDS)), ask(made, BATCHES)
    print(f"samples trained: {samples} by {wrote} versions, none older than {oldest}; groups: {ends}")
    print("batches:", ", ".join(f"{name} {count}" for name, count in batches))
    summary = made.summary()
    names = ("groups_admitted", "groups_trained", "groups_filtered", "groups_dropped_stale", "groups_failed")
    print("summary:", {name: summary[name] for name in names})
    assert_counters_add_up(summary)
    assert versions == list(range(versions[0], versions[0] + len(versions))), versions
    assert ask(made, TWICE) == [(0,)], "a rollout entered two batches"
    assert len(batches) == summary["updates"] == len(versions)
    assert summary["groups_trained"] == ends["trained"]
    assert max(proofs.values()) < 1e-2
    print("the counters add up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("settings", nargs="*")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="tinker-"))
    folder.mkdir(parents=True, exist_ok=True)
    cache = folder / "cache"
    from tests.running import TINY

    with service(cache, TINY) as reached:
        made = killed_on_the_way(folder, cache, [*reached, *DEFAULT, *asked.settings], at=(3, 6, 8))
    report(made)
    print(f"the run is in {made.path}")


if __name__ == "__main__":
    main()
