"""Pinned versions cover all that is installed, the licence list is about them, archives do not tell who built them."""

from __future__ import annotations

import importlib.util
import io
import re
import stat
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.deploy.reading import DEPLOY


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("supply", DEPLOY / "supply.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


supply = _load()


def test_every_direct_requirement_is_pinned_to_a_version_that_it_allows() -> None:
    pins = supply.pins()
    required = [Requirement(text) for extra in ("", *supply.PINNED_EXTRAS) for text in supply.project()[extra]]
    assert {r.name for r in required if canonicalize_name(r.name) not in pins} == set(), (
        "run: make constraints licences"
    )
    wrong = [str(r) for r in required if not r.specifier.contains(pins[canonicalize_name(r.name)], prereleases=True)]
    assert wrong == []


def test_everything_that_is_installed_for_them_is_pinned_too() -> None:
    try:
        found = supply.closure()
    except SystemExit as missing:
        pytest.skip(f"not all of it is installed here: {missing}")
    if any(name.startswith(("nvidia-cublas", "cuda-")) for name in found):
        pytest.skip("this torch brings the libraries of a GPU, which the constraints of processors leave to it")
    assert set(found) - set(supply.pins()) == set(), "run: make constraints licences"


def test_a_pin_names_one_version_and_no_build() -> None:
    pins = supply.pins()
    assert len(pins) > 50
    assert [version for version in pins.values() if not re.fullmatch(r"[0-9][0-9a-z.]*", version)] == []


def test_the_licence_list_is_about_the_pinned_versions_and_states_all() -> None:
    rows = re.findall(r"^\| ([a-z0-9-]+) \| (\S+) \| (.+) \|$", supply.LICENCES.read_text(), re.MULTILINE)
    assert {name: version for name, version, _ in rows if name != "package"} == supply.pins(), (
        "run: make constraints licences"
    )
    assert [name for name, _, licence in rows if licence == "not stated"] == []


def archive(names: list[str], mtime: int, user: str, mode: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname, member.mode = len(name), mtime, user, mode
            tar.addfile(member, io.BytesIO(name.encode()))
    return made.getvalue()


def test_archives_of_two_builders_become_the_same_bytes() -> None:
    mine = supply.normalised(archive(["a", "b"], 1, "me", 0o644), 1_700_000_000)
    yours = supply.normalised(archive(["b", "a"], 2, "you", 0o664), 1_700_000_000)
    assert mine == yours
    with tarfile.open(fileobj=io.BytesIO(mine)) as tar:
        content = {m.name: (tar.extractfile(m) or io.BytesIO()).read() for m in tar.getmembers()}
    assert content == {"a": b"a", "b": b"b"}


def tool(folder: Path, answer: str) -> str:
    path = folder / "pip-audit"
    path.write_text(f"#!{sys.executable}\n{answer}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (
            "import sys; sys.exit('ConnectionError: no route')",
            supply.NOT_AUDITED,
            "NOT AUDITED: no advisory service could be asked (pypi: ConnectionError: no route; osv: Conn",
        ),
        (
            """print('{"dependencies": [{"name": "a", "skip_reason": "not found"}]}')""",
            supply.NOT_AUDITED,
            "(pypi: knows none of these packages",
        ),
        (
            """import sys; assert "osv" in sys.argv, "down"\nprint('{"dependencies": [{"name": "a", "vulns": []}]}')""",
            0,
            "1 packages audited, 0 known",
        ),
        (
            """print('{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}')""",
            0,
            "1 packages audited, 0 known",
        ),
        (
            'import json; hole = {"id": "X-1", "fix_versions": ["2"]}\n'
            'print(json.dumps({"dependencies": [{"name": "a", "version": "1", "vulns": [hole]}]}))',
            1,
            "a 1: X-1, fixed in 2",
        ),
    ],
)
def test_an_audit_says_what_it_knows(
    answer: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supply.audit(tool(tmp_path, answer)) == code
    assert said in capsys.readouterr().out


def test_only_a_flag_makes_an_audit_that_could_not_be_made_a_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unreachable = tool(tmp_path, "import sys; sys.exit('no route')")
    assert supply.main(["audit", unreachable]) == supply.NOT_AUDITED
    assert supply.main(["audit", unreachable, "--unreachable-ok"]) == 0
    assert capsys.readouterr().out.count("NOT AUDITED") == 2
    assert supply.main(["audit", unreachable, "--anything"]) == 2
