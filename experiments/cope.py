"""CoPE: GRPO, and forecasting the policy's own next actions on episodes that succeeded.

Source: CoPE, ``action_forecast.py``: three actions ahead, weight 0.01, wins only."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from method import Method
from pipeline import Run, run_recipe
from wiring import Workbench

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.data.augment import Augment, forecast_contexts


@dataclass(frozen=True)
class Config:
    """GRPO with action forecasts."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/cope"))
    )
    weight: float = 0.01
    """Weight of the forecast."""
    horizon: int = 3
    """How many actions are forecast, the present one included."""
    gate: Literal["wins", "mixed", "all"] = "wins"
    """Which episodes: successes, those of groups that also failed, or all."""


def main(config: Config) -> None:
    def augment(bench: Workbench) -> Augment:
        return forecast_contexts(
            bench.tokenizer.encode,
            max_tokens=bench.limits.max_context_tokens,
            horizon=config.horizon,
            gate=config.gate,
        )

    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)),
        forecast=(config.weight, losses.forecast()),
    )
    method = Method(augment=augment)
    run_recipe("CoPE", config.run, config, objective, credit.group_relative(), method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
