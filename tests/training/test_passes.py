"""Further forward passes: equal to scoring each sequence by itself, and compiled once."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import credit, losses
from jaxagent.data.hindsight import group_summary, told
from jaxagent.data.kinds import Kind
from jaxagent.data.scoring import Advice, insertion_point
from jaxagent.data.synthetic import random_episodes
from jaxagent.episodes.episode import Episode
from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import shifted_logprobs
from jaxagent.models.transformer import init
from jaxagent.training.learner import Learner, Shapes
from jaxagent.training.optimizer import adamw
from jaxagent.training.passes import (
    Pass,
    Setting,
    Work,
    boundary_answer,
    derived,
    fact,
    own_tokens,
    teacher,
)
from jaxagent.training.state import create_state
from jaxagent.training.step import make_update

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_size=16,
)
SHAPES = Shapes(row_length=48, rows=(4, 8), episodes=9, turns=4)
EPISODES = random_episodes(
    1, groups=3, group_size=3, vocab_size=24, max_contexts=2, invalid=0.2, max_turns=2
)
SETTING = Setting(CONFIG, 8 * 48, 48, 9, 4, 0.8, None)


def encode(text: str) -> list[int]:
    return [ord(c) % 24 for c in text]


@cache
def params(key: int = 0) -> Any:
    return init(jax.random.key(key), CONFIG)


def score_alone(weights: Any, tokens: Sequence[int]) -> np.ndarray:
    row = jnp.asarray(tokens, jnp.int32)[None]
    found = shifted_logprobs(
        weights,
        CONFIG,
        row,
        jnp.arange(len(tokens))[None],
        jnp.ones_like(row),
        temperature=0.8,
    )
    return np.asarray(found.logprobs[0])


def work(ema: bool = False) -> Work:
    state = create_state(params(), adamw(1e-3), ema=ema)
    return Work(state, EPISODES, SHAPES.place(EPISODES))


def test_a_teacher_reads_the_same_tokens_with_the_advice() -> None:
    builder = group_summary(encode, max_tokens=16)
    one = teacher("hindsight", builder, max_advice=16, hidden=True, rows=2)
    assert one.scores == {"teacher/hindsight", "teacher/hindsight/mask"}
    batch, facts = one.build(SETTING)(work(), SHAPES.pack(EPISODES))
    scores, mask = (np.asarray(batch.scores[name]) for name in sorted(one.scores))
    placement, advised = SHAPES.place(EPISODES), {a.episode: a for a in builder(EPISODES)}
    assert 0 < len(advised) < len(EPISODES)
    wanted, covered = np.zeros(mask.size), np.zeros(mask.size)
    for index, advice in advised.items():
        for number, context in enumerate(EPISODES[index].contexts):
            start, at = placement.start(index, number), insertion_point(EPISODES[index], number)
            assert start is not None
            alone = score_alone(params(), np.insert(context.tokens, at, advice.tokens))
            alone = np.delete(alone, at + np.arange(len(advice.tokens)))
            acted = np.flatnonzero(context.kinds == Kind.ACTION)
            wanted[start + acted], covered[start + acted] = alone[acted], 1
    np.testing.assert_allclose(scores.reshape(-1), wanted, atol=1e-5)
    np.testing.assert_array_equal(mask.reshape(-1), covered)
    actions = (batch.kind == Kind.ACTION).sum()
    assert facts["teachers/hindsight/coverage"] == pytest.approx(covered.sum() / actions)
    assert batch.hidden["hindsight"].shape == (*mask.shape, 8)


def test_no_advice_means_an_equal_teacher_and_no_divergence() -> None:
    """With nothing inserted, the teacher is the policy: shift and divergence are 0."""
    one = teacher("same", told(encode, lambda e: "", max_tokens=4), max_advice=4, hidden=True)
    batch, facts = one.build(SETTING)(work(), SHAPES.pack(EPISODES))
    assert facts["teachers/same/coverage"] == 0

    def nothing(episodes: Sequence[Episode]) -> Any:
        return [Advice(i, ()) for i, e in enumerate(episodes) if e.valid]

    one = teacher("same", nothing, max_advice=4, hidden=True)
    batch, facts = one.build(SETTING)(work(), SHAPES.pack(EPISODES))
    assert facts["teachers/same/coverage"] == 1
    batch, _ = own_tokens("proximal").build(SETTING)(work(), batch)
    mask = np.asarray(batch.scores["teacher/same/mask"]) > 0
    np.testing.assert_allclose(
        batch.scores["teacher/same"][mask], batch.scores["proximal"][mask], atol=1e-5
    )
    objective = losses.combine(
        jsd=(1.0, losses.divergence("same", "jsd")),
        kl=(1.0, losses.divergence("same", "reverse_kl")),
    )
    update = make_update(CONFIG, objective, adamw(1e-3), temperature=0.8)
    _, metrics = update(create_state(params(), adamw(1e-3)), batch)
    assert abs(float(metrics["jsd/loss"])) < 1e-6 and abs(float(metrics["kl/loss"])) < 1e-5


def test_divergences_are_the_same_whole_or_in_micro_batches() -> None:
    one = teacher("t", group_summary(encode, max_tokens=16), max_advice=16, hidden=True)
    batch, _ = one.build(SETTING)(work(), SHAPES.pack(EPISODES))
    objective = losses.combine(
        jsd=(1.0, losses.divergence("t", "jsd")), kl=(0.5, losses.divergence("t", "forward_kl"))
    )
    found = []
    for cut in (1, 2, 4):
        update = make_update(CONFIG, objective, adamw(1e-3), micro_batches=cut)
        _, metrics = update(create_state(params(), adamw(1e-3)), batch)
        found.append([float(metrics[k]) for k in ("jsd/loss", "kl/loss", "optimizer/grad_norm")])
    assert min(found[0]) > 0
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5, atol=1e-6)


def test_an_external_teacher_brings_its_own_unembedding() -> None:
    given = params(1)
    one = teacher(
        "big", group_summary(encode, max_tokens=16), max_advice=16, params=given, hidden=True
    )
    assert one.unembeddings is not None
    objective = losses.combine(kl=(1.0, losses.divergence("big", "reverse_kl")))
    batch, _ = one.build(SETTING)(work(), SHAPES.pack(EPISODES))
    update = make_update(CONFIG, objective, adamw(1e-3), temperature=0.8)
    values = [
        float(update(create_state(params(), adamw(1e-3)), batch, tables)[1]["kl/loss"])
        for tables in (one.unembeddings, {})
    ]
    assert values[0] > 0 and abs(values[0] - values[1]) > 1e-4
    bare = SHAPES.pack(EPISODES)
    for name in one.scores:
        bare = bare.with_score(name, batch.scores[name])
    with pytest.raises(ValueError, match="hidden states of teacher big"):
        update(create_state(params(), adamw(1e-3)), bare)


def test_the_teacher_is_the_moving_average_or_given_weights() -> None:
    builder = group_summary(encode, max_tokens=16)
    batch = SHAPES.pack(EPISODES)
    average = teacher("t", builder, max_advice=16).build(SETTING)
    state = work(ema=True).state
    moved = work()._replace(state=state.replace(ema=params(1)))  # type: ignore[attr-defined]
    fixed = teacher("t", builder, max_advice=16, params=params(1)).build(SETTING)
    own = teacher("t", builder, max_advice=16).build(SETTING)
    a, b, c = (
        np.asarray(fn(given, batch)[0].scores["teacher/t"])
        for fn, given in ((average, moved), (fixed, work()), (own, work()))
    )
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 1e-3


def test_answers_are_scored_at_every_boundary() -> None:
    first, second = [i for i, e in enumerate(EPISODES) if e.valid][:2]
    answers = {first: [3, 4, 5], second: [6]}

    def answer(episode: Episode) -> list[int] | None:
        return answers.get(next(i for i, e in enumerate(EPISODES) if e is episode))

    for probability in (False, True):
        gold = boundary_answer("gold", answer, max_answer=4, probability=probability, rows=2)
        batch, facts = gold.build(SETTING)(work(), SHAPES.pack(EPISODES))
        found = np.asarray(batch.extras["gold"])
        assert found.shape == (9, 5)
        for index, tokens in answers.items():
            episode = EPISODES[index]
            assert episode.valid
            for turn in range(-1, episode.num_turns):
                context = next(
                    c
                    for c in episode.contexts
                    if turn < 0 or ((c.turn_ids == turn) & (c.kinds == Kind.ACTION)).any()
                )
                if turn < 0:
                    seen = context.tokens[: int((context.kinds == Kind.PROMPT).sum())]
                else:
                    seen = context.tokens[: np.flatnonzero(context.turn_ids == turn)[-1] + 1]
                mean = score_alone(params(), [*seen, *tokens])[-len(tokens) :].mean()
                np.testing.assert_allclose(
                    found[index, turn + 1], np.exp(mean) if probability else mean, atol=1e-5
                )
            assert (found[index, episode.num_turns :] == found[index, episode.num_turns]).all()
        others = [i for i in range(9) if i not in answers]
        assert not found[others].any()
        valid = sum(e.valid for e in EPISODES)
        assert facts["answers/gold/answered"] == pytest.approx(2 / valid)


def make_learner(objective: losses.Objective, passes: Sequence[Pass], **kwargs: Any) -> Learner:
    optimizer = adamw(1e-3)
    return Learner(
        create_state(params(), optimizer, ema=kwargs.pop("ema", False)),
        make_update(CONFIG, objective, optimizer),
        SHAPES,
        CONFIG,
        passes=passes,
        **kwargs,
    )


def all_passes() -> list[Pass]:
    def ids(episodes: Sequence[Episode], count: int, turns: int) -> np.ndarray:
        return np.zeros((count, turns), np.int32)

    return [
        own_tokens("reference", params(1)),
        own_tokens("proximal"),
        teacher("hindsight", group_summary(encode, max_tokens=16), max_advice=16, hidden=True),
        boundary_answer("gold_logprobs", lambda e: [1, 2], max_answer=2),
        fact("state_ids", ids),
        derived(["twice"], lambda batch: {"twice": 2 * batch.scores["reference"]}),
    ]


def test_a_whole_update_with_every_pass_compiles_nothing_after_warm_up() -> None:
    objective = losses.combine(
        policy=(1.0, losses.clipped_policy_gradient(old="proximal")),
        distil=(0.1, losses.divergence("hindsight", "jsd")),
        kl=(0.01, losses.kl_to_reference("k3")),
    )
    pipeline = credit.chain(
        credit.group_relative(), credit.gigpo_state(), credit.teacher_shift("hindsight", 0.1)
    )
    learner = make_learner(objective, all_passes(), credit=pipeline, ema=True)
    learner.warmup()
    count = [0]
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **kw: count.__setitem__(
            0, count[0] + (event == "/jax/core/compile/backend_compile_duration")
        )
    )
    before = jax.tree.map(np.asarray, learner.state.ema)
    # As many blocks for the teacher as it takes, in either batch shape.
    for episodes in (EPISODES, EPISODES[:3], EPISODES[:6], EPISODES):
        metrics = learner.learn(episodes)
    assert count[0] == 0
    assert np.isfinite([float(x) for x in metrics.values()]).all()
    assert metrics["teachers/hindsight/coverage"] > 0
    moved = jax.tree.map(
        lambda a, b: float(np.abs(a - np.asarray(b)).max()), before, learner.state.ema
    )
    assert max(jax.tree.leaves(moved)) > 0


def test_what_no_pass_provides_is_named_when_the_learner_is_built() -> None:
    distil = losses.combine(distil=(1.0, losses.divergence("hindsight", "jsd")))
    with pytest.raises(ValueError, match="hidden state hindsight is needed"):
        make_learner(distil, [])
    plain = losses.combine(policy=(1.0, losses.clipped_policy_gradient()))
    with pytest.raises(ValueError, match="extra state_ids is needed"):
        make_learner(plain, [], credit=credit.chain(credit.group_relative(), credit.gigpo_state()))
    with pytest.raises(ValueError, match="score teacher/x is needed"):
        make_learner(
            plain, [], credit=credit.chain(credit.group_relative(), credit.teacher_shift("x", 1.0))
        )
    kl = losses.combine(kl=(1.0, losses.kl_to_reference("k3")))
    with pytest.raises(ValueError, match="'kl' needs the score reference"):
        make_learner(kl, [])


def test_bad_passes_are_named() -> None:
    long = teacher("t", group_summary(encode, max_tokens=16), max_advice=4).build(SETTING)
    with pytest.raises(ValueError, match="exceeds max_advice=4"):
        long(work(), SHAPES.pack(EPISODES))
    other = own_tokens("teacher/big", params(), model=replace(CONFIG, vocab_size=30))
    with pytest.raises(ValueError, match="must share a vocabulary"):
        other.build(SETTING)
    wrong = derived(["a"], lambda batch: {"b": batch.advantages}).build(SETTING)
    with pytest.raises(ValueError, match="not those declared"):
        wrong(work(), SHAPES.pack(EPISODES))
