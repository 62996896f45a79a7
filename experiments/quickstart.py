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
    world_weight: float = 0.05
    """Weight of predicting what the terminal answers."""


def main(config: Config) -> None:
    objective = losses.combine(
        policy=(
            1.0,
            losses.clipped_policy_gradient(clip_low=0.2, clip_high=0.28, aggregate="episode"),
        ),
        world=(config.world_weight, losses.observation_prediction()),
    )
    advantages = credit.chain(credit.group_relative(scale="std"), credit.clip(5.0))
    run_recipe("quickstart", config.run, config, objective, advantages)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
