"""TBA: trajectory balance with the group's own estimate of log Z, off-policy.

The loss holds for the tokens of any policy, so ``--rl.max-staleness`` may be large. Source:
Bartoldson et al., 2025, arXiv:2503.18929."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Profiled trajectory balance."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/tba"))
    )
    beta: float = 0.3
    """Weight of the KL to the warm start: rewards are divided by it."""
    weight: float = 0.05
    """Weight of the loss, whose size grows with 1 / beta squared."""


def main(config: Config) -> None:
    objective = losses.combine(balance=(config.weight, losses.trajectory_balance(config.beta)))
    run_recipe("TBA", config.run, config, objective, credit.group_relative())


if __name__ == "__main__":
    main(config_lib.parse(Config()))
