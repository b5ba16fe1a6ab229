"""What the pages name exists: links, anchors, settings, files, tests. Commands: tests/e2e/test_docs.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import msgspec
import pytest
import yaml

from kbrl_async.runs.config import KEYS
from kbrl_async.runs.config.keys import SECTIONS
from kbrl_async.runs.config.names import ALIASES
from tests.pages import ROOT, Page, pages

PAGES = pages()
MADE = ("docs/reference/", "docs/licences.md")
"""Generated: held to their source by tests of their own."""
WRITTEN = [page for page in PAGES if not page.name.startswith(MADE)]

COMMAND = re.compile(r"^\s*(\$ )?(kbrl|make|python3?|pip|honcho|export|tensorboard|kubectl) [\w./-]")
PICTURE = re.compile("[◀▶─│┃]")

SETTING = re.compile(r"(?<![\w.-])([a-z_]+(?:\.[a-z_0-9]+)?)=(\S+)")
PLACEHOLDER = re.compile(r"…|\||[A-Z]{2,}|^$")
SUFFIXES = ("py", "json", "md")
FILE = re.compile(
    r"\.?[\w-]+(?:/[\w.@-]+)*\.(?:py|md|ya?ml|toml|json|sh|css|js|h|sbatch|bats|sqlite|html|jsonl)|(?:[\w.-]+/)+"
)
OF_A_RUN = re.compile(
    r"(runs|RUN|DIR|NAME|~|keys|hub|evals|kernelbench|level\d)/.*"
    r"|(summary|evaluation|pass_at_k_results|eval_results|kbrl_results|baseline|audit|peaks|bench-resolution|index"
    r"|manifest|adapter_config|config|broker|keys)\.(json|toml)"
    r"|(rollouts|aggregator|broker|jobs)\.sqlite|config\.yaml|system\.jsonl|metrics/.*|kernels/|logs/.*|tensorboard/"
    r"|batches/|policies/|checkpoints/|report\.html|run\.html|compared\.html|optimized_NAME.*"
    r"|\.(?:env|venv|building|cache)/?.*"
)
"""What commands write, or readers have: no file of the repository."""
OTHERS = re.compile(
    r"(scripts/)?benchmark_eval_analysis\.py|(optimized_)?my_module\.py|softmax\.py|model\.yaml|[\w.-]+/v1/?|.*(NAME|NN|_L_|-N\.|_P_).*|level1/"
)
"""Another project's, a reader's own, and patterns."""
NEAR = ("", "kbrl_async", "protocols", "services", "tests", "tests/unit", "deploy", "deploy/kubernetes", "docs")


def ids(page: Page) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_leads_somewhere(page: Page) -> None:
    for line, target in page.links:
        path, _, anchor = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        there = (page.path.parent / path).resolve() if path else page.path
        assert there.exists(), f"{page.name}:{line} links to {path}, which is not there"
        if anchor:
            anchors = Page(there).anchors
            assert anchor in anchors, f"{page.name}:{line} links to #{anchor}; there are {sorted(anchors)}"


def test_the_index_names_every_page() -> None:
    (index,) = (page for page in PAGES if page.name == "docs/README.md")
    linked = {(index.path.parent / target.partition("#")[0]).resolve() for _, target in index.links}
    missing = {page.name for page in PAGES if page.path not in linked} - {"README.md", "docs/README.md"}
    assert missing == set()


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_every_setting_in_backticks_exists_and_takes_its_value(page: Page) -> None:
    for line, text in page.code:
        for name, value in [*SETTING.findall(text), *bare(text)]:
            key = ALIASES.get(name, name)
            section = key.partition(".")[0]
            if "." not in key and key not in KEYS:
                continue  # a variable of something else
            if "." in key and section not in SECTIONS:
                continue
            assert key in KEYS, f"{page.name}:{line} names the setting {name}, which does not exist"
            assert takes(key, value), (
                f"{page.name}:{line}: {name} does not take {value}; it expects {KEYS[key].expects}"
            )


def bare(text: str) -> Iterator[tuple[str, str]]:
    """`section.key` alone."""
    whole = re.fullmatch(r"([a-z_]+)\.([a-z_]+)", text)
    if whole and whole[1] in SECTIONS and whole[2] not in SUFFIXES:
        yield text, ""


def takes(key: str, text: str) -> bool:
    if PLACEHOLDER.search(text):
        return True
    value = yaml.safe_load(text)
    for candidate in (value, text, [value], text.split(",")):
        try:
            made = msgspec.convert(candidate, KEYS[key].type, strict=False)
        except msgspec.ValidationError:
            continue
        door = KEYS[key].door
        if door is None or all(door.knows(name) for name in (made if isinstance(made, list) else [made])):
            return True
    return False


def test_a_setting_of_no_such_name_or_value_is_found() -> None:
    assert takes("batch_size", "4")
    assert not takes("batch_size", "many")
    assert takes("corrections", "opsm,veto")
    assert not takes("corrections", "opsm,nothing")
    assert list(bare("learner.nothing"))
    assert SETTING.findall("mode=agents learner.epochs=1") == [("mode", "agents"), ("learner.epochs", "1")]


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_every_file_in_backticks_exists(page: Page) -> None:
    for line, text in page.code:
        name = text.partition("::")[0]
        if FILE.fullmatch(name) and not OF_A_RUN.fullmatch(name) and not OTHERS.fullmatch(name):
            assert is_there(page, name), f"{page.name}:{line} names {name}, which is nowhere"


def is_there(page: Page, name: str) -> bool:
    places = [page.path.parent, *(ROOT / near for near in NEAR)]
    return any((place / name).exists() for place in places) or ("/" not in name and name in file_names())


@cache
def file_names() -> frozenset[str]:
    floors = ("kbrl_async", "protocols", "services", "tests", "benchmarks", "deploy", "configs", "docs", "examples")
    return frozenset(path.name for floor in floors for path in (ROOT / floor).rglob("*.*"))


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_every_test_that_a_page_points_at_exists(page: Page) -> None:
    for line, text in page.code:
        if re.fullmatch(r"test_\w+…?", text):
            assert any(name.startswith(text.rstrip("…")) for name in test_names()), f"{page.name}:{line}: no {text}"


@cache
def test_names() -> frozenset[str]:
    found = (re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE) for path in (ROOT / "tests").rglob("*.py"))
    return frozenset(name for names in found for name in names)


test_names.__test__ = False  # type: ignore[attr-defined] # it only sounds like one


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_no_command_hides_from_the_tests_in_a_block_without_a_language(page: Page) -> None:
    for block in page.blocks:
        if block.language or any(PICTURE.search(line) for line in block.lines):
            continue
        hidden = [line for line in block.lines if COMMAND.match(line)]
        assert not hidden, f"{page.name}:{block.line}: write ```sh above {hidden[0].strip()!r}"


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


def test_no_page_is_an_orphan_of_the_reference() -> None:
    text = (
        "# A\n\n```sh\nkbrl x \\\n   y   # why\n\nfor a in b; do\n  echo $a\ndone\n```\nSee [b](c.md#d) and `e.py`.\n"
    )
    path = ROOT / "docs" / "README.md"
    page = Page(path, text)
    assert [(c.line, c.text) for c in page.commands] == [(4, "kbrl x y"), (7, "for a in b; do ; echo $a ; done")]
    assert page.links == [(11, "c.md#d")]
    assert page.code == [(11, "e.py")]
    assert page.anchors == {"a"}
