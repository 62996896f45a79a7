"""Observation prediction: the policy also learns to predict what the environment answers."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxagent.data.batch import Batch, observation_mask
from jaxagent.losses.base import Loss, Metrics, Outputs, aggregate_tokens, select


def observation_prediction(
    normalise: Literal["token", "episode"] = "token", weighted: bool = False
) -> Loss:
    """Cross-entropy of the environment's own tokens, from the same forward pass (ECHO).

    Only OBSERVATION tokens after the first action count: never the prompt, never TEMPLATE.
    Failed episodes take part (they have observations too); no advantage and no importance
    weight. ``normalise="token"`` divides by the number of observation tokens in the global
    batch, ``"episode"`` takes the mean over episodes of each episode's token mean. The
    denominator is its own, so observations never dilute the policy gradient. The usual
    weight in :func:`~jaxagent.losses.base.combine` is 0.05 to 0.1; a policy term of weight 0
    beside it is training without a verifier.

    ``weighted`` multiplies each token's loss by ``scores["observation_weight"]`` [R,T]. Only
    the numerator sees the weight: what divides is the *number* of tokens whose weight is not
    0. So weights of 0 leave tokens out (warnings, say), and doubling all of them doubles
    the loss.

    Source: ECHO (abstract); prime-rl's ``orchestrator/algo/echo.py`` (token mean).
    """
    if normalise not in ("token", "episode"):
        raise ValueError(f"normalise must be 'token' or 'episode', got {normalise!r}")

    def fn(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        mask = observation_mask(batch)
        if weighted:
            weights = jax.lax.stop_gradient(jnp.asarray(batch.scores["observation_weight"]))
            mask = mask & (weights != 0)
        losses = -select(mask, outputs["logprobs"])
        weighed = select(mask, weights) * losses if weighted else losses
        numerator, denominator = aggregate_tokens(weighed, mask, batch, normalise)
        # The first turns are where collapse to easy outputs would not show: log both ends.
        early = mask & (jnp.asarray(batch.turn_ids) == 0)
        late = mask & ~early
        metrics = {
            "tokens": jnp.sum(mask),
            "nll_first_turn": (jnp.sum(select(early, losses)), jnp.sum(early)),
            "nll_later_turns": (jnp.sum(select(late, losses)), jnp.sum(late)),
        }
        return numerator, denominator, metrics

    scores = frozenset({"observation_weight"} if weighted else ())
    return Loss(frozenset({"logprobs"}), scores, fn, token_local=True)
