"""The environments run by their libraries' own commands against a model by script: wrong first, right once told so.

Each is skipped where its library is not installed; the package is taken from its folder, as `pip install` would.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.pages import ROOT
from tests.ports import free_port

PACKAGE = ROOT / "environments" / "kbrl_kernels"
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
FIRST, BEST = 0.15, 0.65
"""Rewards of the first answer and of the second one, untimed, by preset stage3."""


def script() -> Any:
    spec = importlib.util.spec_from_file_location("scripted_model", PACKAGE / "tests" / "scripted_model.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    """Where the scripted model answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), script().Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), str(PACKAGE), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, **more}


def needs(library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: pip install './environments/kbrl_kernels[…]'")


@pytest.mark.parametrize(("mode", "reward"), [("single", FIRST), ("refine", BEST), ("tools", BEST)])
def test_verifiers_own_command_evaluates_each_mode(model: str, tmp_path: Path, mode: str, reward: float) -> None:
    needs("verifiers.v1")
    if shutil.which("uv") is None:
        pytest.skip("verifiers' chat harness is started by uv, which is not installed")
    main = "import sys; from verifiers.v1.cli.eval.main import main; sys.exit(main())"
    task = ["--env.taskset.task.mode", mode, "--env.taskset.task.timing", "false", "--env.taskset.levels", "1"]
    where = ["-m", "scripted", "--client.base-url", model, "--client.api-key-var", "SCRIPTED_API_KEY"]
    run = ["-n", "1", "--no-push", "--no-rich", "-o", str(tmp_path), "--env.turns", "2"]
    command = [sys.executable, "-c", main, "kbrl-kernels", *task, *where, *run]
    done = subprocess.run(command, env=environment(SCRIPTED_API_KEY="x"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (traces,) = tmp_path.glob("*/traces.jsonl")
    assert f'"score":{reward}' in traces.read_text().replace(" ", "").replace("0.15000000000000002", "0.15")


@pytest.mark.parametrize(("mode", "reward"), [("single", FIRST), ("refine", BEST), ("tools", BEST)])
def test_inspects_own_command_evaluates_each_mode(model: str, tmp_path: Path, mode: str, reward: float) -> None:
    needs("inspect_ai")
    needs("openai")
    task = ["-T", f"mode={mode}", "-T", "level=1", "-T", "timing=false", "-T", "turns=2", "--limit", "1"]
    where = ["--model", "openai-api/scripted/model", "--log-dir", str(tmp_path), "--log-format", "json"]
    command = [sys.executable, "-m", "inspect_ai", "eval", "kbrl_kernels/inspect_task.py", *task]
    variables = environment(SCRIPTED_API_KEY="x", SCRIPTED_BASE_URL=model)
    done = subprocess.run(
        [*command, *where, "--display", "plain"],
        env=variables,
        cwd=PACKAGE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    (log,) = tmp_path.glob("*.json")
    scores = json.loads(log.read_text())["results"]["scores"]
    assert {s["name"]: s["metrics"]["mean"]["value"] for s in scores}["reward"] == pytest.approx(reward)


def test_an_openenv_server_serves_episodes_and_refuses_what_is_none() -> None:
    needs("openenv.core")
    from openenv.core.generic_client import GenericEnvClient

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "kbrl_kernels.openenv_server", "--port", str(port), "--no-timing", "--turns", "2"]
    server = subprocess.Popen(command, env=environment())
    try:
        _until_it_listens(url)
        with GenericEnvClient(base_url=url).sync() as env:
            assert "class Model" in env.reset(problem_id="L1/01_tanh").observation["text"]
            wrong, right = (env.step({"answer": answer}) for answer in script().ANSWERS)
            assert (wrong.reward, wrong.done) == (pytest.approx(FIRST), False)
            assert (right.reward, right.done) == (pytest.approx(BEST), True)
            with pytest.raises(RuntimeError, match="over"):
                env.step({"answer": "more"})
            with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                env.step({"answer": "x" * (2 << 20)})
        with GenericEnvClient(base_url=url).sync() as env, pytest.raises(RuntimeError, match="no problem"):
            env.reset(problem_id="L9/99")
    finally:
        server.terminate()
        server.wait(120)


def _until_it_listens(url: str) -> None:
    deadline = time.monotonic() + 180
    while True:
        try:
            httpx.get(f"{url}/health")
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline, "it never listened"
            time.sleep(0.2)
