"""`torch.compile` where no compiler may be started: what it is given runs as it is, and its own kernels as they are."""

from __future__ import annotations

import re
from typing import Any

_STARTS_COMPILERS = "inductor"
ASKED = r"\btorch\s*\.\s*compile\b|\bfrom\s+torch\s+import\b.*\bcompile\b"
"""A pattern of source that asks torch to compile."""
_OF_ITS_OWN = r"""\bbackend\s*=\s*(?!["'\s])|\bregister_backend\b"""
_AS_IT_IS = (
    "On a GPU torch.compile leaves what it is given as it is, as no compiler is started where candidates run: own "
    "kernels are judged, and torch's operators around them are timed uncompiled. Fuse into your kernels what is to be "
    "fused."
)


def remark(source: str) -> str:
    """What a candidate for a GPU is told; empty where it asks torch to compile nothing."""
    return _AS_IT_IS if re.search(ASKED, source) else ""


def has_its_own(source: str) -> bool:
    """Whether it gives torch a compiler of its own, which may put own kernels in operators' places. Where each operator
    is seen torch compiles nothing, and what that launches is not.
    """
    return bool(re.search(ASKED, source) and re.search(_OF_ITS_OWN, source))


def leave_uncompiled(also_traced: bool = False) -> None:
    """For the rest of this process. `also_traced`: what other backends of it would trace, and compile nothing for, too;
    torch asks for that itself where an operator takes functions (`torch.cond`, `flex_attention`).
    """
    import torch

    compiled = torch.compile

    def as_it_is(model: Any = None, *, backend: Any = _STARTS_COMPILERS, **named: Any) -> Any:
        if backend != _STARTS_COMPILERS and not also_traced:
            return compiled(model, backend=backend, **named)
        return model if model is not None else lambda given: given

    setattr(torch, "compile", as_it_is)  # noqa: B010 - a type checker knows another signature
