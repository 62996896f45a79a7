"""REINFORCE with the KL to the warm start in the reward.

The advantage is the reward less a share of its group's mean; no ratio and no clipping, with
truncated importance weights for what the sampler drew under older weights. Source: verl's
``apply_kl_penalty``; Williams, 1992."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """REINFORCE with a KL penalty in the reward."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/reinforce"))
    )
    kl_in_reward: float = 1e-3
    """Subtracted from the reward, times the KL of the episode's tokens to the warm start."""
    cap: float = 2.0
    """Largest importance weight."""


def main(config: Config) -> None:
    policy = losses.corrected(losses.reinforce(), losses.truncated_importance(cap=config.cap))
    method = Method(
        rewards=[credit.kl_in_reward(config.kl_in_reward)], reads=frozenset({"reference"})
    )
    objective = losses.combine(policy=(1.0, policy))
    run_recipe("REINFORCE", config.run, config, objective, credit.lowered_baseline(1.0), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
