"""ECHO: GRPO that also learns to predict what the terminal answers.

The observation tokens of every episode, failed ones too, are targets of a cross-entropy in
the same forward pass: no importance weight, no advantage. ``--policy-weight 0`` leaves only
the prediction (no verifier needed).
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
    """GRPO with observation prediction, in real terminals."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/echo"))
    )
    policy_weight: float = 1.0
    """Weight of the policy gradient; 0 learns from the terminal alone."""
    world_weight: float = 0.05
    """Weight of predicting the terminal's answers."""
    normalise: Literal["token", "episode"] = "token"
    """Mean over all observation tokens, or over each episode's and then over episodes."""
    clip_low: float = 0.2
    """How far the probability ratio may fall below 1."""
    clip_high: float = 0.28
    """How far it may rise above 1."""

    def __post_init__(self) -> None:
        for name in ("policy_weight", "world_weight"):
            value = getattr(self, name)
            config_lib.require(value >= 0, f"{name} must not be negative, got {value}")
        config_lib.require(
            self.policy_weight + self.world_weight > 0,
            "policy_weight and world_weight are both 0: there is nothing to learn from",
        )


def main(config: Config) -> None:
    policy = losses.clipped_policy_gradient(clip_low=config.clip_low, clip_high=config.clip_high)
    objective = losses.combine(
        policy=(config.policy_weight, policy),
        world=(config.world_weight, losses.observation_prediction(normalise=config.normalise)),
    )
    run_recipe("ECHO", config.run, config, objective, credit.group_relative(scale="std"))


if __name__ == "__main__":
    main(config_lib.parse(Config()))
