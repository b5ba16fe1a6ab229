"""What deploy/ sets and starts exists in the code: variables, settings, commands, services, images."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from kbrl_async import cli
from kbrl_async.runs.config import KEYS, load
from kbrl_async.runs.config.sources import RESERVED, from_env
from protocols.auth import Role
from services.runtime.addresses import BROKER_HOST, addresses
from tests.unit.deploy.reading import (
    BASE,
    DEPLOY,
    OVERLAYS,
    ROOT,
    containers,
    images,
    kbrl_commands,
    texts,
    workloads,
)

VARIABLE = re.compile(r"\bKBRL_[A-Z][A-Z0-9_]*\b")
PATTERNS = {"KBRL_KEY", "KBRL_SECTION__KEY"}
"""How the page writes any setting."""


def test_every_variable_is_one_that_the_code_reads() -> None:
    used = {name for text in texts().values() for name in VARIABLE.findall(text)} - PATTERNS
    settings = {setting.origin.removeprefix("variable "): setting.key for setting in from_env(dict.fromkeys(used, ""))}
    assert {name for name, key in settings.items() if key not in KEYS} == set()
    assert used >= RESERVED


def test_every_reserved_variable_is_read_somewhere() -> None:
    paths = [path for floor in ("services", "kbrl_async") for path in (ROOT / floor).rglob("*.py")]
    code = "".join(path.read_text() for path in paths if path.name != "sources.py" and "suite" not in path.parts)
    assert {name for name in RESERVED if f'"{name}"' not in code} == set()


def test_the_page_lists_all_variables_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)`", texts()["README.md"], re.MULTILINE)
    assert set(rows) - {"KBRL_KEY", "HONCHO_PROCESS_NAME"} == RESERVED


@pytest.mark.parametrize(("where", "words"), list(kbrl_commands()))
def test_every_command_is_one_that_kbrl_takes(where: str, words: list[str]) -> None:
    assert cli.parse(words).command


def test_there_are_commands_to_check_in_every_kind_of_file() -> None:
    found = {where for where, _ in kbrl_commands()}
    assert found >= {"broker", "compile", "bench", "sampler", "slurm/run.sbatch", "slurm/workers.sbatch",
                     "slurm/node.sbatch", "skypilot/run.yaml", "skypilot/worker.yaml", "kbrl-worker@.service",
                     "README.md"}  # fmt: skip


def test_every_setting_on_a_command_line_is_a_key() -> None:
    words = [word for _, command in kbrl_commands() for word in command if re.match(r"[a-z_.]+=", word)]
    names = {word.partition("=")[0] for word in words}
    assert len(names) > 3
    assert names - set(KEYS) == set()


def test_every_service_that_is_started_is_a_module() -> None:
    text = "\n".join(texts().values())
    started = set(re.findall(r"-m[ ,\"]+services\.([a-z_]+)", text))
    lists = re.findall(r"kbrl@\{([a-z_,]+)\}|for service in ([a-z_ ]+);", text)
    started |= {name for pair in lists for name in re.split(r"[ ,]", "".join(pair)) if name}
    assert started >= {"broker", "reward_aggregator", "learner", "sampler"}
    assert {name for name in started if importlib.util.find_spec(f"services.{name}") is None} == set()


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda folder: folder.name)
def test_the_settings_of_a_cluster_are_a_configuration(folder: Path) -> None:
    config = load([folder / "run.yaml"])
    assert config.broker.allow_remote
    base = yaml.safe_load((BASE / "run.yaml").read_text())
    given = yaml.safe_load((folder / "run.yaml").read_text())
    assert {key: given[key] for key in base} == base, "lines that the objects of the base rely on"


@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_every_image_is_a_target_of_the_containerfile(folder: Path) -> None:
    used = {container["image"] for workload in workloads() for container in containers(workload)}
    built = {image["name"]: image["newName"].rpartition("/")[2] for image in images(folder)}
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE))
    assert set(built) == used
    assert {name.removesuffix("-gpu") for name in built.values()} <= targets


def test_the_containerfile_copies_what_there_is_and_installs_extras_that_exist() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for word in line.split()]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for group in re.findall(r"EXTRAS=\[([a-z,-]+)\]", text) for name in group.split(",")}
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert named | set(re.findall(r"ENGINE=(\w+)", text)) <= set(extras)
    assert {"protocols", "kbrl_async", "services"} <= set(copied)


def test_the_roles_of_the_pages_keys_are_roles() -> None:
    named = set(re.findall(r"keys new ([a-z]+)", texts()["README.md"])) - {"all"}
    looped = {
        role for group in re.findall(r"for role in ([a-z ]+);", "\n".join(texts().values())) for role in group.split()
    }
    assert named | looped
    assert named | looped <= {str(role) for role in Role}


def test_a_service_beside_the_broker_finds_it_by_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load([BASE / "run.yaml"])
    assert addresses(tmp_path, config).work == "tcp://0.0.0.0:5756"
    monkeypatch.setenv(BROKER_HOST, "broker")
    found = addresses(tmp_path, config)
    assert (found.submit, found.work) == ("tcp://broker:5755", "tcp://broker:5756")
    assert found.status.startswith("ipc://")
