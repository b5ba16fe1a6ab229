"""A problem that asks for gradients, as one whose forward returns them: text at the end of its source, and of a
candidate's.

::

    forward(*inputs) ─▶ outputs        ⇒        forward(*inputs, upstream) ─▶ (outputs, gradients)

`upstream`, the gradients of the outputs, are inputs like all others, so secret sets vary them too; and whatever handles
a forward handles this one.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

GRADIENTS = """

import torch as _torch


def _with_gradients(forward, wanted):
    def forward_and_backward(self, *given):
        *inputs, upstream = given
        with _torch.enable_grad(), _torch.autograd.set_multithreading_enabled(False):
            taken = [_leaf(value) if wanted != "parameters" else value for value in inputs]
            made = forward(self, *taken)
            outputs = [made] if isinstance(made, _torch.Tensor) else list(made)
            leaves = [value for value in taken if isinstance(value, _torch.Tensor) and value.requires_grad]
            if wanted != "inputs":
                leaves += [parameter for _, parameter in sorted(self.named_parameters())]
            real = [value for value in outputs if value.is_floating_point()]
            if not all(value.requires_grad for value in real):
                raise RuntimeError("an output has no gradient: launch kernels within a torch.autograd.Function")
            gradients = _torch.autograd.grad(real, leaves, upstream, allow_unused=True)
        found = [_torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients)]
        return tuple(value.detach() for value in outputs), tuple(found)

    return forward_and_backward


def _leaf(value):
    is_real = isinstance(value, _torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_real else value


{model}.forward = _with_gradients({model}.forward, "{wanted}")
"""
UPSTREAM = '''

_forward_inputs = get_inputs


def get_inputs():
    """The same, and a gradient of each output."""
    inputs = list(_forward_inputs())
    given = list(get_init_inputs())
    is_named = len(given) == 2 and isinstance(given[0], (list, tuple)) and isinstance(given[1], dict)
    model = Model(*given[0], **given[1]) if is_named else Model(*given)
    with _torch.no_grad():
        made = _plain_forward(model, *inputs)
    outputs = [made] if isinstance(made, _torch.Tensor) else list(made)
    return [*inputs, [_torch.randn_like(value) for value in outputs if value.is_floating_point()]]
'''
KEPT = "\n\n_plain_forward = Model.forward\n"


def of_model(wanted: str) -> str:
    """For a problem's source."""
    return KEPT + GRADIENTS.format(model="Model", wanted=wanted)


def of_candidate(wanted: str) -> str:
    """For a candidate's; nothing where no gradients are asked for."""
    return GRADIENTS.format(model="ModelNew", wanted=wanted) if wanted else ""


@contextlib.contextmanager
def answered_by(candidate: types.ModuleType, wanted: str) -> Iterator[None]:
    """In a confined child: within it a loaded candidate's forward is the one that returns gradients, too."""
    if not wanted:
        yield
        return
    plain = candidate.ModelNew.forward
    exec(of_candidate(wanted), candidate.__dict__)  # noqa: S102 - our own text, in a child that exists to run another's
    try:
        yield
    finally:
        candidate.ModelNew.forward = plain
