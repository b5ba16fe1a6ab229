"""What was run, where, and what it complained about."""

from __future__ import annotations

from collections.abc import Mapping

from kbrl_async.lab.report import numbers
from kbrl_async.lab.report.layout import data_table, section
from kbrl_async.lab.report.markup import Content, Markup, element, source
from kbrl_async.lab.report.model import LogLine, RunData

MOST_WORDS = 600


def make(run: RunData) -> Markup:
    facts = {"run": run.name, **_identity(run.summary), **run.facts}
    if isinstance(reasons := run.summary.get("failed_reasons"), Mapping) and reasons:
        facts["groups failed"] = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    if run.updates:
        facts["last policy version"] = str(run.updates[-1].version)
    intro = "Everything needed to run it again, and the warnings and errors of its processes."
    return section("settings", "Configuration and versions", intro, _table(facts), _config(run), _log(run))


def _identity(summary: Mapping[str, object]) -> dict[str, str]:
    wanted = {"seed": "seed", "config_hash": "experiment", "total_s": "wall clock"}
    found = {words: summary[key] for key, words in wanted.items() if summary.get(key) is not None}
    versions = summary.get("versions")
    shown = {k: numbers.seconds(v) if isinstance(v, float) else str(v) for k, v in found.items()}
    return shown | ({str(k): str(v) for k, v in versions.items()} if isinstance(versions, Mapping) else {})


def _table(facts: Mapping[str, str]) -> Markup:
    lines = [element("tr", element("th", name), element("td", value, class_="w")) for name, value in facts.items()]
    return data_table(lines)


def _config(run: RunData) -> Content:
    if not run.config:
        return ""
    return element(
        "details",
        element("summary", element("b", "config.yaml"), element("small", "as resolved")),
        source(run.config, "yaml"),
    )


def _log(run: RunData) -> Content:
    if not run.log:
        return element("p", element("small", "No process logged a warning or an error."))
    lines = [_log_row(line) for line in run.log]
    head = element(
        "summary",
        element("b", numbers.count(run.log_count, "warning or error", "warnings and errors")),
        element("small", "the newest"),
    )
    return element("details", head, data_table(lines))


def _log_row(line: LogLine) -> Markup:
    words = (line.process, line.level)
    said = element("td", f"{line.event}  {line.detail}"[:MOST_WORDS], class_="w")
    return element("tr", element("td", numbers.seconds(line.at), class_="n"), *(element("td", w) for w in words), said)
