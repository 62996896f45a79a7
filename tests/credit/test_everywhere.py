"""What holds of every method: no NaN, no gradient, and no trace of how episodes are packed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import credit
from jaxagent.data.kinds import Kind
from tests.credit.cases import (
    batch_of_turns,
    lay_tokens,
    random_batch,
    run,
    shape_rewards,
    turns_of,
)

BASE = credit.group_relative()
CREDITS = {
    "turn_returns": credit.turn_returns(0.9),
    "turn_returns_group": credit.turn_returns(0.9, "group", "both"),
    "turn_returns_rewards": credit.turn_returns(0.9, "group_rewards"),
    "gae": credit.gae(0.99, 0.95, whiten=True, rewards="turns", bootstrap=True),
    "gigpo": credit.chain(BASE, credit.gigpo_state(scale="mean_std_norm")),
    "position": credit.position_relative(),
    "progress": credit.chain(BASE, credit.progress_redistribution(20.0)),
    "belief": credit.chain(BASE, credit.belief_redistribution("whole")),
    "shift": credit.chain(BASE, credit.teacher_shift("whole", 0.5)),
    "routed": credit.chain(BASE, credit.routed_teacher_shift("whole", "step", 0.5, 0.5)),
    "gated": credit.chain(BASE, credit.gated_difficulty("whole", success=0.5)),
    "roles": credit.chain(BASE, credit.role_shift()),
    "tree": credit.tree_advantage(),
    "window": credit.window_advantage(),
    "imagined": credit.chain(BASE, credit.imagined_advantage()),
}
TRANSFORMS = {
    "information": credit.information_gain(),
    "log_ratio": credit.log_ratio_td(0.9),
    "evidence": credit.evidence_gain(eta=0.5),
    "best": credit.best_so_far(),
    "bonus": credit.batch_bonus(0.5),
}
# Which of them see differences between the tokens or episodes of a group alone.
GROUPED = ("turn_returns_group", "turn_returns_rewards", "position", "tree", "window")


def by_episode(batch: Any, values: np.ndarray, order: int, count: int) -> list[list[float]]:
    """``values`` [R,T] of each episode's ACTION tokens, in the order it happened."""
    turns = turns_of(batch)
    slots = range(count)[::order]
    return [
        [float(values[at]) for tokens in turns.get(slot, {}).values() for at in tokens]
        for slot in slots
    ]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [*CREDITS, *TRANSFORMS])
def test_packing_and_order_do_not_matter(name: str) -> None:
    results = []
    for order, buckets, sizes in (
        (1, (64,), {}),
        (-1, (64,), {}),
        (1, (200,), {"rows": 16, "num_episodes": 20, "max_turns": 11}),
    ):
        batch = random_batch(3, order, buckets, **sizes)
        if name in TRANSFORMS:
            shaped = shape_rewards(TRANSFORMS[name], batch)
            slots = range(13)[::order]
            turns = np.pad(shaped.turn_rewards, ((0, 0), (0, 11)))[:, :11]
            results.append(np.concatenate([turns, shaped.rewards[:, None]], axis=1)[slots])
        else:
            found = run(CREDITS[name], batch)
            results.append(np.concatenate(by_episode(batch, found, order, 13)))
    assert np.abs(results[0]).max() > 0.05
    np.testing.assert_allclose(results[1], results[0], atol=1e-9)
    np.testing.assert_allclose(results[2], results[0], atol=1e-9)


@pytest.mark.parametrize("name", CREDITS)
def test_no_gradient_and_nothing_but_numbers(name: str) -> None:
    """In float32, with NaN and -inf wherever no method may look."""
    batch = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == float else x, random_batch(1))
    names = sorted(batch.scores)

    def total(scores: Any, turn_rewards: Any) -> jax.Array:
        given = batch.replace(scores=scores, turn_rewards=turn_rewards)
        return jnp.sum(credit.assign(CREDITS[name], given)[0].advantages ** 2)

    value, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(
        {key: jnp.asarray(batch.scores[key]) for key in names}, jnp.asarray(batch.turn_rewards)
    )
    assert np.isfinite(float(value)) and float(value) > 0
    for gradient in jax.tree.leaves(gradients):
        assert not np.asarray(gradient).any()
    filled, metrics = credit.assign(CREDITS[name], batch)
    advantages = np.asarray(filled.advantages)
    acts = (batch.kind == Kind.ACTION) & np.append(batch.valid, False)[batch.episode_ids]
    assert np.isfinite(advantages).all() and not advantages[~acts].any()
    assert advantages.dtype == np.float32
    assert all(np.isfinite(float(metric)) for metric in metrics.values())


@pytest.mark.parametrize("name", CREDITS)
@pytest.mark.parametrize("shift", [-100.0, 100.0])
def test_far_teachers_and_values_stay_finite(name: str, shift: float) -> None:
    batch = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == float else x, random_batch(1))
    far = {
        key: value if key.endswith("mask") else value + np.float32(shift)
        for key, value in batch.scores.items()
    }
    assert np.isfinite(run(CREDITS[name], batch.replace(scores=far))).all()


@pytest.mark.parametrize("name", CREDITS)
def test_nobody_to_credit_is_zero(name: str) -> None:
    batch = random_batch(1)
    nobody = batch.replace(valid=np.zeros_like(batch.valid))
    silent = batch.replace(kind=np.where(batch.kind == Kind.ACTION, Kind.TEMPLATE, batch.kind))
    for empty in (nobody, silent):
        found, metrics = credit.assign(CREDITS[name], empty)
        assert not np.asarray(found.advantages).any()
        assert all(np.isfinite(float(metric)) for metric in metrics.values())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_reward_transforms_leave_numbers_alone_where_nothing_is(name: str) -> None:
    for batch in (random_batch(1), random_batch(2)):
        nobody = batch.replace(
            valid=np.zeros_like(batch.valid),
            rewards=batch.rewards * 0,
            turn_rewards=batch.turn_rewards * 0,
        )
        for given in (batch, nobody):
            shaped = shape_rewards(TRANSFORMS[name], given)
            assert np.isfinite(shaped.turn_rewards).all() and np.isfinite(shaped.rewards).all()
            assert not shaped.turn_rewards[~given.valid].any()
            assert not shaped.rewards[~given.valid].any()
            acted = np.zeros(shaped.turn_rewards.shape, bool)
            for e, turns in turns_of(given).items():
                acted[e, list(turns)] = True
            assert name == "bonus" or not shaped.turn_rewards[~acted].any()


@pytest.mark.parametrize("name", GROUPED)
def test_all_fail_groups_and_groups_of_one_get_exactly_zero(name: str) -> None:
    batch = batch_of_turns([[2], [2], [2], [1]], [0.0] * 4, [0, 0, 0, 1], [[0.0]] * 3 + [[0.7]])
    batch = batch.replace(rewards=np.asarray([0, 0, 0, 0.7, 0, 0]))
    for extra in ("node_ids", "window_ids"):
        batch = batch.with_extra(extra, np.asarray([[0], [1], [0], [0], [0], [0]]))
    batch = batch.with_extra("parent_ids", np.full((6, 1), -1))
    # Equal rewards that float32 does not hold exactly.
    for reward in (0.0, 0.1, 1 / 3):
        given = batch.replace(
            rewards=(batch.rewards + reward * (np.arange(6) < 3)).astype(np.float32),
            turn_rewards=(batch.turn_rewards + reward * (np.arange(6) < 3)[:, None]).astype(
                np.float32
            ),
        )
        assert not run(CREDITS[name], given).any()


def test_an_all_fail_group_learns_from_its_teacher_alone() -> None:
    batch = batch_of_turns([[2], [1]], [0.0, 0.0])
    batch = batch.with_score("teacher/x", lay_tokens(batch, [[-1.0, 1.0], [2.0]]))
    found = run(credit.chain(BASE, credit.teacher_shift("x", 0.5)), batch)
    np.testing.assert_allclose(found, lay_tokens(batch, [[-0.5, 0.5], [1.0]], 0.0))
