"""Trajectory balance, FlowRL, FlowBalance: printed numbers and their properties."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.batch import action_mask, episode_sum
from jaxagent.data.kinds import Kind
from tests.losses.helpers import Case, gradients, value

pytestmark = pytest.mark.usefixtures("x64")

A = Kind.ACTION
NAN = float("nan")


def metric(loss: losses.Loss, outputs: Any, batch: Any, name: str) -> float:
    given = {k: jnp.asarray(v) for k, v in outputs.items()}
    return float(losses.combine(t=(1.0, loss))(given, batch)[1][f"t/{name}"])


def test_printed_numbers_of_trajectory_balance(laid: Callable[..., Any]) -> None:
    case = laid([[A, A], [A]], [1.0, 0.0], [0, 0])
    batch = case.batch.with_score("reference", case.lay([[-0.5, -1.0], [-1.5]], -np.inf))
    outputs = {"logprobs": case.lay([[-0.3, -0.7], [-2.0]], -np.inf)}
    loss = losses.trajectory_balance(0.5)
    assert value(loss, outputs, batch) == pytest.approx(0.25)
    assert metric(loss, outputs, batch, "log_z") == pytest.approx(1.0)
    found = gradients(loss, outputs, batch)["logprobs"]
    np.testing.assert_allclose(found, case.spread([-0.5, 0.5]), atol=1e-12)


@pytest.mark.parametrize("normalised", [False, True])
def test_vectors_of_trajectory_balance(
    laid: Callable[..., Any], vectors: dict[str, Any], normalised: bool
) -> None:
    episodes = vectors["episodes"]
    suffix = "_length_normalised" if normalised else ""
    wanted = vectors["expected"][f"trajectory_balance_beta0.5{suffix}"]
    loss = losses.trajectory_balance(0.5, length_norm=normalised)
    case = laid([[A] * len(e["lp"]) for e in episodes], vectors["reward"], vectors["group"])
    batch = case.batch.with_score("reference", case.lay([e["ref"] for e in episodes]))
    outputs = {"logprobs": case.lay([e["lp"] for e in episodes])}
    assert value(loss, outputs, batch) == pytest.approx(wanted["loss"], abs=1e-7)
    for group in (0, 1):
        members = np.asarray(batch.group_ids) == group
        alone = batch.replace(valid=batch.valid & members)
        found = metric(loss, outputs, alone, "log_z")
        for index in np.flatnonzero(members):
            assert found == pytest.approx(wanted["log_z"][index], abs=1e-6)


def test_vectors_of_flow_balance(laid: Callable[..., Any], vectors: dict[str, Any]) -> None:
    episodes, expected = vectors["episodes"], vectors["expected"]
    case = laid([[A] * len(e["lp"]) for e in episodes], vectors["reward"], vectors["group"])
    batch = (
        case.batch.replace(
            behavior_logprobs=case.lay([e["old"] for e in episodes], -np.inf),
            advantages=case.spread(expected["group_relative_none"]),
        )
        .with_score("reference", case.lay([e["ref"] for e in episodes], -np.inf))
        .with_score("teacher/t", case.lay([e["teacher"] for e in episodes], -np.inf))
    )
    outputs = {"logprobs": case.lay([e["lp"] for e in episodes], -np.inf)}
    loss = losses.flow_balance("t", eta=2.0, guidance=1.0)
    for index, wanted in enumerate(expected["flow_balance_energy_eta2_lambda1"]):
        alone = batch.replace(valid=np.arange(batch.num_episodes) == index)
        assert metric(loss, outputs, alone, "energy") == pytest.approx(wanted, abs=1e-6)


def test_trajectory_balance_gradient_is_that_of_a_live_log_z() -> None:
    """(i): the deviations of a group sum to 0, so stopping log Z's gradient changes nothing."""
    case = Case(0)
    beta, mask = 0.5, action_mask(case.batch)

    def live(logprobs: Any) -> Any:
        gap = jnp.where(mask, logprobs - case.batch.scores["reference"], 0.0)
        some = episode_sum(case.batch, mask.astype(float)) > 0
        xi = jnp.where(some, case.batch.rewards / beta - episode_sum(case.batch, gap), 0.0)
        total = 0.0
        for group in range(3):
            own = some & (case.batch.group_ids == group)
            mean = jnp.sum(jnp.where(own, xi, 0.0)) / jnp.sum(own)
            total += jnp.sum(jnp.where(own, (mean - xi) ** 2, 0.0))
        return total / jnp.sum(some)

    wanted = jax.grad(live)(jnp.asarray(case.outputs["logprobs"]))
    found = gradients(losses.trajectory_balance(beta), case.outputs, case.batch)["logprobs"]
    np.testing.assert_allclose(found, wanted, atol=1e-11)


def test_trajectory_balance_is_reinforce_with_kl_in_the_reward() -> None:
    """(ii): the gradient is that of -(2 / (beta B)) sum (Rk - mean_g Rk) S(log p)."""
    case = Case(1)
    beta, mask = 0.7, np.asarray(action_mask(case.batch))
    gap = np.where(mask, case.outputs["logprobs"] - case.batch.scores["reference"], 0.0)
    shaped, members = {}, {}
    for e in range(case.batch.num_episodes):
        own = mask & (case.batch.episode_ids == e)
        if own.any():
            shaped[e] = case.batch.rewards[e] - beta * gap[own].sum()
            members.setdefault(int(case.batch.group_ids[e]), []).append(e)
    wanted = np.zeros_like(gap)
    for group in members.values():
        mean = np.mean([shaped[e] for e in group])
        for e in group:
            own = mask & (case.batch.episode_ids == e)
            wanted[own] = -2 / (beta * len(shaped)) * (shaped[e] - mean)
    found = gradients(losses.trajectory_balance(beta), case.outputs, case.batch)["logprobs"]
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_trajectory_balance_ignores_a_shift_of_all_rewards() -> None:
    """(iii), and that a group of one learns nothing while one of equal rewards does."""
    case, loss = Case(2), losses.trajectory_balance(0.5)
    shifted = case.batch.replace(rewards=case.batch.rewards + 3.0)
    assert value(loss, case.outputs, shifted) == pytest.approx(
        value(loss, case.outputs, case.batch), rel=1e-12
    )
    e = int(case.batch.episode_ids[action_mask(case.batch)][0])
    alone = case.batch.replace(valid=np.arange(case.batch.num_episodes) == e)
    assert value(loss, case.outputs, alone) == 0.0
    assert not gradients(loss, case.outputs, alone)["logprobs"].any()
    equal = case.batch.replace(rewards=np.ones_like(case.batch.rewards))
    assert gradients(loss, case.outputs, equal)["logprobs"].any()


@pytest.fixture
def flow(laid: Callable[..., Any]) -> Any:
    case = laid([[A, A], [A, A]], [1.0, 0.0], [0, 0])
    batch = case.batch.replace(
        advantages=case.spread([1.0, -1.0]),
        behavior_logprobs=case.lay([[-0.5, -0.6], [-1.1, -0.7]], -np.inf),
    ).with_score("reference", case.lay([[-0.7, -0.5], [-0.6, -1.0]], -np.inf))
    outputs = {
        "logprobs": case.lay([[-0.4, -0.6], [-1.5, -0.5]], np.nan),
        "log_z": case.lay([[0.2, 0.8], [0.5, 0.5]], np.nan),
    }
    return outputs, batch, case


def test_printed_numbers_of_flow_rl(flow: Any) -> None:
    outputs, batch, case = flow
    for beta, wanted in ((15.0, 210.412462), (1.0, 0.7802412)):
        loss = losses.flow_rl(beta, is_clip=None)
        assert value(loss, outputs, batch) == pytest.approx(wanted, abs=1e-6)
    # The clip at 1 +- .2 does not bite here; at 1 +- .05 both weights sit on it.
    assert value(losses.flow_rl(1.0), outputs, batch) == pytest.approx(0.7802412, abs=1e-7)
    assert value(losses.flow_rl(1.0, 0.05), outputs, batch) == pytest.approx(
        (1.05 * 0.16 + 0.95 * 1.69) / 2
    )
    found = gradients(losses.flow_rl(1.0, 0.05), outputs, batch)
    wanted = case.spread([1.05 * -0.4 / 2, 0.95 * 1.3 / 2])
    np.testing.assert_allclose(found["log_z"], wanted, atol=1e-12)
    np.testing.assert_allclose(found["logprobs"], wanted, atol=1e-12)


def test_learned_z_is_the_mean_over_the_episode(flow: Any) -> None:
    outputs, batch, _ = flow
    loss = losses.trajectory_balance_learned_z(2.0)
    # d = .5 + .2 - .5 and .5 - .4 - 0.
    assert value(loss, outputs, batch) == pytest.approx((0.2**2 + 0.1**2) / 2)


def test_printed_numbers_of_flow_balance(laid: Callable[..., Any]) -> None:
    case = laid([[A, A], [A, A]], [1.0, 0.0], [0, 0])
    batch = (
        case.batch.replace(advantages=case.spread([1.0, -1.0]))
        .with_score("reference", case.lay([[-0.6, -0.6], [-0.4, -0.6]]))
        .with_score("teacher/t", case.lay([[0.3, 0.5], [0.6, NAN]], -np.inf))
        .with_score("teacher/t/mask", case.lay([[1, 1], [1, 0]]))
    )
    outputs = {"logprobs": case.lay([[-0.5, -0.5], [-0.5, -0.7]])}
    loss = losses.flow_balance("t", eta=1.0, guidance=0.5)
    assert value(loss, outputs, batch) == pytest.approx(1.3225)
    assert metric(loss, outputs, batch, "log_z") == pytest.approx(-0.05)


def test_flat_groups_are_pulled_to_the_reference_or_skipped() -> None:
    case = Case(0)
    group = per_token_group(case.batch)
    flat = case.batch.replace(advantages=np.where(group == 0, 0.0, case.batch.advantages))
    pull = gradients(losses.flow_balance("t"), case.outputs, flat)["logprobs"]
    skip = losses.flow_balance("t", skip_flat_groups=True)
    skipped = gradients(skip, case.outputs, flat)["logprobs"]
    assert pull[group == 0].any() and not skipped[group == 0].any()
    others = flat.replace(valid=flat.valid & (flat.group_ids != 0))
    assert value(skip, case.outputs, flat) == pytest.approx(
        value(losses.flow_balance("t"), case.outputs, others), rel=1e-12
    )


def per_token_group(batch: Any) -> Any:
    return np.append(batch.group_ids, -1)[batch.episode_ids]


def test_misuse_fails_at_construction() -> None:
    for make, arguments, message in (
        (losses.trajectory_balance, {"beta": 0.0}, "beta must be above 0"),
        (losses.trajectory_balance_learned_z, {"beta": NAN}, "beta must be above 0"),
        (losses.flow_rl, {"beta": -1.0}, "beta must be above 0"),
        (losses.flow_rl, {"is_clip": 0.0}, "is_clip"),
        (losses.flow_rl, {"old": "teacher"}, "old must be"),
        (losses.flow_balance, {"teacher": ""}, "teacher must be a name"),
        (losses.flow_balance, {"teacher": "t", "eta": 0.0}, "eta must be above 0"),
        (losses.flow_balance, {"teacher": "t", "guidance": -1.0}, "guidance"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**arguments)  # type: ignore[operator]
    assert losses.flow_rl(old="proximal").scores == {"reference", "proximal"}
    assert losses.flow_balance("x").scores == {"reference", "teacher/x"}
    assert losses.flow_rl().needs == {"logprobs", "log_z"}
