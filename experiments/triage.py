"""TRIAGE: a constant for each turn by its role in the episode.

A rule takes the place of the judge: see ``telling.roles``. Derived from the abstract; the
constants are placeholders."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from telling import roles

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Role-based shifts of the advantage."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/triage"))
    )
    decisive: float = 0.5
    """Added on the last turn of a success."""
    exploration: float = 0.2
    """Added on turns that the terminal answered."""
    no_progress: float = -0.1
    """Added on turns that repeat a command or hold none."""
    regression: float = -0.5
    """Added on the last turn of a failure."""


def main(config: Config) -> None:
    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)))
    shifts = credit.role_shift(
        config.decisive, config.exploration, config.no_progress, config.regression
    )
    method = Method(passes=lambda bench, start: [roles(bench)])
    advantages = credit.chain(credit.group_relative(), shifts)
    run_recipe("TRIAGE", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
