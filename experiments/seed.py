"""SEED: the policy writes a lesson about each finished episode, and teaches itself with it.

Derived from the abstract: as OPID with one skill an episode; the weight is unknown. The small
built-in policy writes plain text; a larger one would be asked for JSON (``parse_skills``)."""

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
    """Self-evolved skills as a teacher."""

    run: Annotated[Run, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Run(out=Path("runs/seed"))
    )
    weight: float = 1e-3
    """Weight of the teacher's shift of the advantage."""
    max_advice: int = 48
    """Longest lesson, in tokens."""
    request: str = "\\nlesson: "
    """What the policy is asked after its episode."""


def main(config: Config) -> None:
    def passes(bench: Workbench, start: Params) -> list[Pass]:
        encode = bench.tokenizer.encode
        return [
            teacher(
                "lesson",
                skills(encode, "episode", max_tokens=config.max_advice),
                max_advice=config.max_advice,
            )
        ]

    def analyse(bench: Workbench, engine: Engine) -> AfterGroup:
        limit = bench.limits.max_context_tokens
        analysis = Analysis(config.max_advice, limit, request=config.request, parse=plain_skills)
        sampling = SamplingConfig(config.max_advice, temperature=config.run.rl.temperature)
        return self_written_skills(engine, bench.protocol, sampling, analysis)

    objective = losses.combine(policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)))
    advantages = credit.chain(
        credit.group_relative(), credit.teacher_shift("lesson", config.weight)
    )
    method = Method(passes=passes, after_group=analyse)
    run_recipe("SEED", config.run, config, objective, advantages, method)


if __name__ == "__main__":
    main(config_lib.parse(Config()))
