"""RLOO: REINFORCE with the mean of the other rollouts as the baseline.

Source: Ahmadian et al., 2024, arXiv:2402.14740."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """REINFORCE, leave one out."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/rloo"))
    )
    kl_weight: float = 1e-3
    """Weight of the KL to the warm start (k3)."""


def main(config: Config) -> None:
    objective = losses.combine(
        policy=(1.0, losses.reinforce(aggregate="episode_sum")),
        kl=(config.kl_weight, losses.kl_to_reference("k3")),
    )
    run_recipe("RLOO", config.run, config, objective, credit.leave_one_out())


if __name__ == "__main__":
    main(config_lib.parse(Config()))
