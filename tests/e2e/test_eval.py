"""`kbrl eval` end to end: an endpoint answers, every process of training but the learning ones, kernels verified."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kbrl_async.runs.archive.archive import ArchiveReader
from protocols.records import Timing
from tests.candidates import affine, elementwise
from tests.running import PATIENCE_S, REPOSITORY, Run

pytestmark = pytest.mark.timeout(900)

ANSWER = f"```python\n{elementwise('2 * x[i] + 1')}```"
"""Right for the problem with factor 2, wrong for the other one."""
SAMPLES = 4


class Endpoint(BaseHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012 - one list for all requests is the point
    numbers = itertools.count(1)
    may_end = threading.Event()
    """The last answer waits for it: so long the evaluation is in its middle, however slow who looks at it is."""

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Endpoint.asked.append(body["messages"][-1]["content"])
        if next(Endpoint.numbers) == SAMPLES:
            Endpoint.may_end.wait(PATIENCE_S)
        message = {"role": "assistant", "content": ANSWER}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._send({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 20}})

    def _send(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    Endpoint.asked, Endpoint.numbers = [], itertools.count(1)
    Endpoint.may_end.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    Endpoint.may_end.set()
    server.shutdown()
    server.server_close()


class Evaluation(Run):
    """`kbrl eval` in place of `kbrl train`."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.path, self.output = folder / "runs" / "evals" / "tried", folder / "output.txt"
        self._words, self._folder = words, folder
        self.start()

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KBRL_", "HONCHO_"))}
        command = [sys.executable, "-m", "kbrl_async", "eval", *self._words]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env=environment | {"PYTHONPATH": str(REPOSITORY)},
                start_new_session=True,
            )

    def document(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "evaluation.json").read_text())
        return loaded


def timings(path: Path) -> list[Timing]:
    with ArchiveReader(path) as archive:
        records = [archive.record(row.task_id) for row in archive.rows()]
    return [record.timing for record in records if record is not None and record.timing is not None]


def test_an_endpoint_is_evaluated_though_the_evaluator_dies_in_the_middle(tmp_path: Path, address: str) -> None:
    level = tmp_path / "problems" / "level1"
    level.mkdir(parents=True)
    for number, factor in ((1, 2), (2, 3)):
        (level / f"{number}_scale.py").write_text(affine(factor))
    words = ["--model", "m", "--samples", "2", "--problems", "problems", "--level", "1", "name=tried", "log_path=runs"]
    evaluation = Evaluation(tmp_path, address, *words, "log_level=debug")
    try:
        evaluation.until(lambda: any(line["event"] == "scored" for line in evaluation.log("evaluator")))
        evaluation.kill("evaluator")
        Endpoint.may_end.set()
        assert evaluation.wait() == 0, evaluation.tail()
    finally:
        evaluation.close()
    document = evaluation.document()
    found = {(s["problem_id"], s["sample"]): s["fault"] for s in document["samples"]}
    assert found == {
        ("L1/1_scale", 0): "ok",
        ("L1/1_scale", 1): "ok",
        ("L1/2_scale", 0): "incorrect",
        ("L1/2_scale", 1): "incorrect",
    }
    assert document["lost"] == {}
    assert document["overall"]["raw"]["pass_at_k"]["2"]["value"] == 0.5
    assert len(Endpoint.asked) == SAMPLES, "what the broker has is not asked for again"
    results = json.loads((evaluation.path / "kernelbench" / "level1" / "eval_results.json").read_text())
    assert [entry["correctness"] for entry in results["1"] + results["2"]] == [True, True, False, False]
    assert list((evaluation.path / "tensorboard" / "eval").glob("events.out.*"))
    assert "2 × 2" in evaluation.output.read_text()
    rooflines = [timing.roofline for timing in timings(evaluation.path / "rollouts.sqlite")]
    assert len(rooflines) == 2
    assert None not in rooflines, "the bench knows no peaks of its host"
