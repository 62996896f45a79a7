"""SD-Search: GRPO, and a divergence from the policy that saw how the whole group fared.

The teacher reads the siblings' actions with their outcomes. Derived from the abstract: the
weight and the mean over tokens are readings of ours."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from wiring import Workbench

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.data.hindsight import group_summary
from jaxagent.models.transformer import Params
from jaxagent.training.passes import Pass, teacher


@dataclass(frozen=True)
class Config:
    """GRPO with hindsight self-distillation."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/sd_search"))
    )
    weight: float = 0.1
    """Weight of the Jensen-Shannon divergence."""
    max_advice: int = 256
    """Longest summary of a group, in tokens."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        advice = group_summary(bench.tokenizer.encode, max_tokens=config.max_advice)
        return [teacher("group", advice, max_advice=config.max_advice, hidden=True)]

    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)),
        distil=(config.weight, losses.divergence("group", "jsd")),
    )
    method = Method(passes=passes)
    run_recipe("SD-Search", config.run, config, objective, credit.group_relative(), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
