"""The parts of the report, each a function `RunData -> Markup` (empty where the run has nothing of it).

To add one, write a module with `make(run)` and put it into `page.SECTIONS`.
"""
