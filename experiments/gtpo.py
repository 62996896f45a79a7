"""GTPO: the discounted return of each turn, normalised over the group's turns.

Derived from the abstract; what is pooled is a choice of ours (all turns of the group)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Turn-level returns."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/gtpo"))
    )
    gamma: float = 0.9
    """Discount a turn."""


def main(config: Config) -> None:
    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)))
    advantages = credit.turn_returns(config.gamma, normalise="group")
    run_recipe("GTPO", config.run, config, objective, advantages)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
