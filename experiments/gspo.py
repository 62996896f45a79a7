"""GSPO: one ratio a sequence, the geometric mean of its tokens' ratios.

Source: Zheng et al., 2025, arXiv:2507.18071; verl's ``compute_policy_loss_gspo``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Sequence-level clipping."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/gspo"))
    )
    clip_low: float = 3e-4
    """How far the sequence's ratio may fall below 1."""
    clip_high: float = 4e-4
    """How far it may rise above 1."""


def main(config: Config) -> None:
    objective = losses.combine(policy=(1.0, losses.gspo(config.clip_low, config.clip_high)))
    run_recipe("GSPO", config.run, config, objective, credit.group_relative())


if __name__ == "__main__":
    main(config_lib.parse(Config()))
