"""What TRL's trainers say of small fixed cases: `python tests/unit/learning/trl_reference.py` writes trl_golden.json.

Run it where trl is installed (the golden file says which versions it was made with). The losses are TRL's own
`_compute_loss`, called on a stand-in that holds nothing but the settings the method reads; log-probs go in as they are,
so that no model is needed. Advantages, masks and log-probs are drawn here and stand in the golden file too.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

GOLDEN = Path(__file__).with_name("trl_golden.json")
LENGTHS = (7, 3, 5, 1)
MAX_LENGTH = 16
"""TRL's `max_completion_length`, the constant of Dr. GRPO."""

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_clip_higher": {"loss_type": "grpo", "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dual_clip": {"loss_type": "bnpo", "delta": 1.3},
    "gspo": {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "grpo_with_k3": {"loss_type": "grpo", "beta": 0.04},
    "dapo_with_k3": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1},
    "grpo_with_opsm": {"loss_type": "grpo", "opsm": 1e-4},
    "decoupled": {"loss_type": "bnpo", "correction": True},
}
"""Each a setting of TRL's GRPO trainer; `correction` multiplies by exp(old − sampling), as with vLLM."""


def draw() -> dict[str, list[list[float]] | list[float]]:
    """Log-probs of four answers under four policies: the learner, the proximal one, the sampler, the reference."""
    rng = random.Random(26)
    near = [[round(-rng.expovariate(1.2), 6) for _ in range(n)] for n in LENGTHS]

    def moved(scale: float) -> list[list[float]]:
        return [[round(min(-1e-3, x + rng.gauss(0, scale)), 6) for x in row] for row in near]

    drawn = {"pi": moved(0.4), "old": moved(0.25), "mu": moved(0.25), "reference": moved(0.3)}
    return {**drawn, "advantages": [1.25, -0.75, -1.5, 0.5]}


def padded(rows: list[list[float]]) -> torch.Tensor:
    """[samples, longest], 0 behind the end."""
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.float64)
    for place, row in enumerate(rows):
        out[place, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out


def grpo(drawn: Mapping[str, Any], setting: Mapping[str, Any]) -> tuple[float, list[float]]:
    """TRL's loss, and its gradient with respect to every log-prob."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    pi = padded(drawn["pi"]).requires_grad_()
    mask = (padded([[1.0] * len(row) for row in drawn["pi"]]) > 0).double()
    old = padded(drawn["old"])
    low = setting.get("epsilon_low", 0.2)
    stand_in = SimpleNamespace(
        loss_type=setting["loss_type"],
        importance_sampling_level=setting.get("level", "token"),
        epsilon_low=low,
        epsilon_high=setting.get("epsilon_high", low),
        beta=setting.get("beta", 0.0),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=setting.get("opsm"),
        max_completion_length=MAX_LENGTH,
        use_vllm=bool(setting.get("correction")),
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        args=SimpleNamespace(delta=setting.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        **_quiet(pi),
    )
    inputs = {
        **_ids(mask),
        "advantages": torch.tensor(drawn["advantages"], dtype=torch.float64),
        "old_per_token_logps": old,
        "ref_per_token_logps": padded(drawn["reference"]),
        "importance_sampling_ratio": (old - padded(drawn["mu"])).exp(),
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(stand_in, None, inputs)
    return _result(loss, pi, mask)


def rloo(drawn: Mapping[str, Any]) -> tuple[float, list[float]]:
    """RLOO where the learner is still the sampler: there the clip is at rest and the gradient is the method's own."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    pi = padded(drawn["pi"]).requires_grad_()
    mask = (padded([[1.0] * len(row) for row in drawn["pi"]]) > 0).double()
    stand_in = SimpleNamespace(epsilon_low=0.2, epsilon_high=0.2, **_quiet(pi))
    inputs = {
        **_ids(mask),
        "advantages": torch.tensor(drawn["advantages"], dtype=torch.float64),
        "old_logps": (pi.detach() * mask).sum(1),
    }
    loss = RLOOTrainer._compute_loss(stand_in, None, inputs)
    return _result(loss, pi, mask)


def _ids(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    one = torch.ones(mask.shape[0], 1, dtype=torch.long)
    ids = torch.ones_like(mask).long()
    return {"prompt_ids": one, "prompt_mask": one, "completion_ids": ids, "completion_mask": mask}


class _Metrics(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


def _quiet(pi: torch.Tensor) -> dict[str, Any]:
    """What the methods ask for beside the loss: the log-probs, and places for their figures."""

    def same(value: Any, *_args: Any, **_kwargs: Any) -> Any:
        return value

    return {
        "_get_per_token_logps_and_entropies": lambda *_a, **_k: (pi, torch.zeros_like(pi).detach(), None),
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "model": SimpleNamespace(training=False),
        "_metrics": {"train": _Metrics(), "eval": _Metrics()},
        "accelerator": SimpleNamespace(
            num_processes=1, gather=same, reduce=same, gather_for_metrics=same, device=torch.device("cpu")
        ),
    }


def _result(loss: torch.Tensor, pi: torch.Tensor, mask: torch.Tensor) -> tuple[float, list[float]]:
    loss.backward()  # type: ignore[no-untyped-call]
    assert pi.grad is not None
    return float(loss.detach()), pi.grad[mask > 0].tolist()


def answers() -> dict[str, dict[str, Any]]:
    """TRL's loss and gradient of every case."""
    drawn = draw()
    found = {name: grpo(drawn, setting) for name, setting in SETTINGS.items()}
    found["rloo"] = rloo(drawn)
    return {name: {"loss": loss, "gradient": gradient} for name, (loss, gradient) in found.items()}


def main() -> None:
    made_with = {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers")}
    document = {
        "made_by": "python tests/unit/learning/trl_reference.py",
        "made_with": made_with,
        "drawn": draw(),
        "cases": answers(),
    }
    GOLDEN.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{len(document['cases'])} cases, {made_with}", file=sys.stderr)


if __name__ == "__main__":
    main()
