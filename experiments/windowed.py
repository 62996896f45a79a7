"""WIRL: the turns up to each answer of the terminal share its credit.

A window's reward is what it gained over the best score so far; windows are compared within
the group. Derived from the abstract."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from telling import windows

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Credit by windows."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/windowed"))
    )


def main(config: Config) -> None:
    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)))
    method = Method(rewards=[credit.best_so_far()], passes=lambda bench, start: [windows()])
    run_recipe("WIRL", config.run, config, objective, credit.window_advantage(), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
