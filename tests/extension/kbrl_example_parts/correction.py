"""An off-policy correction: `corrections=kbrl_example_parts.correction:every_second`."""

from __future__ import annotations

import torch

from kbrl_async.learning.corrections import Ratios


def every_second(ratios: Ratios) -> torch.Tensor:
    """1 for every second token, 0 for the others: half of the gradient, for whoever wants to see that it acts. [T]"""
    return (torch.arange(ratios.log_rho_T.numel(), device=ratios.log_rho_T.device) % 2).to(ratios.log_rho_T.dtype)
