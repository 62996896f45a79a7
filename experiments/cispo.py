"""CISPO: clipped importance weights instead of clipped gradients.

No token ever loses its gradient. Source: MiniMax-M1, 2025, arXiv:2506.13585; verl."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Clipped importance weights."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/cispo"))
    )
    clip_low: float = 1.0
    """How far the weight may fall below 1; 1 is no lower clip."""
    clip_high: float = 0.2
    """How far it may rise above 1."""


def main(config: Config) -> None:
    objective = losses.combine(policy=(1.0, losses.cispo(config.clip_low, config.clip_high)))
    run_recipe("CISPO", config.run, config, objective, credit.group_relative())


if __name__ == "__main__":
    main(config_lib.parse(Config()))
