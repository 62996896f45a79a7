"""TRACE: temporal differences of the right answer's log-probability under a frozen reference.

The reference is the warm start, the answer the reference solution's last command. Derived
from the abstract; with gamma 1 the rewards of an episode telescope."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

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
    """Log-ratio temporal differences."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/trace"))
    )
    gamma: float = 1.0
    """Discount a turn."""
    max_answer: int = 64
    """Longest answer that is scored, in tokens."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        return [
            boundary_answer(
                "gold_logprobs",
                solution_tokens(bench),
                max_answer=config.max_answer,
                params=start,
            )
        ]

    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient()))
    advantages = credit.turn_returns(config.gamma, normalise="group_rewards", rewards="both")
    method = Method(rewards=[credit.log_ratio_td(config.gamma)], passes=passes)
    run_recipe("TRACE", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
