"""The update: one gradient however the batch is cut, packed or padded; donation; compilations."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxagent import credit, losses
from jaxagent.data.batch import action_mask, episode_sum
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes
from jaxagent.episodes.episode import Context, Episode
from jaxagent.losses.base import Objective
from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import shifted_logprobs
from jaxagent.models.transformer import init
from jaxagent.training.state import create_state, snapshot
from jaxagent.training.step import make_scorer, make_update

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
EPISODES = random_episodes(1, groups=3, vocab_size=24, max_contexts=2, invalid=0.1, max_turns=2)
# Gradient descent that keeps the last gradient as its state.
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(lambda g: -0.5 * g, grads), grads),
)


def balance(outputs: Any, batch: Any) -> Any:
    """Squares a sum over the episode: not local to tokens, nor to rows."""
    logprobs = losses.select(action_mask(batch), outputs["logprobs"])
    gap = jnp.where(batch.valid, episode_sum(batch, logprobs) - batch.rewards, 0.0)
    return jnp.sum((gap - jnp.mean(gap)) ** 2), jnp.sum(batch.valid), {}


TERMS: dict[str, Any] = {
    "policy": (1.0, losses.clipped_policy_gradient(0.2, 0.28, aggregate="episode")),
    "world": (0.05, losses.observation_prediction()),
    "kl": (0.1, losses.kl_to_reference("k3")),
    "bonus": (0.01, losses.entropy_bonus()),
}
OBJECTIVES: dict[str, Objective] = {
    "local": losses.combine(**TERMS),
    "balance": losses.combine(
        **TERMS,
        balance=(0.01, balance),
        gspo=(0.5, losses.gspo(0.1, 0.1)),
        flow=(0.01, losses.trajectory_balance(0.5)),
        weighed=(
            0.5,
            losses.corrected(
                losses.reinforce(), losses.truncated_importance(level="sequence", normalise=True)
            ),
        ),
    ),
}
SCORE = make_scorer(CONFIG)


@cache
def params() -> Any:
    return init(jax.random.key(0), CONFIG)


@cache
def batch(rows: int = 8, length: int = 64, order: int = 1) -> Any:
    packed = pack(EPISODES[::order], buckets=(length,), rows=rows, num_episodes=12, max_turns=4)
    packed = packed.with_score("reference", SCORE(init(jax.random.key(1), CONFIG), packed))
    filled, _ = credit.assign(credit.group_relative(), packed)
    return jax.tree.map(np.asarray, filled)


@cache
def update(name: str, micro_batches: int = 1) -> Any:
    return make_update(CONFIG, OBJECTIVES[name], KEEP, micro_batches=micro_batches)


@cache
def gradient(name: str, micro_batches: int = 1, **shape: int) -> tuple[Any, dict[str, float]]:
    state, metrics = update(name, micro_batches)(create_state(params(), KEEP), batch(**shape))
    return state.opt_state, {key: float(value) for key, value in metrics.items()}


def close(found: Any, wanted: Any, scale: float = 1e-5) -> None:
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted))
    assert largest > 0
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=scale * largest)


@pytest.mark.parametrize(("name", "cut"), [("local", 4), ("balance", 4)])
def test_micro_batches_change_nothing(name: str, cut: int) -> None:
    whole, wanted = gradient(name)
    found, metrics = gradient(name, cut)
    close(found, whole, 2e-6)
    assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_packing_padding_and_order_change_nothing() -> None:
    whole, _ = gradient("balance")
    close(gradient("balance", rows=4, length=128)[0], whole)
    close(gradient("balance", rows=4, length=128, order=-1)[0], whole)


def test_gradient_is_that_of_each_context_alone() -> None:
    """No packing at all: one context a row, laid back into the batch for the losses."""
    packed = batch()
    spots = [
        (row, np.flatnonzero(packed.segment_ids[row] == segment))
        for row in range(packed.num_rows)
        for segment in range(1, packed.segment_ids[row].max() + 1)
    ]
    assert len(spots) > packed.num_rows
    tokens = np.zeros((len(spots), packed.row_length), np.int32)
    for index, (row, where) in enumerate(spots):
        tokens[index, : len(where)] = packed.tokens[row, where]
    segments = np.stack([np.arange(packed.row_length) < len(w) for _, w in spots]).astype(np.int32)
    positions = np.broadcast_to(np.arange(packed.row_length, dtype=np.int32), tokens.shape)
    rows = np.concatenate([np.full_like(where, row) for row, where in spots])
    columns = np.concatenate([where for _, where in spots])
    inputs = [jnp.asarray(x) for x in (tokens, positions, segments)]

    def alone(weights: Any) -> Any:
        found = shifted_logprobs(weights, CONFIG, *inputs, entropy=True)
        assert found.entropy is not None
        laid = {
            name: jnp.zeros(packed.tokens.shape).at[rows, columns].set(value[segments > 0])
            for name, value in (("logprobs", found.logprobs), ("entropy", found.entropy))
        }
        return OBJECTIVES["balance"](laid, packed)[0]

    close(gradient("balance")[0], jax.jit(jax.grad(alone))(params()))


def test_denominators_are_those_of_the_whole_batch() -> None:
    """Micro-batches with losses [1,1,1,1] and [3]: 1.4, not the 2 of averaged means."""
    contexts = [_fixed_context([1.0] * 4), _fixed_context([3.0])]
    packed = pack([Episode("t", "g", (c,), 0.0) for c in contexts], buckets=(5,))
    assert packed.num_rows == 2

    def recorded(outputs: Any, batch: Any) -> Any:
        mask = action_mask(batch)
        return jnp.sum(losses.select(mask, outputs["recorded"])), jnp.sum(mask), {}

    loss = losses.Loss(frozenset({"recorded"}), frozenset(), recorded, token_local=True)
    step = make_update(
        CONFIG,
        losses.combine(recorded=(1.0, loss)),
        KEEP,
        micro_batches=2,
        outputs={"recorded": lambda params, hidden, rows: rows.behavior_logprobs},
    )
    _, metrics = step(create_state(params(), KEEP), packed)
    assert float(metrics["loss"]) == pytest.approx(1.4)


def test_donation_never_reaches_the_reference_or_a_snapshot() -> None:
    mine = init(jax.random.key(3), CONFIG)
    before = jax.tree.map(lambda x: np.array(x, copy=True), mine)
    state = create_state(mine, KEEP)
    published = snapshot(state.params)
    old = state
    for _ in range(2):
        state, _ = update("local")(state, batch())
    assert all(x.is_deleted() for x in jax.tree.leaves(old.params))
    jax.tree.map(np.testing.assert_array_equal, mine, before)
    jax.tree.map(np.testing.assert_array_equal, published, before)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), state.params, before)
    assert max(jax.tree.leaves(moved)) > 1e-4
    assert int(state.step) == 2


def test_steady_state_compiles_nothing(compiled: list[str]) -> None:
    step, state = update("local"), create_state(params(), KEEP)
    assign = jax.jit(lambda b: credit.assign(credit.group_relative(), b))
    state = cycle(step, state, assign)
    assert compiled  # the listener works: assign at least was new
    programs = step.compilations
    compiled.clear()
    for _ in range(3):
        state = cycle(step, state, assign)
    assert compiled == []
    assert step.compilations == programs


def cycle(step: Any, state: Any, assign: Any) -> Any:
    packed = pack(EPISODES, buckets=(64,), rows=8, num_episodes=12, max_turns=4)
    packed = packed.with_score("reference", SCORE(params(), packed))
    filled, _ = assign(packed)
    state, _ = step(state, filled)
    snapshot(state.params)
    return state


def test_scorer_agrees_with_the_model_and_compiles_once_a_shape() -> None:
    score, cut = make_scorer(CONFIG), make_scorer(CONFIG, micro_batches=4, temperature=0.7)
    packed = batch()
    rows = packed.tokens, packed.positions, packed.segment_ids
    plain = shifted_logprobs(params(), CONFIG, *rows).logprobs
    warm = shifted_logprobs(params(), CONFIG, *rows, temperature=0.7).logprobs
    np.testing.assert_allclose(score(params(), packed), plain, atol=1e-6)
    np.testing.assert_allclose(cut(params(), packed), warm, atol=1e-6)
    assert not np.allclose(plain, warm)


def test_the_gap_to_the_sampler_is_measured_on_its_own_version_only() -> None:
    packed = batch()
    actions = packed.kind == Kind.ACTION
    logprobs = np.where(actions, np.asarray(SCORE(params(), packed)), 0.0)
    fresh = packed.replace(
        behavior_logprobs=logprobs, policy_versions=np.where(actions, 0, -1).astype(np.int32)
    )
    state, metrics = update("local")(create_state(params(), KEEP), fresh)
    assert float(metrics["rollout/current_tokens"]) == float(metrics["batch/action_tokens"]) > 0
    assert float(metrics["rollout/logprob_gap_max"]) < 1e-5
    assert float(metrics["policy/ratio_mean"]) == pytest.approx(1.0, abs=1e-5)
    off = fresh.replace(behavior_logprobs=np.where(actions, logprobs - 0.25, 0.0))
    state, metrics = update("local")(create_state(params(), KEEP), off)
    assert float(metrics["rollout/logprob_gap_mean"]) == pytest.approx(0.25, abs=1e-5)
    _, metrics = update("local")(state, off)
    assert float(metrics["rollout/current_tokens"]) == 0
    assert float(metrics["rollout/logprob_gap_max"]) == 0
    assert float(metrics["rollout/staleness_mean"]) == 1


def test_an_all_padding_batch_does_no_harm() -> None:
    empty = pack([], buckets=(64,), rows=8, num_episodes=12, max_turns=4)
    empty = empty.with_score("reference", np.zeros(empty.tokens.shape, np.float32))
    state, metrics = update("local")(create_state(params(), KEEP), empty)
    assert all(np.isfinite(float(value)) for value in metrics.values())
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.opt_state))


def test_only_what_is_needed_is_computed_and_the_rest_is_an_error() -> None:
    seen: list[frozenset[str]] = []

    def spy(outputs: Any, batch: Any) -> Any:
        seen.append(frozenset(outputs))
        return jnp.sum(outputs["logprobs"]), jnp.asarray(1.0), {}

    jax.eval_shape(
        make_update(CONFIG, losses.combine(spy=(1.0, spy)), KEEP)._step,
        create_state(params(), KEEP),
        batch(),
        {},
    )
    assert set(seen) == {frozenset({"logprobs"})}

    values = losses.Loss(frozenset({"values"}), frozenset(), spy)
    with pytest.raises(ValueError, match="term 'critic' needs the output values"):
        make_update(CONFIG, losses.combine(critic=(1.0, values)), KEEP)
    with pytest.raises(ValueError, match="term 'kl' needs the score reference"):
        make_update(CONFIG, OBJECTIVES["local"], KEEP, scores=frozenset({"proximal"}))
    with pytest.raises(ValueError, match="term 'kl' needs the score reference"):
        update("local")(create_state(params(), KEEP), batch().replace(scores={}))
    with pytest.raises(ValueError, match="rows_multiple=3"):
        make_update(CONFIG, OBJECTIVES["local"], KEEP, micro_batches=3)(
            create_state(params(), KEEP), batch()
        )
    with pytest.raises(ValueError, match="micro_batches"):
        make_update(CONFIG, OBJECTIVES["local"], KEEP, micro_batches=0)


@pytest.fixture
def compiled() -> Any:
    """Names of the programs that XLA compiles during the test."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(str(kwargs.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def _fixed_context(values: list[float]) -> Context:
    size = len(values) + 1
    return Context(
        tokens=np.zeros(size, np.int32),
        kinds=np.asarray([Kind.PROMPT] + [Kind.ACTION] * len(values), np.uint8),
        turn_ids=np.asarray([-1] + [0] * len(values), np.int32),
        logprobs=np.asarray([0.0, *values], np.float32),
        versions=np.zeros(size, np.int32),
    )


def test_a_gradient_that_is_not_finite_costs_nothing() -> None:
    def breaks_at_1(outputs: Any, batch: Any) -> Any:
        total = jnp.sum(losses.select(action_mask(batch), outputs["logprobs"]))
        return total * jnp.where(outputs["step"] == 1, jnp.nan, 1.0), jnp.asarray(1.0), {}

    needs = frozenset({"logprobs", "step"})
    objective = losses.combine(only=(1.0, losses.Loss(needs, frozenset(), breaks_at_1)))
    optimizer = optax.adam(0.01)
    update = make_update(CONFIG, objective, optimizer)
    batch = pack(EPISODES, buckets=(64,))
    state, metrics = update(create_state(snapshot(params()), optimizer), batch)
    assert float(metrics["optimizer/skipped"]) == 0
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    state, metrics = update(state, batch)
    assert float(metrics["optimizer/skipped"]) == 1
    assert int(state.step) == 2
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    state, metrics = update(state, batch)
    assert float(metrics["optimizer/skipped"]) == 0
    assert float(metrics["optimizer/update_norm"]) > 0
