"""A small policy learns in a real terminal: GRPO with observation prediction.

Builds a byte-level transformer, warms it up on reference solutions, and reinforces it on
freshly generated tasks. ``scripts/quickstart.sh`` runs this.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Trains a small policy in real terminals and shows that it gets better."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/quickstart"))
    )
    world_weight: float = 0.1
    """Weight of predicting what the terminal answers."""
    baseline: float = 0.2
    """Share of its group's mean reward that is subtracted from a rollout's reward; 1 is plain
    GRPO, which needs several times the episodes at this scale."""


def main(config: Config) -> None:
    objective = losses.combine(
        policy=(
            1.0,
            losses.clipped_policy_gradient(clip_low=0.2, clip_high=0.28, aggregate="episode"),
        ),
        world=(config.world_weight, losses.observation_prediction()),
    )
    run_recipe(
        "quickstart", config.run, config, objective, credit.lowered_baseline(config.baseline)
    )


if __name__ == "__main__":
    main(config_lib.parse(Config()))
