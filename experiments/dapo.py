"""DAPO: a higher upper clip, token mean, overlong penalty and dynamic sampling.

Groups whose rollouts all end alike are replaced by others before an update. Source: Yu et al.,
2025, arXiv:2503.14476; verl's ``recipe/dapo``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.episodes.groups import Group


@dataclass(frozen=True)
class Config:
    """Decoupled clip and dynamic sampling."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/dapo"))
    )
    clip_low: float = 0.2
    """How far the probability ratio may fall below 1."""
    clip_high: float = 0.28
    """How far it may rise above 1."""
    max_length: int = 160
    """Sampled tokens of an episode from which on the whole penalty applies."""
    buffer: int = 40
    """Over how many tokens before it the penalty grows."""


def main(config: Config) -> None:
    async def with_signal(group: Group) -> Group | None:
        kept, _ = credit.drop_flat_groups([group.valid])
        return group if kept else None

    method = Method(
        rewards=[credit.overlong_penalty(config.max_length, config.buffer)],
        after_group=lambda bench, engine: with_signal,
    )
    policy = losses.clipped_policy_gradient(config.clip_low, config.clip_high, aggregate="token")
    objective = losses.combine(policy=(1.0, policy))
    run_recipe("DAPO", config.run, config, objective, credit.group_relative(), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
