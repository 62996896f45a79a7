"""FlowBalance: trajectory balance whose energy a teacher sharpens.

The teacher is the same policy, told the reference solution. Derived from the abstract: eta,
lambda and the means over tokens are readings of ours."""

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
    """Trajectory balance guided by a privileged self."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/flow_balance"))
    )
    eta: float = 5.0
    """Scale of the energy."""
    guidance: float = 1.0
    """Weight of the teacher's opinion in it."""
    weight: float = 0.02
    """Weight of the loss."""
    max_advice: int = 96
    """Longest solution that the teacher reads, in tokens."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        advice = told(bench.tokenizer.encode, solution_text(bench), max_tokens=config.max_advice)
        return [teacher("solution", advice, max_advice=config.max_advice)]

    balance = losses.flow_balance("solution", config.eta, config.guidance)
    objective = losses.combine(balance=(config.weight, balance))
    method = Method(passes=passes)
    run_recipe(
        "FlowBalance", config.run, config, objective, credit.group_relative(scale="none"), method
    )


if __name__ == "__main__":
    main(config_lib.parse(Config()))
