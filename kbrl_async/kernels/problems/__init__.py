"""Problems in the KernelBench contract: the project's own suite, and folders or files of the user.

Owns loading and static validation (a problem is parsed, never executed here). Never touches candidates.
"""

from kbrl_async.kernels.problems.audit_file import usable
from kbrl_async.kernels.problems.finding import find_problem
from kbrl_async.kernels.problems.loading import load_file, load_folder, load_problems, load_suite, parse_problem

__all__ = ["find_problem", "load_file", "load_folder", "load_problems", "load_suite", "parse_problem", "usable"]
