"""FlowRL: match the reward's distribution instead of maximising it.

log Z comes from a three-layer head on the mean state of the prompt. Source: Zhu et al., 2025,
arXiv:2509.15207; its released code uses beta 15 and no clip on the importance weight."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.models.heads import LOG_Z_HEAD


@dataclass(frozen=True)
class Config:
    """Flow matching with a learned partition function."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/flow_rl"))
    )
    beta: float = 15.0
    """How sharply the distribution follows the advantage."""
    is_clip: float | None = 0.2
    """How far the importance weight of an episode may leave 1; None leaves it."""
    weight: float = 0.01
    """Weight of the loss, whose size grows with beta squared."""


def main(config: Config) -> None:
    method = Method(heads={"log_z": LOG_Z_HEAD})
    flow = losses.flow_rl(config.beta, is_clip=config.is_clip)
    objective = losses.combine(flow=(config.weight, flow))
    run_recipe("FlowRL", config.run, config, objective, credit.group_relative(), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
