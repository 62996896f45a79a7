"""DeltaTTG: credit goes to the turns that brought the end nearer.

A head learns to predict how many tokens an episode still takes; the meter reads it at the
start of every update. Derived from the abstract, where the meter is trained beforehand."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.models.heads import HeadConfig
from jaxagent.training.heads import meter_pass


@dataclass(frozen=True)
class Config:
    """Credit by progress."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/delta_ttg"))
    )
    tau: float = 20.0
    """Tokens of progress that multiply a turn's credit by e."""
    meter_weight: float = 0.1
    """Weight of training the meter."""


def main(config: Config) -> None:
    heads = {"progress": HeadConfig(detach=True)}
    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)),
        meter=(config.meter_weight, losses.progress_regression()),
    )
    advantages = credit.chain(credit.group_relative(), credit.progress_redistribution(config.tau))
    method = Method(heads=heads, passes=lambda bench, start: [meter_pass("progress")])
    run_recipe("DeltaTTG", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
