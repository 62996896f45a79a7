"""ECHO without a verifier: the policy learns from what the terminal answers, and nothing else.

No reward enters the loss; the rollouts are still the policy's own. Watch
``world/nll_first_turn`` and ``world/nll_later_turns`` for a collapse to easy answers. Source:
ECHO, abstract."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses


@dataclass(frozen=True)
class Config:
    """Observation prediction alone."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/echo_verifier_free"))
    )
    normalise: Literal["token", "episode"] = "token"
    """Mean over all observation tokens, or over each episode's and then over episodes."""


def main(config: Config) -> None:
    world = losses.observation_prediction(normalise=config.normalise)
    objective = losses.combine(world=(1.0, world))
    run_recipe("ECHO, no verifier", config.run, config, objective, credit.group_relative())


if __name__ == "__main__":
    main(config_lib.parse(Config()))
