"""Heads beside the policy: a critic of tokens, a monitor of failure, a meter of progress."""

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, action_mask, per_token, token_order
from jaxagent.losses.base import Aggregate, Loss, Metrics, Outputs, select, token_loss


def value_loss(
    clip: float | None = 0.2,
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """``max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2`` on ACTION tokens.

    V is ``outputs["values"]``, G ``scores["returns"]`` and V_old ``scores["values"]``, what
    the critic said when the advantages were computed. ``clip=None`` is the plain square and
    needs no V_old. Source: verl's ``compute_value_loss``; Schulman et al. 2017.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0 (or None), got {clip}")

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch)
        values = select(mask, outputs["values"])
        returns = select(mask, jax.lax.stop_gradient(jnp.asarray(batch.scores["returns"])))
        losses = (values - returns) ** 2
        metrics = {"value_mean": (jnp.sum(values), jnp.sum(mask))}
        if clip is not None:
            old = select(mask, jax.lax.stop_gradient(jnp.asarray(batch.scores["values"])))
            bounded = (jnp.clip(values, old - clip, old + clip) - returns) ** 2
            metrics["clip_fraction"] = (jnp.sum(mask & (bounded > losses)), jnp.sum(mask))
            losses = jnp.maximum(losses, bounded)
        return 0.5 * losses, mask, metrics

    scores = frozenset({"returns"} if clip is None else {"returns", "values"})
    needs = frozenset({"values"})
    return token_loss(fn, aggregate, constant, episode_mean, needs=needs, scores=scores)


def failure_prediction(
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """Binary cross-entropy of ``outputs["failure"]`` (logits [R,T]) on ACTION tokens. Derived.

    The label of every token is how its episode ended: 1 where the reward is not above 0.
    Invalid episodes have no label and take no part. At run time a turn's score is what the
    monitor says at its last token; stopped episodes must not be scored as failures.

    Derived from the abstract of StopLoss; no reproduction is claimed.
    """

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch)
        logits = select(mask, outputs["failure"])
        failed = per_token(batch, jnp.asarray(batch.rewards) <= 0)
        right = mask & ((logits > 0) == failed)
        losses = jax.nn.softplus(jnp.where(failed, -logits, logits))
        return select(mask, losses), mask, {"accuracy": (jnp.sum(right), jnp.sum(mask))}

    needs = frozenset({"failure"})
    return token_loss(fn, aggregate, constant, episode_mean, needs=needs)


def progress_regression(
    aggregate: Aggregate = "token",
    constant: float | None = None,
    episode_mean: bool | None = None,
) -> Loss:
    """``(outputs["progress"] - log(1 + tokens to completion))^2`` on ACTION tokens. Derived.

    Counted are the ACTION tokens of the episode after the token itself: the rest of its turn
    and all later turns, whatever context they lie in. Truncated episodes never completed and
    take no part, nor do invalid ones.

    Derived from the abstract of DeltaTTG (training of its meter); no reproduction is claimed.
    """

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = action_mask(batch) & ~per_token(batch, jnp.asarray(batch.truncated))
        predicted = select(mask, outputs["progress"])
        target = jnp.log1p(_tokens_after(batch).astype(predicted.dtype))
        losses = select(mask, (predicted - target) ** 2)
        return losses, mask, {"tokens": jnp.sum(mask)}

    needs = frozenset({"progress"})
    return token_loss(fn, aggregate, constant, episode_mean, needs=needs)


def _tokens_after(batch: Batch) -> jax.Array:
    """[R,T]: ACTION tokens of the episode that were sampled after this one; 0 off ACTION."""
    mask = action_mask(batch)
    episodes = jnp.asarray(batch.episode_ids).reshape(-1)
    order = token_order(batch, mask)
    sampled = mask.reshape(-1).astype(jnp.int32)
    so_far = jnp.zeros_like(sampled).at[order].set(jnp.cumsum(sampled[order]))
    ends = jnp.cumsum(jax.ops.segment_sum(sampled, episodes, batch.num_episodes + 1))
    return select(mask, (ends[episodes] - so_far).reshape(mask.shape))
