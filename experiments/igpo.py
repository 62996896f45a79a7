"""IGPO: a turn is rewarded by how much likelier it made the right answer.

The answer is the reference's last command. ``--estimator position`` is what was first
released; the default is recommended. Source: Wang et al., 2025, arXiv:2510.14967."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from method import Method
from pipeline import Run, run_recipe
from telling import solution_tokens
from wiring import Workbench

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.models.transformer import Params
from jaxagent.training.passes import Pass, boundary_answer


@dataclass(frozen=True)
class Config:
    """Information gain as a turn reward."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/igpo"))
    )
    gamma: float = 1.0
    """Discount a turn."""
    estimator: Literal["group", "position"] = "group"
    """Rewards normalised over the group's turns, or compared at equal token positions."""
    max_answer: int = 64
    """Longest answer that is scored, in tokens."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        return [
            boundary_answer("gold_logprobs", solution_tokens(bench), max_answer=config.max_answer)
        ]

    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient()))
    recommended = credit.turn_returns(config.gamma, normalise="group_rewards")
    advantages = recommended if config.estimator == "group" else credit.position_relative()
    method = Method(rewards=[credit.information_gain()], passes=passes)
    run_recipe("IGPO", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
