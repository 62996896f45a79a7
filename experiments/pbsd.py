"""PBSD: credit goes to the turns that speak for the right answer.

The teacher is the same policy, told the reference solution; by Bayes' rule its log-ratio to
the policy is the evidence of a turn's actions. Derived from the abstract."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from telling import solution_text
from wiring import Workbench

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.data.hindsight import told
from jaxagent.models.transformer import Params
from jaxagent.training.passes import Pass, teacher


@dataclass(frozen=True)
class Config:
    """Turn credit from a privileged self."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/pbsd"))
    )
    beta: float = 1.0
    """How strongly evidence moves credit between turns."""
    max_advice: int = 96
    """Longest solution that the teacher reads, in tokens."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        advice = told(bench.tokenizer.encode, solution_text(bench), max_tokens=config.max_advice)
        return [teacher("solution", advice, max_advice=config.max_advice)]

    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)))
    advantages = credit.chain(
        credit.group_relative(), credit.belief_redistribution("solution", config.beta)
    )
    method = Method(passes=passes)
    run_recipe("PBSD", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
