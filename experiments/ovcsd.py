"""OVCSD: where a verified solution and a failed attempt part, prefer the solution's action.

The teacher's rollouts are reference solutions, really run and verified, and compared with the
attempt turn by turn. Derived from the abstract."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from telling import demonstrator
from wiring import Workbench

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.data.augment import Augment, verified_demonstrations


@dataclass(frozen=True)
class Config:
    """Outcome-verified counterfactual preferences."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/ovcsd"))
    )
    weight: float = 0.1
    """Weight of the preference."""
    suffix_weight: float = 0.05
    """Weight of imitating what the solution did from there on."""
    beta: float = 1.0
    """Sharpness of the preference."""


def main(config: Config) -> None:
    def augment(bench: Workbench) -> Augment:
        return verified_demonstrations(demonstrator(bench))

    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)),
        preference=(config.weight, losses.preference(config.beta)),
        suffix=(config.suffix_weight, losses.marked_cross_entropy("suffix")),
    )
    method = Method(augment=augment)
    run_recipe("OVCSD", config.run, config, objective, credit.group_relative(), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
