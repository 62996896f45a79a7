"""GiGPO: besides its group, a turn is compared with others that began in the same state.

Source: Feng et al., 2025, arXiv:2505.10978; its code as vendored in OPID."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from telling import states

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Group-in-group advantages."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/gigpo"))
    )
    weight: float = 1.0
    """Weight of the comparison between turns."""
    gamma: float = 0.95
    """Discount a turn."""
    similarity: float = 0.95
    """From which ratio on two observations are one state."""


def main(config: Config) -> None:
    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient()))
    advantages = credit.chain(
        credit.group_relative(scale="none"), credit.gigpo_state(config.weight, config.gamma)
    )
    method = Method(passes=lambda bench, start: [states(config.similarity)])
    run_recipe("GiGPO", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
