"""Outcome-based exploration: rollouts that end like others of their group earn less.

Formula from memory, idea from the abstract of outcome-based exploration; the penalty is in
training rewards only."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from telling import outcome_ids

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """A penalty on equal outcomes."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/exploration"))
    )
    scale: float = 0.1
    """Penalty of an outcome that all other rollouts of the group share."""


def main(config: Config) -> None:
    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)))
    method = Method(
        rewards=[credit.batch_bonus(config.scale)],
        passes=lambda bench, start: [outcome_ids(bench)],
    )
    run_recipe("exploration", config.run, config, objective, credit.group_relative(), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
