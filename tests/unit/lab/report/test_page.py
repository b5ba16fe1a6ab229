"""The page as text: complete, self-contained, bounded, and safe with what candidates wrote."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest

from kbrl_async.lab.report import report_page
from kbrl_async.lab.report.model import RunData
from kbrl_async.lab.report.page import SECTIONS

VOID = {"meta", "input", "br", "hr", "img", "link"}


class Read(HTMLParser):
    """Elements by name, whether they are balanced, and the texts of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.scripts = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts += data


@pytest.fixture(scope="module")
def page(run: RunData) -> str:
    return report_page(run)


def test_every_section_is_there_and_linked(page: str) -> None:
    read = Read(page)
    assert not read.open
    for key in {key for key, _, _ in SECTIONS} - {"evaluation"}:
        assert key in read.ids
        assert ("href", f"#{key}") in read.attributes
    assert len(read.ids) == len(set(read.ids))


def test_the_page_asks_for_nothing(page: str) -> None:
    read = Read(page)
    assert not {"img", "link", "iframe", "object", "base"} & set(read.names)
    addresses = [value for name, value in read.attributes if name in ("src", "href", "action", "xlink:href")]
    assert all(value.startswith("#") for value in addresses)
    assert "url(" not in page
    assert "@import" not in page


def test_the_only_script_is_ours_and_its_policy_allows_no_other(page: str) -> None:
    import base64
    import hashlib

    read = Read(page)
    assert read.names.count("script") == 1
    digest = base64.b64encode(hashlib.sha256(read.scripts.encode()).digest()).decode()
    policy = next(value for name, value in read.attributes if "default-src" in value)
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_nothing_that_a_candidate_wrote_becomes_an_element_or_a_handler(page: str) -> None:
    read = Read(page)
    assert "broken out" in page  # it is shown
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert "broken out" not in read.scripts
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\u200b]", page)
    page.encode("utf-8")


def test_a_log_s_words_are_text(page: str) -> None:
    assert "slow &lt;b&gt;step" in page


def test_sixty_thousand_characters_of_source_are_cut_and_it_says_so(page: str) -> None:
    assert "x" * 1000 not in page
    assert "more lines and the ends of 2 long lines" in page or "more lines and the ends of 1 long lines" in page


def test_the_page_does_not_grow_with_the_number_of_rollouts(run: RunData, page: str) -> None:
    many = msgspec.structs.replace(run, turns=[turn for turn in run.turns for _ in range(20)], kernels=run.kernels)
    assert report_page(many).count("<") < 1.2 * page.count("<")


def test_a_run_of_nothing_still_has_a_page() -> None:
    read = Read(report_page(RunData(name="empty <run>", missing=["everything"])))
    assert not read.open
    assert "settings" in read.ids
    assert "kernels" not in read.ids


def test_a_run_of_single_turns_has_no_part_about_turns(run: RunData) -> None:
    single = msgspec.structs.replace(run, turns=[turn for turn in run.turns if turn.stats.turn == 0])
    assert 'id="turns"' not in report_page(single)


def test_an_interval_that_says_nothing_does_not_stretch_the_axis(run: RunData) -> None:
    wild = msgspec.structs.replace(run.kernels[0], problem_id="L1/wild", speedup=1.0, lo=1e-24, hi=1e23)
    others = [kernel for kernel in run.kernels[1:] if kernel.speedup < 8]
    shown = report_page(msgspec.structs.replace(run, kernels=[*others, wild]))
    axis = shown[shown.index("speedup intervals") : shown.index("Kernels by problem")]
    assert ">1×<" in axis
    assert ">1000×<" not in axis


def test_where_every_measurement_was_disturbed_it_says_so(run: RunData) -> None:
    stats = msgspec.structs.replace(run.turns[0].stats, correct=True, speedup=2.0, disturbed=True)
    turns = [msgspec.structs.replace(run.turns[0], stats=stats)]
    shown = report_page(msgspec.structs.replace(run, kernels=[], turns=turns))
    assert "No correct kernel has a time that can be compared. Measurements that were disturbed" in shown
    assert "no kernel&#39;s whole interval lies above 1×" in shown


def test_kinds_of_held_out_problems_are_shown_apart_where_there_are_both(run: RunData) -> None:
    names = sorted({turn.stats.problem_id for turn in run.turns if turn.phase == "eval-after"})
    for first, shown in (("instance", True), ("family", False)):
        kinds = {name: first if name == names[0] else "family" for name in names}
        told = msgspec.structs.replace(run, summary={**run.summary, "heldout_kinds": kinds})
        assert ("correct, of families that are not" in report_page(told)) is shown


def test_evaluations_during_training_are_a_chart_of_their_own(run: RunData) -> None:
    rounds = [msgspec.structs.replace(turn, phase="eval-v2") for turn in run.turns if turn.phase == "eval-after"]
    shown = report_page(msgspec.structs.replace(run, turns=[*run.turns, *rounds]))
    assert "held-out rates by policy version" in shown
    assert "held-out rates by policy version" not in report_page(run)
