"""Whole runs on a toy environment: real engine, real updates, no terminal."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxagent import credit, losses
from jaxagent.data.tokenizer import ByteTokenizer
from jaxagent.episodes.background import LoopThread
from jaxagent.episodes.episode import Context, Episode
from jaxagent.episodes.loop import EpisodeLoop, LoopConfig
from jaxagent.episodes.protocol import Command, compact_protocol
from jaxagent.episodes.rollout import Limits
from jaxagent.models.config import ModelConfig
from jaxagent.models.transformer import init
from jaxagent.rollout.engine import Engine, EngineConfig
from jaxagent.rollout.sampling import SamplingConfig
from jaxagent.training.checkpoint import Checkpoints
from jaxagent.training.learner import Learner, Shapes
from jaxagent.training.metrics import MetricsWriter, read_metrics
from jaxagent.training.optimizer import adamw
from jaxagent.training.passes import own_tokens
from jaxagent.training.run import Step, train
from jaxagent.training.state import create_state
from jaxagent.training.step import make_update

TOKENIZER = ByteTokenizer()
MODEL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
)
LIMITS = Limits(max_turns=2, max_turn_tokens=12, max_context_tokens=64, max_observation_tokens=32)
STEPS, GROUPS, GROUP_SIZE = 6, 2, 4


@dataclass(frozen=True)
class Task:
    id: str


class LowBytes:
    """Rewards the share of low bytes in what the policy says; one turn."""

    async def reset(self) -> list[Any]:
        return [SimpleNamespace(text="go", source="observation")]

    async def step(self, action: str | None) -> Any:
        text = (action or "").encode()
        share = sum(byte < 96 for byte in text) / max(1, len(text))
        return SimpleNamespace(segments=[], reward=share, done=True, info={})

    async def close(self) -> None:
        pass


class Endless:
    def __getitem__(self, index: int) -> Task:
        return Task(f"task-{index % 3}")


# Any turn is a command: what an untrained model says is rarely well-formed.
PROTOCOL = replace(compact_protocol(TOKENIZER), parse=lambda text: Command(text or " "))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(
        slots=8, max_len=64, prefill_buckets=(16,), prefill_rows=(8,), decode_block=4
    )
    with Engine(init(jax.random.key(0), MODEL), MODEL, config) as made:
        made.warmup()
        yield made


def build_learner() -> Learner:
    optimizer = adamw(3e-3)
    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient()),
        kl=(1e-3, losses.kl_to_reference("k3")),
    )
    params = init(jax.random.key(0), MODEL)
    return Learner(
        create_state(params, optimizer),
        make_update(MODEL, objective, optimizer),
        Shapes(row_length=64, rows=(4, 8), episodes=GROUPS * GROUP_SIZE, turns=2),
        MODEL,
        credit=credit.group_relative(),
        passes=[own_tokens("reference", params)],
    )


def run(
    engine: Engine,
    out: Path,
    *,
    steps: int = STEPS,
    max_staleness: int = 0,
    stop_at: int | None = None,
    checkpoints: bool = True,
) -> tuple[bool, Learner, list[Step]]:
    """Runs to ``steps``, from the checkpoint in ``out`` where there is one."""
    learner, seen, state = build_learner(), [], None
    with Checkpoints(out / "checkpoints") as kept, MetricsWriter(out) as writer:
        if kept.steps:
            learner.state, host = kept.restore(learner.state)
            learner.version, state = int(learner.state.step), host["loop"]
        engine.set_params(learner.params(), learner.version)
        config = LoopConfig(
            group_size=GROUP_SIZE, groups_per_batch=GROUPS, max_staleness=max_staleness
        )

        def make_loop() -> EpisodeLoop:
            return EpisodeLoop(
                engine,
                Endless(),
                lambda task: LowBytes(),
                PROTOCOL,
                SamplingConfig(max_new_tokens=12),
                config,
                LIMITS,
                version=learner.version,
                state=state,
            )

        with LoopThread(make_loop) as loop:

            def on_step(step: Step) -> None:
                seen.append(step)
                if step.version == stop_at:
                    loop.request_stop()

            finished = train(
                loop,
                engine,
                learner,
                writer,
                steps=steps,
                checkpoints=kept if checkpoints else None,
                checkpoint_every=4,
                on_step=on_step,
            )
    return finished, learner, seen


def leaves(learner: Learner) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(learner.state)]


def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    engine: Engine, tmp_path: Path
) -> None:
    finished, whole, steps = run(engine, tmp_path / "whole")
    assert finished and [s.version for s in steps] == list(range(1, STEPS + 1))

    finished, part, _ = run(engine, tmp_path / "parts", stop_at=3)
    assert not finished and part.version == 3
    finished, resumed, steps = run(engine, tmp_path / "parts")
    assert finished and [s.version for s in steps] == [4, 5, 6]
    for left, right in zip(leaves(whole), leaves(resumed), strict=True):
        np.testing.assert_array_equal(left, right)

    losses_whole = {k: m["policy/loss"] for k, m in read_metrics(tmp_path / "whole").items()}
    losses_parts = {k: m["policy/loss"] for k, m in read_metrics(tmp_path / "parts").items()}
    assert losses_whole == losses_parts and len(losses_whole) == STEPS


def test_synchronous_run_trains_on_its_own_weights_only(engine: Engine, tmp_path: Path) -> None:
    before = engine.stats()["compilations"]
    _, learner, steps = run(engine, tmp_path, checkpoints=False)
    metrics = read_metrics(tmp_path)
    assert all(m["rollout/staleness_max"] == 0 for m in metrics.values())
    assert all(m["rollout/current_tokens"] == m["batch/action_tokens"] for m in metrics.values())
    assert max(m["rollout/logprob_gap_max"] for m in metrics.values()) < 1e-5
    assert learner.logprob_gap([]) == 0.0
    # The first update compiles one shape; nothing after it, and nothing in the engine.
    assert steps[0].metrics["learner/compilations"] == learner.compilations == 1
    assert engine.stats()["compilations"] == before


def test_asynchronous_run_stays_within_its_staleness(engine: Engine, tmp_path: Path) -> None:
    finished, _, _ = run(engine, tmp_path, steps=12, max_staleness=2, checkpoints=False)
    assert finished
    metrics = read_metrics(tmp_path)
    assert all(m["rollout/staleness_max"] <= 2 for m in metrics.values())
    # The sampler really runs ahead.
    assert any(m["rollout/staleness_max"] >= 1 for m in metrics.values())


def test_logprob_gap_sees_other_weights(engine: Engine, tmp_path: Path) -> None:
    _, learner, steps = run(engine, tmp_path, steps=1, checkpoints=False)
    episodes = steps[0].collected.episodes
    assert learner.logprob_gap(episodes) > 1e-5  # updated since they were drawn
    assert build_learner().logprob_gap(episodes) < 1e-5  # the weights that drew them


def test_shapes_take_the_smallest_that_fits_and_say_when_none_does() -> None:
    def episode(length: int) -> Episode:
        context = Context(
            tokens=np.zeros(length, np.int32),
            kinds=np.array([1, *[2] * (length - 1)], np.uint8),
            turn_ids=np.zeros(length, np.int32),
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
        )
        return Episode("t", "g", (context,), 0.0)

    shapes = Shapes(row_length=8, rows=(2, 4), episodes=8, turns=1)
    assert shapes.pack([episode(8)]).tokens.shape == (2, 8)
    assert shapes.pack([episode(8)] * 3).tokens.shape == (4, 8)
    with pytest.raises(ValueError, match="rows=4"):
        shapes.pack([episode(8)] * 5)
    with pytest.raises(ValueError, match="9 tokens"):
        shapes.pack([episode(9)])


def test_missing_scores_are_named_before_the_run() -> None:
    optimizer = adamw(1e-3)
    objective = losses.combine(kl=(1.0, losses.kl_to_reference("k3")))
    with pytest.raises(ValueError, match="reference"):
        Learner(
            create_state(init(jax.random.key(0), MODEL), optimizer),
            make_update(MODEL, objective, optimizer),
            Shapes(64, (2,), 8, 2),
            MODEL,
        )
