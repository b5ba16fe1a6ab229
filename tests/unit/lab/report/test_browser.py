"""The report as people see it: in a real browser, on a desktop and on a phone, in both colour schemes.

One browser looks at everything once; the tests read what it saw.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from PIL import Image

from kbrl_async.lab.report import compare_page, comparing, report_page
from kbrl_async.lab.report.model import RunData
from tests import browser

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no chromium here; apt-get install chromium")

PROBE = """(() => {
  const seen = node => { const b = node.getBoundingClientRect(); return b.width > 0 && b.height > 0; };
  const name = node => (node.textContent || "").trim().slice(0, 60);
  const wide = document.documentElement.scrollWidth - visualViewport.width;  // a phone widens innerWidth
  const cut = [...document.querySelectorAll("h1,h2,h3,.tile b,.tile small,figcaption,.row .value,.intro,label")]
    .filter(seen).filter(n => n.scrollWidth > n.clientWidth + 1 && getComputedStyle(n).display !== "inline").map(name);
  const over = [];
  for (const svg of document.querySelectorAll("svg.chart")) {
    const labels = [...svg.querySelectorAll("text")].map(n => [n, n.getBoundingClientRect()]);
    const frame = svg.getBoundingClientRect();
    for (const [n, b] of labels) {
      if (b.right > frame.right + 2 || b.left < frame.left - 2) over.push("outside: " + name(n));
      for (const [m, c] of labels)
        if (n !== m && b.left < c.right - 1 && c.left < b.right - 1 && b.top + 4 < c.bottom && c.top + 4 < b.bottom)
          over.push(name(n) + " | " + name(m));
    }
  }
  for (const axis of document.querySelectorAll(".axis .ticks")) {
    const ticks = [...axis.children].filter(seen).map(n => [n, n.getBoundingClientRect()]);
    ticks.forEach(([n, b], i) => { if (i && b.left < ticks[i - 1][1].right) over.push("axis: " + name(n)); });
  }
  const small = [...document.querySelectorAll("svg.chart text")].filter(seen)
    .filter(n => n.getBoundingClientRect().height < 9).length;
  const plots = [...document.querySelectorAll("svg.chart")].filter(seen).slice(0, 3)
    .map(n => { const b = n.getBoundingClientRect(); return [b.left, b.top + scrollY, b.width, b.height]; });
  return JSON.stringify({wide, cut, over, small, plots, title: document.title,
    ids: [...document.querySelectorAll("section")].map(n => n.id), tip: !!document.getElementById("tip")});
})()"""


class Probe(msgspec.Struct, frozen=True):
    wide: float
    """Pixels beyond the window."""
    cut: list[str]
    """Words that do not fit into their element."""
    over: list[str]
    """Labels on labels, or outside their chart."""
    small: int
    plots: list[tuple[float, float, float, float]]
    title: str
    ids: list[str]
    tip: bool


class Look(msgspec.Struct, frozen=True):
    probe: Probe
    complaints: list[str]
    picture: Path
    load_s: float


VIEWS = {
    "desktop": {"width": 1280},
    "phone, dark": {"width": 390, "dark": True},
    "small phone": {"width": 340},
    "no scripts": {"width": 1280, "scripts": False},
}


@pytest.fixture(scope="module")
def looks(run: RunData, run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Look]:
    folder = tmp_path_factory.mktemp("looks")
    report, compared, sorted_page = folder / "report.html", folder / "compared.html", folder / "sorted.html"
    report.write_text(report_page(run), encoding="utf-8")
    runs = {"one": run_folder, "two": run_folder}
    compared.write_text(compare_page(runs, comparing.read(runs)), encoding="utf-8")
    found: dict[str, Look] = {}
    with browser.Browser(folder) as opened:
        if not opened.answers():
            pytest.skip("the browser of this host does not start")
        for name, options in VIEWS.items():
            found[name] = look(opened.open(report, **options), folder / f"{name}.png")  # type: ignore[arg-type]
        found["comparison"] = look(opened.open(compared), folder / "comparison.png")
        page = opened.open(report)
        page.evaluate("document.querySelectorAll('#kernels th')[1].click()")
        page.evaluate("document.querySelectorAll('#kernels th')[1].click()")
        sorted_page.write_text(page.evaluate(SECOND_COLUMN))
        page.evaluate(POINT)
        (folder / "tip.txt").write_text(page.evaluate("document.getElementById('tip').textContent"))
    return found


SECOND_COLUMN = "[...document.querySelectorAll('#kernels td:nth-child(2)')].map(n => n.dataset.v).join()"
POINT = """(() => { const n = document.querySelector("svg.chart"); n.scrollIntoView();
  const b = n.getBoundingClientRect();
  const at = {bubbles: true, clientX: b.left + b.width / 2, clientY: b.top + 9};
  n.dispatchEvent(new PointerEvent("pointermove", at)); })()"""


def look(page: browser.Page, picture: Path) -> Look:
    probe = msgspec.json.decode(page.evaluate(PROBE), type=Probe)
    return Look(probe, page.complaints(), page.screenshot(picture, 2800), page.load_s)


each_view = pytest.mark.parametrize("view", [*VIEWS, "comparison"])


@each_view
def test_the_console_has_nothing_to_complain_about_and_nothing_is_fetched(view: str, looks: dict[str, Look]) -> None:
    assert looks[view].complaints == []


@each_view
def test_the_page_is_no_wider_than_the_window(view: str, looks: dict[str, Look]) -> None:
    assert looks[view].probe.wide <= 0


@each_view
def test_words_fit_and_labels_do_not_touch(view: str, looks: dict[str, Look]) -> None:
    assert looks[view].probe.cut == []
    assert looks[view].probe.over == []
    assert looks[view].probe.small == 0


@each_view
def test_plots_are_not_blank(view: str, looks: dict[str, Look]) -> None:
    picture = Image.open(looks[view].picture).convert("RGB")
    assert looks[view].probe.plots
    for left, top, width, height in looks[view].probe.plots:
        # the part between the axes' labels, where only lines are stronger than the grid
        part = picture.crop((int(left + 0.16 * width), int(top), int(left + 0.7 * width), int(top + 0.8 * height)))
        paper = part.getpixel((0, 0))
        brightness = part.convert("L").histogram()
        strong = sum(count for value, count in enumerate(brightness) if abs(value - sum(paper) / 3) > 60)
        assert strong > 60, "no line is drawn"


def test_a_dark_scheme_is_dark_and_a_light_one_light(looks: dict[str, Look]) -> None:
    corner = {name: sum(Image.open(looks[name].picture).convert("RGB").getpixel((4, 300))) for name in looks}  # type: ignore[arg-type]
    assert corner["desktop"] > 700
    assert corner["phone, dark"] < 120


def test_hostile_source_did_not_run(looks: dict[str, Look]) -> None:
    assert {found.probe.title for name, found in looks.items() if name != "comparison"} == {"made-up · run report"}


def test_everything_is_there_without_scripts_too(looks: dict[str, Look]) -> None:
    assert looks["no scripts"].probe.ids == looks["desktop"].probe.ids
    assert not looks["no scripts"].probe.tip
    assert looks["desktop"].probe.tip


def test_a_click_on_a_column_sorts_and_a_second_one_turns_it_round(looks: dict[str, Look]) -> None:
    values = [float(v) for v in (looks["desktop"].picture.parent / "sorted.html").read_text().split(",")]
    assert len(values) > 3
    assert values == sorted(values)


def test_a_pointer_over_a_chart_is_told_the_values(looks: dict[str, Look]) -> None:
    assert "mean" in (looks["desktop"].picture.parent / "tip.txt").read_text()
