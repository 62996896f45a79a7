"""OPID: skills for the episode and for single turns, written by the policy in hindsight.

A turn with a skill of its own listens to that alone (critical first). Source: OPID,
``gigpo/core_gigpo.py`` and its launch script (weights 0.001, KL 0.01). The small built-in
policy writes plain text; a larger one would be asked for JSON (``parse_skills``)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from method import Method
from pipeline import Run, run_recipe
from wiring import Workbench

from jaxagent import config as config_lib
from jaxagent import credit, losses
from jaxagent.data.hindsight import skills
from jaxagent.episodes.loop import AfterGroup
from jaxagent.episodes.skills import Analysis, plain_skills, self_written_skills
from jaxagent.models.transformer import Params
from jaxagent.rollout.engine import Engine, SamplingConfig
from jaxagent.training.passes import Pass, teacher


@dataclass(frozen=True)
class Config:
    """On-policy skill distillation."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/opid"))
    )
    episode_weight: float = 1e-3
    """Weight of the shift by the episode's skill."""
    step_weight: float = 1e-3
    """Weight of the shift by a turn's skill."""
    kl_weight: float = 0.01
    """Weight of the KL to the warm start (k3)."""
    max_advice: int = 48
    """Longest analysis, in tokens."""
    request: str = "\\nlesson: "
    """What the policy is asked after its episode."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        encode = bench.tokenizer.encode
        return [
            teacher(
                level,
                skills(encode, level, max_tokens=config.max_advice),
                max_advice=config.max_advice,
            )
            for level in ("episode", "step")
        ]

    def analyse(bench: Workbench, engine: Engine) -> AfterGroup:
        limit = bench.limits.max_context_tokens
        analysis = Analysis(config.max_advice, limit, request=config.request, parse=plain_skills)
        sampling = SamplingConfig(config.max_advice, temperature=config.run.rl.temperature)
        return self_written_skills(engine, bench.protocol, sampling, analysis)

    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient()),
        kl=(config.kl_weight, losses.kl_to_reference("k3")),
    )
    advantages = credit.chain(
        credit.group_relative(),
        credit.routed_teacher_shift("episode", "step", config.episode_weight, config.step_weight),
    )
    method = Method(passes=passes, after_group=analyse)
    run_recipe("OPID", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
