"""DiffGate: an external teacher guides failures, the more the harder the task.

The teacher is another run's policy of the same size (``--teacher``), or the policy itself told
the reference solution. Derived from the abstract."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from telling import final_params, solution_text
from wiring import Workbench

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.data.hindsight import told
from jaxagent.models.transformer import Params
from jaxagent.training.passes import Pass, own_tokens, teacher


@dataclass(frozen=True)
class Config:
    """Difficulty-gated guidance by a teacher."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/diffgate"))
    )
    teacher: Path | None = None
    """Folder of a finished run whose last weights are the teacher's."""
    weight: float = 0.1
    """Weight of the guidance."""
    bound: float = 1.0
    """Largest log-ratio that counts."""
    max_advice: int = 96
    """Longest solution that the policy as its own teacher reads, in tokens."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        if config.teacher is not None:
            return [own_tokens("teacher/guide", final_params(config.teacher, bench))]
        advice = told(bench.tokenizer.encode, solution_text(bench), max_tokens=config.max_advice)
        return [teacher("guide", advice, max_advice=config.max_advice)]

    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)))
    advantages = credit.chain(
        credit.group_relative(), credit.gated_difficulty("guide", config.weight, config.bound)
    )
    method = Method(passes=passes)
    run_recipe("DiffGate", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
