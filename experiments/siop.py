"""SIOP: turns are rewarded by the evidence they add for the episode's own answer.

An episode's answer is its last command; those of a group that are the same command agree. No
verifier is read. Source: SIOP, ``siop_process_reward.py``, where answers are clustered by
meaning."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from telling import outcome_ids, own_answer
from wiring import Workbench

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.models.transformer import Params
from jaxagent.training.passes import Pass, boundary_answer


@dataclass(frozen=True)
class Config:
    """Self-induced outcome potential."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/siop"))
    )
    outcome_weight: float = 0.5
    """Share of an answer's frequency that its last turn gets as well."""
    kl_weight: float = 5e-3
    """Weight of the KL to the warm start (k3)."""
    max_answer: int = 64
    """Longest answer that is scored, in tokens."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        evidence = boundary_answer(
            "evidence", own_answer(bench), max_answer=config.max_answer, probability=True
        )
        return [evidence, outcome_ids(bench)]

    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient()),
        kl=(config.kl_weight, losses.kl_to_reference("k3")),
    )
    advantages = credit.turn_returns(normalise="group_rewards")
    method = Method(rewards=[credit.evidence_gain(config.outcome_weight)], passes=passes)
    run_recipe("SIOP", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
