"""Search-E1: rounds of GRPO and rounds of self-distillation in turn, never summed.

In a round of distillation the teacher reads a sibling that did better: a success where the
episode failed, or one in fewer turns. Derived from the abstract."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import jax
import tyro
from method import Method
from pipeline import Run, run_recipe
from wiring import Workbench

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.data.hindsight import best_sibling
from jaxagent.models.transformer import Params
from jaxagent.training.passes import Pass, teacher


@dataclass(frozen=True)
class Config:
    """Alternating reinforcement and self-distillation."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/search_e1"))
    )
    round_length: int = 8
    """Updates of a round."""
    weight: float = 1.0
    """Weight of the forward KL in a round of distillation."""
    max_advice: int = 160
    """Longest sibling that the teacher reads, in tokens."""

    def __post_init__(self) -> None:
        config_lib.require(
            self.round_length > 0, f"round_length must be positive, got {self.round_length}"
        )


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        encode = bench.tokenizer.encode
        advice = best_sibling(encode, rule="better", max_tokens=config.max_advice)
        return [teacher("better", advice, max_advice=config.max_advice, hidden=True)]

    def distilling(step: jax.Array) -> jax.Array:
        return (step // config.round_length) % 2

    objective = losses.combine(
        policy=(lambda step: 1 - distilling(step), losses.clipped_policy_gradient(0.2, 0.28)),
        distil=(
            lambda step: config.weight * distilling(step),
            losses.divergence("better", "forward_kl"),
        ),
    )
    method = Method(passes=passes)
    run_recipe("Search-E1", config.run, config, objective, credit.group_relative(), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
