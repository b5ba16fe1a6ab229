"""The files of deploy/, read once: their text, the objects in them, the commands that they start."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
OVERLAYS = sorted((DEPLOY / "kubernetes" / "overlays").iterdir())
OTHERS = ("grafana", "lnav", "prometheus", "__pycache__")
"""Folders of deploy/ that are about watching, not placing, and Python's own."""

Object = dict[str, Any]


@cache
def texts() -> dict[str, str]:
    """Every file by its path in deploy/."""
    paths = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file()]
    names = {path.relative_to(DEPLOY).as_posix(): path for path in paths}
    return {name: path.read_text() for name, path in names.items() if name.split("/")[0] not in OTHERS}


@cache
def objects() -> tuple[Object, ...]:
    """All Kubernetes objects of the base."""
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    return tuple(
        found for name in kustomization["resources"] for found in yaml.safe_load_all((BASE / name).read_text()) if found
    )


def workloads() -> list[Object]:
    return [found for found in objects() if found["kind"] in ("StatefulSet", "Deployment")]


def pod(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def containers(workload: Object) -> list[Object]:
    return [*pod(workload).get("initContainers", []), *pod(workload)["containers"]]


def kustomized(folder: Path) -> Object:
    found: Object = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return found


def images(folder: Path) -> list[Object]:
    """What stands for the images of an overlay, or of the one that it goes out from."""
    found = kustomized(folder)
    named: list[Object] = found.get("images") or images(folder / found["resources"][0])
    return named


def kbrl_commands() -> Iterator[tuple[str, list[str]]]:
    """Every `kbrl …` of these files with where it stands, as words after `kbrl`."""
    for workload in workloads():
        for container in containers(workload):
            words = container["command"]
            if "kbrl" in words:
                yield workload["metadata"]["name"], words[words.index("kbrl") + 1 :]
    for name, text in texts().items():
        if not name.startswith("kubernetes/"):
            for words in _in_text(text, is_page=name.endswith(".md")):
                yield name, words


_START = re.compile(r"(?:^|[\s/`])(?:(?<!-n )kbrl|-m kbrl_async) (?=(?:[a-z]+)\b)")


def _in_text(text: str, *, is_page: bool) -> Iterator[list[str]]:
    joined = re.sub(r"\\\n\s*", "", text)
    lines = _code(joined) if is_page else [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
    for line in lines:
        if found := _START.search(line):
            plain = re.split(r"\s+#|\s*(?:\|\||&&|;)\s", line[found.end() :])[0]
            words = shlex.split(plain.replace('"$@"', "").replace("$SETTINGS", ""))
            numbered = [word.replace("$number", "1") for word in words]
            yield [re.sub(r"\$\{?\w+\}?|%i", "bench", word) for word in numbered]


def _code(page: str) -> list[str]:
    return [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
