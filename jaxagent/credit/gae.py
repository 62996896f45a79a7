"""Generalised advantage estimation over the tokens the policy sampled."""

import jax
import jax.numpy as jnp

from jaxagent.credit.base import Credit, CreditMetrics
from jaxagent.credit.turns import RewardSource, check_discount, check_source, rewards_by_turn
from jaxagent.data.batch import Batch, action_mask, token_order
from jaxagent.losses.base import select


def gae(
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = False,
    rewards: RewardSource = "outcome",
    bootstrap: bool = False,
) -> Credit:
    """GAE over ACTION tokens alone; everything between them is skipped, not discounted.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, where
    ``t + 1`` is the next sampled token of the episode, in whichever context it lies, and V is
    ``scores["values"]`` [R,T] (the value before token t). A turn's reward falls on its last
    token; ``rewards``: see :func:`jaxagent.credit.turns.rewards_by_turn`.

    An episode ends with value 0. With ``bootstrap`` truncated ones end with
    ``extras["last_values"]`` [E] instead, the value after their last token, and this stands
    in the place of their outcome, which was never reached. ``whiten`` brings the advantages
    of the batch to mean 0 and variance 1 (as verl always does); a single token gives 0.

    Source: Schulman et al. 2016; verl's ``compute_gae_advantage_return``.
    """
    _check(gamma, lam, rewards)

    def fn(batch: Batch, advantages: jax.Array) -> tuple[jax.Array, CreditMetrics]:
        mask = action_mask(batch)
        values = _estimate(batch, gamma, lam, rewards, bootstrap)
        if whiten:
            count = jnp.sum(mask)
            centred = select(mask, values - jnp.sum(values) / jnp.maximum(count, 1))
            variance = jnp.sum(centred**2) / jnp.maximum(count - 1, 1)
            values = centred * jax.lax.rsqrt(variance + 1e-8)
        return values, {}

    extras = frozenset({"last_values"}) if bootstrap else frozenset()
    return Credit(fn, frozenset({"values"}), extras, "base")


def value_targets(
    batch: Batch,
    gamma: float = 1.0,
    lam: float = 1.0,
    rewards: RewardSource = "outcome",
    bootstrap: bool = False,
) -> jax.Array:
    """[R,T]: ``A_t + V_t`` of :func:`gae` before whitening, for the value loss; 0 off ACTION.

    Reads ``scores["values"]``, the values before the update, and is a constant of the loss.
    """
    _check(gamma, lam, rewards)
    advantages = _estimate(batch, gamma, lam, rewards, bootstrap)
    targets = advantages + jnp.asarray(batch.scores["values"])
    return jax.lax.stop_gradient(select(action_mask(batch), targets))


def _check(gamma: float, lam: float, rewards: str) -> None:
    check_discount("gamma", gamma)
    check_discount("lam", lam)
    check_source(rewards)


def _estimate(
    batch: Batch, gamma: float, lam: float, source: RewardSource, bootstrap: bool
) -> jax.Array:
    """Advantages [R,T], 0 off ACTION."""
    mask = action_mask(batch)
    values = select(mask, jnp.asarray(batch.scores["values"]))
    cut = jnp.asarray(batch.truncated) & bootstrap
    reached: Batch = batch.replace(rewards=jnp.where(cut, 0.0, jnp.asarray(batch.rewards)))  # type: ignore[attr-defined]
    last = jnp.zeros_like(reached.rewards)
    if bootstrap:
        last = jnp.where(cut, jnp.asarray(batch.extras["last_values"]), 0.0)

    # All of the batch's sampled tokens as one line, each episode in the order it happened.
    order = token_order(batch, mask)
    sampled = mask.reshape(-1)[order]
    episode = jnp.where(sampled, jnp.asarray(batch.episode_ids).reshape(-1)[order], -1)
    turn = jnp.asarray(batch.turn_ids).reshape(-1)[order]
    value = values.reshape(-1)[order]
    goes_on = sampled & (episode == _next(episode, -1))
    ends_turn = sampled & ~(goes_on & (turn == _next(turn, -1)))

    reward = jnp.where(ends_turn, rewards_by_turn(reached, source)[episode, turn], 0.0)
    next_value = jnp.where(goes_on, _next(value, 0), jnp.where(sampled, last[episode], 0.0))
    delta = jnp.where(sampled, reward + gamma * next_value - value, 0.0)
    found = _backward(jnp.where(goes_on, gamma * lam, 0.0).astype(delta.dtype), delta)
    return jnp.zeros_like(found).at[order].set(found).reshape(mask.shape)


def _next(values: jax.Array, fill: int) -> jax.Array:
    return jnp.concatenate([values[1:], jnp.full((1,), fill, values.dtype)])


def _backward(factor: jax.Array, delta: jax.Array) -> jax.Array:
    """``A_i = delta_i + factor_i * A_{i+1}`` for all i [N], in log N parallel steps."""

    def join(
        later: tuple[jax.Array, jax.Array], here: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return later[0] * here[0], here[0] * later[1] + here[1]

    _, found = jax.lax.associative_scan(join, (factor[::-1], delta[::-1]))
    return found[::-1]
