"""The loop on the real engine: a tiny untrained model in toy worlds."""

import asyncio

import jax
import numpy as np
import pytest

from jaxagent.data.kinds import Kind
from jaxagent.episodes.history import drop_oldest_turns
from jaxagent.episodes.loop import EpisodeLoop, LoopConfig
from jaxagent.episodes.rollout import Limits
from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import shifted_logprobs
from jaxagent.models.transformer import init
from jaxagent.rollout.engine import Engine, EngineConfig, SamplingConfig
from tests.episodes.fakes import PROTOCOL, TOKENIZER, ToyTask, Worlds

MODEL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_size=16,
    max_len=128,
)
LIMITS = Limits(max_turns=3, max_turn_tokens=12, max_context_tokens=100)


@pytest.fixture(scope="module")
def params():
    return init(jax.random.key(0), MODEL)


@pytest.fixture(scope="module")
def engine(params):
    config = EngineConfig(
        slots=4, max_len=128, decode_block=4, prefill_buckets=(32,), context_buckets=(128,)
    )
    with Engine(params, MODEL, config, decode=TOKENIZER.decode) as engine:
        yield engine


def collect(engine, *, limits=LIMITS, rewrite=None, fault=None, concurrent=8):
    worlds = Worlds(fault)
    config = LoopConfig(
        group_size=4, groups_per_batch=2, max_concurrent=concurrent, gather_seconds=0.5, seed=3
    )
    tasks = [ToyTask(f"t{n}") for n in range(9)]
    sampling = SamplingConfig(max_new_tokens=1, temperature=0.9)

    async def run():
        loop = EpisodeLoop(
            engine, tasks, worlds, PROTOCOL, sampling, config, limits, rewrite=rewrite
        )
        async with loop:
            return await loop.collect()

    batch = asyncio.run(run())
    assert worlds.all_closed_once()
    return batch


@jax.jit
def trainer_logprobs(params, tokens, positions, segments):
    found = shifted_logprobs(params, MODEL, tokens, positions, segments, temperature=0.9)
    return found.logprobs


def logprobs_of(params, context):
    """The trainer's log-probabilities, at one padded shape."""
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : len(context)] = context.tokens
    segments = (np.arange(128)[None] < len(context)).astype(np.int32)
    positions = np.arange(128, dtype=np.int32)[None]
    found = trainer_logprobs(params, tokens, positions, segments)
    return np.asarray(found)[0, : len(context)]


def test_recorded_logprobs_are_the_trainers(engine, params):
    copies = engine.stats()["copies"]
    batch = collect(engine)
    assert engine.stats()["copies"] - copies >= 4, "a group's prompt is prefilled once"
    checked = 0
    for episode in batch.episodes:
        assert episode.valid
        (context,) = episode.contexts
        action = context.kinds == Kind.ACTION
        np.testing.assert_allclose(
            context.logprobs[action], logprobs_of(params, context)[action], atol=1e-5
        )
        checked += int(action.sum())
    assert checked > 8 * 12


def test_same_run_whatever_the_timing(engine):
    first = collect(engine)
    again = collect(
        engine,
        concurrent=3,
        fault=lambda env, at: asyncio.sleep(0.003 * (env.number % 3)) if at == "reset" else None,
    )
    for one, two in zip(first.episodes, again.episodes, strict=True):
        assert one.contexts[0].tokens.tolist() == two.contexts[0].tokens.tolist()
        np.testing.assert_allclose(one.contexts[0].logprobs, two.contexts[0].logprobs, atol=1e-5)


def test_rewritten_histories_are_scored_in_the_context_they_were_sampled_in(engine, params):
    limits = Limits(max_turns=6, max_turn_tokens=12, max_context_tokens=90)
    batch = collect(engine, limits=limits, rewrite=drop_oldest_turns(14))
    assert max(len(episode.contexts) for episode in batch.episodes) > 1
    for episode in batch.episodes:
        for context in episode.contexts:
            action = context.kinds == Kind.ACTION
            np.testing.assert_allclose(
                context.logprobs[action], logprobs_of(params, context)[action], atol=1e-5
            )
