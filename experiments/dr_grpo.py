"""Dr. GRPO: GRPO without its two biases.

Advantages are not divided by the group's deviation, and the loss divides by a constant rather
than by the length of each episode. Source: Liu et al., 2025, arXiv:2503.20783 and
understand-r1-zero; that the mean over episodes follows the constant is our reading."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """GRPO without normalising by deviation or length."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/dr_grpo"))
    )
    constant_length: float = 64.0
    """What each episode's token sum is divided by."""
    clip: float = 0.2
    """How far the probability ratio may leave 1, either way."""


def main(config: Config) -> None:
    policy = losses.clipped_policy_gradient(
        clip_low=config.clip,
        clip_high=config.clip,
        aggregate="constant",
        constant=config.constant_length,
        episode_mean=True,
    )
    objective = losses.combine(policy=(1.0, policy))
    run_recipe("Dr. GRPO", config.run, config, objective, credit.group_relative(scale="none"))


if __name__ == "__main__":
    main(config_lib.parse(Config()))
