"""PPO with a critic: GAE over the sampled tokens, clipped value loss.

The critic is a linear head on the policy's own hidden states. Source: Schulman et al., 2017,
arXiv:1707.06347; Endless Terminals (gamma and lambda 1, clip 0.2 and 0.28)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.models.heads import HeadConfig
from jaxagent.training.heads import head_pass
from jaxagent.training.passes import derived


@dataclass(frozen=True)
class Config:
    """Proximal policy optimisation with a value head."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/ppo"))
    )
    value_weight: float = 0.5
    """Weight of the value loss."""
    lam: float = 1.0
    """GAE's lambda."""
    whiten: bool = True
    """Whether advantages are brought to mean 0 and variance 1."""


def main(config: Config) -> None:
    heads = {"values": HeadConfig()}
    targets = derived(
        ["returns"], lambda batch: {"returns": credit.value_targets(batch, lam=config.lam)}
    )
    method = Method(
        heads=heads, passes=lambda bench, start: [head_pass(heads, ["values"]), targets]
    )
    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)),
        value=(config.value_weight, losses.value_loss()),
    )
    advantages = credit.gae(lam=config.lam, whiten=config.whiten)
    run_recipe("PPO", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
