"""Heads in updates: alignment, cuts, gradients, passes, optimisers, and that each one learns."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxagent import credit, losses
from jaxagent.data.batch import Batch
from jaxagent.data.kinds import Kind
from jaxagent.data.packing import pack, place
from jaxagent.data.synthetic import random_episodes
from jaxagent.episodes.episode import Episode
from jaxagent.models.config import ModelConfig
from jaxagent.models.heads import LOG_Z_HEAD, HeadConfig, add_heads, init_heads
from jaxagent.models.transformer import forward, init
from jaxagent.training import heads as training_heads
from jaxagent.training.checkpoint import Checkpoints
from jaxagent.training.heads import head_outputs, head_pass, make_reader, meter_pass
from jaxagent.training.learner import Learner, Shapes
from jaxagent.training.optimizer import adamw, decay_mask, muon
from jaxagent.training.passes import Pass, Setting, Work, derived
from jaxagent.training.state import create_state
from jaxagent.training.step import make_update

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_size=16,
)
CONFIGS = {
    "values": HeadConfig(),
    "failure": HeadConfig(layers=2, width=6, detach=True),
    "progress": HeadConfig(detach=True),
    "log_z": LOG_Z_HEAD,
}
EPISODES = random_episodes(
    1, groups=3, vocab_size=24, max_contexts=2, max_turns=2, invalid=0.1, truncated=0.3
)
SHAPE: Any = {"num_episodes": 12, "max_turns": 5}
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(lambda g: -0.5 * g, grads), grads),
)


@partial(jax.jit, static_argnums=(0, 1))
def fresh(seed: int, configs: tuple[tuple[str, HeadConfig], ...]) -> Any:
    key = jax.random.key(seed)
    return add_heads(init(key, CONFIG), jax.random.fold_in(key, 1), CONFIG, dict(configs))


@cache
def params(seed: int = 0) -> Any:
    """A policy whose heads say something: fresh ones say 0."""
    found = fresh(seed, tuple(CONFIGS.items()))
    rng = np.random.default_rng(seed)
    shaken = jax.tree.map(
        lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), found["heads"]
    )
    return {**found, "heads": shaken}


def run_pass(one: Pass, batch: Batch, weights: Any, episodes: Sequence[Episode] = ()) -> Batch:
    setting = Setting(CONFIG, batch.tokens.size, 64, batch.num_episodes, batch.num_turns, 1.0, None)
    work = Work(create_state(weights, KEEP), episodes, place(episodes, buckets=(64,)))
    return one.build(setting)(work, batch)[0]


def assign(pipeline: credit.Credit, given: Batch) -> Batch:
    assigned: Batch = jax.jit(lambda b: credit.assign(pipeline, b)[0])(given)
    return assigned


@cache
def batch(rows: int = 8, length: int = 64, order: int = 1) -> Any:
    packed = pack(EPISODES[::order], buckets=(length,), rows=rows, **SHAPE)
    packed = run_pass(head_pass(CONFIGS, ["values", "log_z"]), packed, params(1))
    rng = np.random.default_rng(0)
    packed = packed.with_score("returns", np.asarray(packed.scores["values"]) + 0.5)
    packed = packed.with_score("reference", rng.normal(-2, 0.1, packed.tokens.shape))
    filled = assign(credit.gae(bootstrap=True), packed)
    return jax.tree.map(np.asarray, filled)


OBJECTIVES = {
    "tokens": losses.combine(
        policy=(1.0, losses.clipped_policy_gradient(0.2, 0.28)),
        value=(0.5, losses.value_loss()),
        failure=(0.3, losses.failure_prediction()),
        progress=(0.1, losses.progress_regression()),
    ),
    "episodes": losses.combine(
        flow=(0.1, losses.flow_rl()),
        value=(0.5, losses.value_loss()),
    ),
}


@cache
def gradient(name: str, cut: int = 1) -> tuple[Any, dict[str, float]]:
    update = make_update(
        CONFIG, OBJECTIVES[name], KEEP, micro_batches=cut, outputs=head_outputs(CONFIGS)
    )
    state, metrics = update(create_state(params(), KEEP), batch())
    return state.opt_state, {key: float(value) for key, value in metrics.items()}


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_micro_batches_change_nothing(name: str) -> None:
    assert OBJECTIVES[name].token_local == (name == "tokens")
    whole, wanted = gradient(name)
    found, metrics = gradient(name, 4)
    used = {"values", "failure", "progress"} if name == "tokens" else {"values", "log_z"}
    for head, leaves in whole["heads"].items():
        assert any(x.any() for x in jax.tree.leaves(leaves)) == (head in used)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * largest)
    assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def by_token(packed: Batch, values: Any) -> dict[tuple[int, int, int], list[float]]:
    """(episode, turn, kind) -> its tokens' values, whatever the packing."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for row, column in zip(*np.nonzero(packed.segment_ids), strict=True):
        key = tuple(int(x[row, column]) for x in (packed.episode_ids, packed.turn_ids, packed.kind))
        found.setdefault(key, []).append(float(values[row, column]))  # type: ignore[arg-type]
    return found


def test_packing_changes_nothing_and_each_context_is_read_alone() -> None:
    read = make_reader(CONFIG, CONFIGS)
    packed = batch()
    found, ends = read(params(), packed)
    other = pack(EPISODES, buckets=(128,), rows=4, **SHAPE)
    elsewhere, other_ends = read(params(), other)
    for name in CONFIGS:
        # Prompts of several contexts of an episode have one key, in the order of packing.
        one, two = by_token(packed, found[name]), by_token(other, elsewhere[name])
        assert one.keys() == two.keys()
        for key, values in one.items():
            np.testing.assert_allclose(sorted(values), sorted(two[key]), atol=1e-5)
    assert ends.keys() == {"values", "failure", "progress"}
    for name, values in ends.items():
        np.testing.assert_allclose(values, other_ends[name], atol=1e-5)

    @jax.jit
    def states(tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(64)[None]
        return forward(params(), CONFIG, tokens[None], positions, jnp.ones((1, 64), jnp.int32))[0]

    def alone(tokens: Any) -> Any:
        hidden = np.asarray(states(np.pad(tokens, (0, 64 - len(tokens)))))[0]
        out = jax.device_get(params()["heads"]["values"]["out"])
        return (hidden @ out["weight"] + out["bias"])[:, 0]

    # By hand: the state before the token, in the context alone.
    for index, episode in enumerate(EPISODES):
        if not episode.valid:
            continue
        context = episode.contexts[-1]
        raw = alone(context.tokens)
        last = int(context.turn_ids.max())
        where = np.flatnonzero((context.turn_ids == last) & (context.kinds == Kind.ACTION))
        key = (index, last, int(Kind.ACTION))
        np.testing.assert_allclose(
            by_token(packed, found["values"])[key], raw[where - 1], atol=1e-5
        )
        assert float(ends["values"][index]) == pytest.approx(raw[len(context) - 1], abs=1e-5)
        assert len({round(z, 4) for z in by_token(packed, found["log_z"])[key]}) == 1


def test_detached_heads_leave_the_policy_alone() -> None:
    def backbone(config: HeadConfig, loss: losses.Loss, name: str) -> bool:
        outputs = head_outputs({name: config})
        objective = losses.combine(only=(1.0, loss))

        def value(weights: Any) -> jax.Array:
            packed = batch()
            hidden, _ = forward(
                weights, CONFIG, packed.tokens, packed.positions, packed.segment_ids
            )
            given = {name: outputs[name](weights, hidden, packed)}
            given["logprobs"] = jnp.zeros(packed.tokens.shape)
            return objective(given, packed)[0]

        slope = jax.jit(jax.grad(value))(params())
        assert any(x.any() for x in jax.tree.leaves(slope["heads"][name]))
        return any(bool(x.any()) for x in jax.tree.leaves({**slope, "heads": {}}))

    assert backbone(HeadConfig(), losses.value_loss(), "values")
    assert not backbone(HeadConfig(detach=True), losses.value_loss(), "values")
    balance = losses.trajectory_balance_learned_z(0.5)
    assert backbone(LOG_Z_HEAD, balance, "log_z")
    assert not backbone(replace(LOG_Z_HEAD, detach=True), balance, "log_z")


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_gradients_equal_finite_differences(name: str, x64: None) -> None:
    packed = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, batch())
    rng = np.random.default_rng(5)
    hidden = jnp.asarray(rng.normal(size=(*packed.tokens.shape, 8)))
    output = head_outputs(CONFIGS)[name]
    loss = {
        "values": losses.value_loss(),
        "failure": losses.failure_prediction(),
        "progress": losses.progress_regression(),
        "log_z": losses.flow_rl(),
    }[name]
    objective = losses.combine(only=(1.0, loss))
    head = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params()["heads"][name])
    leaves, tree = jax.tree.flatten(head)
    sizes = [leaf.size for leaf in leaves]

    @jax.jit
    def value(flat: jax.Array) -> jax.Array:
        parts = jnp.split(flat, np.cumsum(sizes)[:-1])
        shaped = [p.reshape(leaf.shape) for p, leaf in zip(parts, leaves, strict=True)]
        weights = {"heads": {name: jax.tree.unflatten(tree, shaped)}}
        given = {
            name: output(weights, hidden, packed),
            "logprobs": jnp.asarray(packed.behavior_logprobs) + 0.05,
        }
        return objective(given, packed)[0]

    flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
    found = np.asarray(jax.grad(value)(flat))
    assert found.any()
    step = 1e-6
    chosen = rng.choice(flat.size, min(flat.size, 12), replace=False)
    for index in chosen:
        shift = jnp.zeros_like(flat).at[index].set(step)
        slope = (value(flat + shift) - value(flat - shift)) / (2 * step)
        assert found[index] == pytest.approx(float(slope), rel=1e-5, abs=1e-8)


def test_head_pass_gives_scores_and_last_values_and_compiles_once_a_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = []
    monkeypatch.setattr(training_heads, "forward", lambda *args: traced.append(1) or forward(*args))
    one = head_pass(CONFIGS, ["values", "log_z"])
    assert one.scores == {"values", "log_z"} and one.extras == {"last_values"}
    setting = Setting(CONFIG, 512, 64, 12, 5, 1.0, None)
    fn = one.build(setting)
    state = create_state(params(), KEEP)
    packed = pack(EPISODES, buckets=(64,), rows=8, **SHAPE)
    work = Work(state, EPISODES, place(EPISODES, buckets=(64,)))
    first, facts = fn(work, packed)
    again, _ = fn(work, first)  # the scores it has already make for no new program
    assert len(traced) == 1 and facts == {}
    assert set(first.scores) == one.scores and set(first.extras) == one.extras
    assert first.scores["values"].dtype == jnp.float32
    assert first.extras["last_values"].shape == (12,)
    np.testing.assert_array_equal(first.scores["values"], again.scores["values"])
    fn(work, pack(EPISODES, buckets=(64,), rows=12, **SHAPE))
    assert len(traced) == 2
    with pytest.raises(ValueError, match="got other"):
        head_pass(CONFIGS, ["other"])
    with pytest.raises(ValueError, match="got none"):
        head_pass(CONFIGS, [])
    with pytest.raises(ValueError, match="no head 'values'"):
        run_pass(head_pass(CONFIGS, ["values"]), packed, init(jax.random.key(0), CONFIG))


def test_the_meter_is_read_where_turns_meet() -> None:
    packed = pack(EPISODES, buckets=(64,), rows=8, **SHAPE)
    found = np.asarray(run_pass(meter_pass(), packed, params()).extras["meter"])
    at, ends = make_reader(CONFIG, {"progress": CONFIGS["progress"]})(params(), packed)
    values, last = np.asarray(at["progress"]), np.asarray(ends["progress"])

    def to_go(value: float) -> float:
        return 1 + np.expm1(np.clip(value, 0, 20))

    assert any(e.truncated and e.valid for e in EPISODES)
    assert found.shape == (12, 6) and len(np.unique(found)) > 10
    for index in range(12):
        wanted = np.zeros(6)
        if index < len(EPISODES) and EPISODES[index].valid:
            episode = EPISODES[index]
            wanted[:] = to_go(last[index]) if episode.truncated else 0.0
            for turn in range(episode.num_turns):
                rows, columns = np.nonzero(
                    (packed.episode_ids == index)
                    & (packed.turn_ids == turn)
                    & (packed.kind == Kind.ACTION)
                )
                wanted[turn] = to_go(values[rows[0], columns.min()])
        np.testing.assert_allclose(found[index], wanted, rtol=1e-5)
    # Frozen weights are those given, whatever the state's are.
    frozen = run_pass(meter_pass(params=params(1)), packed, params()).extras["meter"]
    theirs = run_pass(meter_pass(), packed, params(1)).extras["meter"]
    np.testing.assert_array_equal(frozen, theirs)
    assert not np.allclose(frozen, found)
    # Credit can use it, and untrained heads that say absurd things do not overflow.
    wild = {**params(), "heads": jax.tree.map(lambda x: 1e4 * x, params()["heads"])}
    metered = run_pass(meter_pass(), packed, wild)
    chain = credit.chain(credit.group_relative(), credit.progress_redistribution(50.0))
    assigned = assign(chain, metered)
    assert np.isfinite(assigned.advantages).all() and np.asarray(assigned.advantages).any()


def test_turns_without_an_action_have_what_the_next_one_begins_with() -> None:
    episode = random_episodes(2, groups=1, group_size=1, vocab_size=24, max_turns=3)[0]
    context = episode.contexts[0]
    skipped = replace(
        episode, contexts=(replace(context, turn_ids=np.where(
            context.turn_ids >= 1, context.turn_ids + 1, context.turn_ids
        )),), turn_rewards=()
    )  # fmt: skip
    assert episode.num_turns >= 2
    shape: Any = {"buckets": (64,), "rows": 1, "num_episodes": 1, "max_turns": 5}
    plain, gap = (
        np.asarray(run_pass(meter_pass(), pack([e], **shape), params()).extras["meter"])[0]
        for e in (episode, skipped)
    )
    np.testing.assert_allclose(gap, [plain[0], plain[1], *plain[1:5]])


def fixed_outcomes() -> list[Episode]:
    """Episodes whose tokens all say how they end."""
    found = []
    for index, episode in enumerate(random_episodes(7, groups=4, vocab_size=24, max_turns=2)):
        context, good = episode.contexts[0], index % 2
        marked = replace(context, tokens=context.tokens % 10 + 10 * good)
        found.append(replace(episode, contexts=(marked,), reward=float(good)))
    return found


SHAPES = Shapes(row_length=64, rows=(8,), episodes=12, turns=4)


def learner(
    objective: Any,
    configs: dict[str, HeadConfig],
    passes: Sequence[Pass] = (),
    pipeline: credit.Credit | None = None,
) -> Learner:
    start = fresh(0, tuple(configs.items()))
    optimizer = adamw(0.02)
    update = make_update(CONFIG, objective, optimizer, outputs=head_outputs(configs))
    state = create_state(start, optimizer)
    return Learner(state, update, SHAPES, CONFIG, credit=pipeline, passes=passes)


def history(learning: Learner, name: str, updates: int = 20) -> list[float]:
    metrics = [learning.learn(fixed_outcomes())[name] for _ in range(updates)]
    assert learning.compilations == 1
    return [float(m) for m in metrics]


def test_ppo_with_a_critic_learns_values() -> None:
    configs = {"values": HeadConfig()}
    objective = losses.combine(
        policy=(0.1, losses.clipped_policy_gradient(0.2, 0.2)),
        value=(0.5, losses.value_loss()),
    )
    returns = derived(["returns"], lambda given: {"returns": credit.value_targets(given)})
    learning = learner(
        objective, configs, [head_pass(configs, ["values"]), returns], credit.gae(whiten=True)
    )
    found = history(learning, "value/loss")
    # Returns are 0 or 1 with lambda 1: half of their square at first, then what is left.
    assert found[0] == pytest.approx(0.25, abs=0.05)
    assert found[-1] < 0.3 * found[0]
    with pytest.raises(ValueError, match="score values"):
        learner(objective, configs, [returns], credit.gae())


def test_flow_losses_learn_log_z() -> None:
    configs = {"log_z": LOG_Z_HEAD}

    def reference(given: Batch) -> dict[str, jax.Array]:
        return {"reference": jnp.asarray(given.behavior_logprobs) * 0 - 3.178}

    passes = [derived(["reference"], reference)]
    balance = losses.combine(only=(0.05, losses.trajectory_balance_learned_z(0.5)))
    found = history(learner(balance, configs, passes), "only/loss")
    assert found[-1] < 0.3 * found[0]
    flow = losses.combine(only=(0.05, losses.flow_rl(beta=1.0)))
    pipeline = credit.group_relative()
    learning = learner(flow, configs, passes, pipeline)
    found = history(learning, "only/loss")
    assert found[-1] < 0.9 * found[0]
    assert jax.tree.leaves(learning.state.params["heads"])[0].any()


def test_the_monitor_learns_who_fails() -> None:
    configs = {"failure": HeadConfig(layers=2, detach=True)}
    learning = learner(losses.combine(only=(1.0, losses.failure_prediction())), configs)
    found = history(learning, "only/accuracy", 30)
    assert found[-1] > 0.9
    # At run time: the scores of every turn, against a threshold from the successes.
    episodes = fixed_outcomes()
    packed = SHAPES.pack(episodes)
    at, _ = make_reader(CONFIG, configs)(learning.state.params, packed)
    scores = np.asarray(credit.failure_scores(packed, at["failure"]))
    good = np.asarray(packed.rewards) > 0
    threshold = credit.stop_threshold(scores.max(axis=1)[good], 0.1)
    halted = [credit.should_stop(run.tolist(), threshold) for run in scores]
    assert np.mean(np.asarray(halted)[good]) <= 0.1
    assert np.mean(np.asarray(halted)[~good]) > 0.5


def test_the_meter_learns_progress() -> None:
    configs = {"progress": HeadConfig()}
    learning = learner(losses.combine(only=(1.0, losses.progress_regression())), configs)
    found = history(learning, "only/loss")
    assert found[-1] < 0.3 * found[0]


def test_heads_are_on_adams_side_of_every_optimizer() -> None:
    given = params()
    mask = decay_mask(given)["heads"]
    assert mask["values"] == {"out": {"weight": True, "bias": False}}
    assert mask["failure"]["linear_0"] == {"weight": True, "bias": False}
    assert mask["log_z"]["norm_1"] == {"scale": False, "bias": False}
    given = {"layers": {"q": given["layers"]["q"]}, "heads": given["heads"]}
    slopes = jax.tree.map(lambda x: jnp.cos(3.0 * x + 1.0), given)

    @jax.jit
    def changes(own: float, adam: float) -> Any:
        # Schedules, so that one program serves all rates.
        optimizer = muon(lambda _: own, adam_learning_rate=lambda _: adam, max_grad_norm=None)
        return optimizer.update(slopes, optimizer.init(given), given)[0]

    base, faster, other = changes(0.1, 0.01), changes(0.2, 0.01), changes(0.1, 0.03)
    jax.tree.map(np.testing.assert_array_equal, base["heads"], faster["heads"])
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(3 * one, two, rtol=1e-5),
        base["heads"],
        other["heads"],
    )
    np.testing.assert_allclose(2 * base["layers"]["q"], faster["layers"]["q"], rtol=1e-5)


def test_heads_are_in_checkpoints(tmp_path: Path) -> None:
    optimizer = adamw(0.1)
    state = create_state(params(), optimizer, ema=True)
    assert state.ema is not None
    jax.tree.map(np.testing.assert_array_equal, state.ema["heads"], params()["heads"])
    with Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(state)
        template = create_state(params(1), optimizer, ema=True)
        restored, _ = checkpoints.restore(template)
        jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
        bare = create_state(init(jax.random.key(0), CONFIG), optimizer, ema=True)
        with pytest.raises(ValueError, match=r"does not fit this run: .*heads"):
            checkpoints.restore(bare)


def test_bfloat16_trains_heads_too() -> None:
    config = replace(CONFIG, compute_dtype="bfloat16")
    update = make_update(config, OBJECTIVES["tokens"], KEEP, outputs=head_outputs(CONFIGS))
    state, metrics = update(create_state(params(), KEEP), batch())
    whole, wanted = gradient("tokens")
    for name in ("value/loss", "failure/loss", "progress/loss"):
        assert float(metrics[name]) == pytest.approx(wanted[name], rel=0.05)
    found, exact = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(g["heads"])])
        for g in (state.opt_state, whole)
    )
    assert found.dtype == np.float32
    assert np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)


@pytest.mark.timeout(600)
def test_eight_devices_give_the_gradient_and_scores_of_one() -> None:
    child = Path(__file__).with_name("heads_child.py")
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, str(child)], capture_output=True, text=True, timeout=580, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["devices"] == 8
    assert report["gradient"] < 1e-5 and report["params"] < 1e-5
    assert report["programs"] == 1
    assert report["replicated"]
    assert report["scores"] < 1e-5 and report["meter"] < 1e-5


def test_heads_of_one_key_differ_by_name() -> None:
    drawn = init_heads(jax.random.key(0), CONFIG, {"a": LOG_Z_HEAD, "b": LOG_Z_HEAD})
    assert not np.allclose(drawn["a"]["linear_0"]["weight"], drawn["b"]["linear_0"]["weight"])
