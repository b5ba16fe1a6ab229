"""The report of a run: one HTML page that needs nothing else, made from the files of its folder.

Owns how runs are shown: reading them into plain data, charts, pages. Never touches a run folder but to read it, and
computes no verdict and no reward.

::

    RUN/ ─ reading ─▶ model.RunData ─ sections ─▶ Markup ─ page ─▶ report.html
                                        └ plots, numbers, markup
"""

from kbrl_async.lab.report.page import compare_page, report_page
from kbrl_async.lab.report.reading import read_run

__all__ = ["compare_page", "read_run", "report_page"]
