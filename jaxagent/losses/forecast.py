"""Forecasting the policy's own next actions, from sequences packed beside the episodes."""

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, per_token
from jaxagent.losses.base import Loss, Metrics, Outputs, select


def forecast() -> Loss:
    """Cross-entropy of the actions that the policy went on to take, asked for in advance (CoPE).

    Acts on the tokens whose ``scores["forecast"]`` [R,T] is not 0, which weighs the numerator
    alone; the denominator is the number of these tokens. They are targets of contexts of
    their own (see :func:`jaxagent.data.augment.forecast_contexts`), so no other term sees
    them. 0 without any, for instance when no episode succeeded. The usual weight is 0.01.

    Source: CoPE, ``action_forecast.py``.
    """

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        weights = jax.lax.stop_gradient(jnp.asarray(batch.scores["forecast"]))
        mask = (weights != 0) & per_token(batch, jnp.asarray(batch.valid))
        losses = -select(mask, outputs["logprobs"])
        metrics = {"nll": (jnp.sum(losses), jnp.sum(mask)), "tokens": jnp.sum(mask)}
        return jnp.sum(select(mask, weights) * losses), jnp.sum(mask), metrics

    return Loss(frozenset({"logprobs"}), frozenset({"forecast"}), fn, token_local=True)
