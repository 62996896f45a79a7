"""SDPO: distil from the policy itself, shown a successful sibling. No policy gradient.

The teacher is a moving average of the policy. Here the divergence is of the whole
distributions rather than of the 100 likeliest tokens. Source: SDPO, ``core_algos.py`` and
``config/sdpo.yaml``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

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
    """Self-distillation from successful siblings."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/sdpo"))
    )
    kind: Literal["jsd", "forward_kl", "reverse_kl"] = "jsd"
    """Which divergence."""
    ratio_cap: float = 2.0
    """Largest weight of a token drawn by older weights."""
    max_advice: int = 160
    """Longest sibling that the teacher reads, in tokens."""
    own: bool = True
    """Whether an episode's own success may be its demonstration."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        advice = best_sibling(bench.tokenizer.encode, own=config.own, max_tokens=config.max_advice)
        return [teacher("sibling", advice, max_advice=config.max_advice, hidden=True)]

    objective = losses.combine(
        distil=(1.0, losses.divergence("sibling", config.kind, ratio_cap=config.ratio_cap))
    )
    method = Method(passes=passes, ema=True)
    run_recipe("SDPO", config.run, config, objective, credit.group_relative(), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
