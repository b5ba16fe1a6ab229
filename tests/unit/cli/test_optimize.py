"""`kbrl optimize` from the command line: a fake endpoint writes, the real funnel verifies, a file comes of it or not.

Nothing here depends on how fast the machine is: kernels are written with --allow-slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kbrl_async.cli import main
from kbrl_async.lab.optimize.session import interruptible
from tests.unit.sampling.fake_endpoint import FakeEndpoint, Reply, chat, fake_endpoint

LAYERS = '''\
import torch


def double_relu(x: torch.Tensor) -> torch.Tensor:
    """Twice what is left of x."""
    return torch.relu(x) * 2.0
'''
KERNEL = '''\
Here it is:
```python
import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel
SOURCE = r"""
void run(const float *x, float *out, long n) {
    for (long i = 0; i < n; i++) out[i] = x[i] > 0.0f ? 2.0f * x[i] : 0.0f;
}
"""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "run")
    def forward(self, x):
        out = torch.empty_like(x)
        self.kernel(x, out, x.numel())
        return out
```
'''
WRONG = KERNEL.replace("2.0f", "3.0f")
GIVEN = ["layers:double_relu", "--inputs", "torch.randn(64, 64)", "--seconds", "240"]


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    """A fake endpoint in a thread of its own: the command has the main thread's loop."""
    ready, holder = threading.Event(), list[tuple[FakeEndpoint, asyncio.AbstractEventLoop, asyncio.Event]]()

    async def serve() -> None:
        async with fake_endpoint() as fake:
            over = asyncio.Event()
            holder.append((fake, asyncio.get_running_loop(), over))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    fake, loop, over = holder[0]
    yield fake
    loop.call_soon_threadsafe(over.set)
    thread.join(60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "tri.py").write_text("import triton\n")
    return tmp_path


def optimize(endpoint: FakeEndpoint, *words: str) -> int:
    return main(["optimize", *GIVEN, "--policy", endpoint.base_url, *words, "model_name=m", "sampler.slots=2"])


def test_a_proven_kernel_becomes_a_module_that_replaces_the_function(
    endpoint: FakeEndpoint, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.replies = [chat("no idea"), chat(WRONG), chat(KERNEL)]
    code = optimize(endpoint, "--attempts", "4", "--turns", "2", "--allow-slower")
    assert code == 0
    made = folder / "optimized_layers_double_relu.py"
    spec = importlib.util.spec_from_file_location("made", made)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.randn(7, 5)
    assert torch.equal(module.double_relu(x), torch.relu(x) * 2.0)
    said = " ".join(capsys.readouterr().out.split())
    assert "Proven" in said
    author = f"m at {endpoint.base_url}"
    assert f"written by {author}" in said
    assert f"\nWritten by {author}: every line of code but those of the last part" in made.read_text()
    evidence = json.loads((folder / "optimized_layers_double_relu.evidence.json").read_text())
    assert evidence["proof"]["verdict"]["passed"] == evidence["proof"]["verdict"]["total"] > 0
    assert evidence["written"]["author"] == author
    assert evidence["search"]["by_category"].keys() >= {"format", "mismatch"}
    assert sorted(p.name for p in folder.glob("*optimized*")) == [
        "optimized_layers_double_relu.evidence.json",
        "optimized_layers_double_relu.evidence.md",
        "optimized_layers_double_relu.py",
    ]


MINE = '"""Mine."""\nfrom __future__ import annotations\nimport os\n' + KERNEL.split("```python\n")[1].split("```")[0]
"""Right, and its `import os` is none that `strict` takes."""


def test_a_kernel_to_begin_with_is_judged_under_open_shown_and_written_where_nothing_beats_it(
    endpoint: FakeEndpoint, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").write_text(MINE)
    endpoint.replies = [chat(WRONG)]
    assert optimize(endpoint, "--from", "mine.py", "--attempts", "3", "--turns", "2", "--allow-slower") == 0
    shown = [str(one.body) for one in endpoint.seen if "import os" in str(one.body)]
    assert "Speedup: " in shown[0]
    assert (
        "Written by the author of mine.py, and taken as it was found there"
        in (folder / "optimized_layers_double_relu.py").read_text()
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "Nothing faster was found than the kernel to begin with" in said
    assert "began with what the author of mine.py wrote: correct" in said


def test_under_strict_and_where_it_is_wrong_the_kernel_to_begin_with_is_named_with_its_reason(
    endpoint: FakeEndpoint, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").write_text(MINE)
    endpoint.replies = [chat(KERNEL)]
    words = ("--from", "mine.py", "--rules", "strict", "--attempts", "2", "--turns", "2", "--allow-slower")
    assert optimize(endpoint, *words) == 0
    assert "Failed as: static violation" in str(endpoint.seen[0].body)
    said = " ".join(capsys.readouterr().out.split())
    assert "began with what the author of mine.py wrote: static violation: import: line 3:" in said
    assert "beginning with what was written by the author of mine.py" in said


def test_nothing_proven_is_exit_code_1_and_no_kernel(endpoint: FakeEndpoint, folder: Path) -> None:
    endpoint.replies = [chat(WRONG)]
    assert optimize(endpoint, "--attempts", "2", "--allow-slower") == 1
    assert not (folder / "optimized_layers_double_relu.py").exists()
    failed = (folder / "optimized_layers_double_relu.failed.md").read_text()
    assert "No kernel was proven right" in failed
    assert "incorrect" in failed


def test_the_first_ctrl_c_ends_the_search_and_the_second_is_python_s_own() -> None:
    stopped: list[str] = []

    async def main_() -> None:
        with interruptible(asyncio.get_running_loop(), lambda: stopped.append("interrupted")):
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(60):
                while not stopped:
                    await asyncio.sleep(0.001)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(main_())
    assert stopped == ["interrupted"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.py"], "there is no file nothing.py"),
        (["layers:double_relu"], "Give example inputs"),
        ([*GIVEN, "--output", "no-module.py"], "can't be imported"),
        ([*GIVEN, "--output", "no/where.py"], "there is no folder"),
        ([*GIVEN, "--seconds", "0"], "must be above 0"),
        ([*GIVEN, "--from", "nowhere.py"], "nowhere.py can't be read"),
        ([*GIVEN, "--from", "empty.py"], "--from empty.py holds no kernel: the candidate is empty"),
        ([*GIVEN, "--from", "tri.py"], "is written in triton, and kernels are asked for in c. Add backend=triton"),
        ([*GIVEN, "--policy", "no-such-run"], "there is no policy no-such-run"),
        ([*GIVEN, "--policy", "http://127.0.0.1:1/v1", "model_name=m"], "nothing answers at http://127.0.0.1:1/v1"),
    ],
)
def test_what_was_asked_for_wrongly_is_exit_code_2(
    words: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_refused_key_is_said_and_ends_it(
    endpoint: FakeEndpoint, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.models = Reply(401, {"error": {"message": "bad key"}})
    assert optimize(endpoint) == 2
    assert "refuses the key" in capsys.readouterr().err
