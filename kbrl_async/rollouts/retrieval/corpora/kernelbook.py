"""KernelBook: PyTorch modules of public repositories and Triton kernels made from them by a compiler.

Its kernels are unverified, and name their module by `entry_point`; both are renamed to the contract's `Model` and
`ModelNew`.
Its `get_init_inputs` returns `[args, kwargs]`, which the contract allows.
"""

from __future__ import annotations

import keyword
import re

from kbrl_async.rollouts.retrieval.corpora.rows import Row, optional_text, text
from kbrl_async.rollouts.retrieval.entries import Entry, Skip, digest

NAME = "kernelbook"
HUB = "GPUMODE/KernelBook"
COLUMNS = frozenset({"python_code", "triton_code", "entry_point"})


def entry(row: Row) -> Entry:
    """The example of a row. Raises `Skip`."""
    python, triton, name = text(row, "python_code"), text(row, "triton_code"), text(row, "entry_point")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise Skip("entry_point is no name")
    uuid = row.get("uuid")
    known = str(uuid) if isinstance(uuid, str | int) and not isinstance(uuid, bool) else digest(python, triton)
    return Entry(
        uid=f"{NAME}:{known}"[:120],
        corpus=NAME,
        reference=renamed(python, name),
        kernel=renamed(triton, name),
        backend="triton",
        license=optional_text(row, "licenses"),
        origin=optional_text(row, "repo_link") or optional_text(row, "repo_name"),
    )


def renamed(source: str, name: str) -> str:
    """`NAME` and `NAMENew` as `Model` and `ModelNew`; as it is, where the source has a `Model` of its own."""
    if name == "Model" or re.search(r"\bModel(New)?\b", source):
        return source
    return re.sub(rf"\b{name}New\b", "ModelNew", re.sub(rf"\b{name}\b", "Model", source))
