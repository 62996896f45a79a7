"""GRPO: group-relative advantages and a clipped policy gradient.

Shao et al., 2024, arXiv:2402.03300. ``--scale none --aggregate constant`` gives Dr. GRPO
(Liu et al., 2025, arXiv:2503.20783), ``--baseline leave-one-out`` RLOO (Ahmadian et al.,
2024, arXiv:2402.14740), ``--clip-high 0.28 --kl-weight 0`` the surrogate of DAPO (Yu et al.,
2025, arXiv:2503.14476).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Group-relative policy optimisation in real terminals."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/grpo"))
    )
    baseline: Literal["group", "leave-one-out"] = "group"
    """What a rollout is compared with: its whole group's mean, or the mean of the others."""
    scale: Literal["std", "none"] = "std"
    """Whether advantages are divided by their group's standard deviation."""
    clip_low: float = 0.2
    """How far the probability ratio may fall below 1."""
    clip_high: float = 0.2
    """How far it may rise above 1."""
    aggregate: Literal["token", "episode", "constant"] = "episode"
    """Mean over all tokens, over each episode's tokens, or by a constant length."""
    constant_length: int = 64
    """The length that aggregate=constant divides by, in tokens."""
    kl_weight: float = 1e-3
    """Weight of the KL to the warm start (k3); 0 leaves out its forward pass."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        for name in ("kl_weight", "entropy_weight", "clip_low", "clip_high"):
            value = getattr(self, name)
            config_lib.require(value >= 0, f"{name} must not be negative, got {value}")


def main(config: Config) -> None:
    constant = config.aggregate == "constant"
    terms = {
        "policy": (
            1.0,
            losses.clipped_policy_gradient(
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                aggregate=config.aggregate,
                constant=config.constant_length if constant else None,
                episode_mean=True if constant else None,
            ),
        )
    }
    if config.kl_weight:
        terms["kl"] = (config.kl_weight, losses.kl_to_reference("k3"))
    if config.entropy_weight:
        terms["entropy"] = (config.entropy_weight, losses.entropy_bonus())
    base = (
        credit.group_relative(scale=config.scale)
        if config.baseline == "group"
        else credit.leave_one_out()
    )
    run_recipe("GRPO", config.run, config, losses.combine(**terms), credit.chain(base))


if __name__ == "__main__":
    main(config_lib.parse(Config()))
