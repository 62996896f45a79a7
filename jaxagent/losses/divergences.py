"""Divergences between two distributions given as log-probabilities over the last axis.

Log-probabilities below -100 (-inf too) count as -100, so that values and gradients stay
finite; the divergence is then a large number instead of infinite.
"""

import math

import jax
import jax.numpy as jnp

_LOWEST = -100.0
# 1 - p of a top-k whose probabilities round to 1.
_LEAST_TAIL = 1e-7


def kl_divergence(p_log: jax.Array, q_log: jax.Array) -> jax.Array:
    """KL(p || q) = sum p (log p - log q), the last axis summed away."""
    p_log, q_log = jnp.maximum(p_log, _LOWEST), jnp.maximum(q_log, _LOWEST)
    return jnp.sum(jnp.exp(p_log) * (p_log - q_log), axis=-1)


def jensen_shannon(p_log: jax.Array, q_log: jax.Array, alpha: float = 0.5) -> jax.Array:
    """``(1 - alpha) KL(p || m) + alpha KL(q || m)``, ``m = (1 - alpha) p + alpha q``.

    p is the student, q the teacher. At both ends, where the formula vanishes, it is what the
    formula tends to once divided by its leading factor: alpha = 0 is KL(q || p) (forward,
    covers the teacher's modes) and alpha = 1 is KL(p || q) (reverse).

    Source: SDPO, ``verl/trainer/ppo/core_algos.py``; Agarwal et al. 2024 (GKD).
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in 0..1, got {alpha}")
    if alpha == 0:
        return kl_divergence(q_log, p_log)
    if alpha == 1:
        return kl_divergence(p_log, q_log)
    p_log, q_log = jnp.maximum(p_log, _LOWEST), jnp.maximum(q_log, _LOWEST)
    mixed = jnp.logaddexp(p_log + math.log1p(-alpha), q_log + math.log(alpha))
    return (1 - alpha) * kl_divergence(p_log, mixed) + alpha * kl_divergence(q_log, mixed)


def with_tail(top_log: jax.Array) -> jax.Array:
    """[..., M] log-probabilities of M tokens to [..., M + 1]: one bucket for all the others.

    The bucket holds 1 minus their sum, at least 1e-7. Student and teacher must be gathered
    at the *same* tokens. Source: SDPO.
    """
    total = jnp.minimum(jax.nn.logsumexp(jnp.maximum(top_log, _LOWEST), axis=-1), -_LEAST_TAIL)
    tail = jnp.log(-jnp.expm1(total))
    return jnp.concatenate([top_log, tail[..., None]], axis=-1)


def renormalised(top_log: jax.Array) -> jax.Array:
    """[..., M] log-probabilities of M tokens as a distribution over them alone."""
    top_log = jnp.maximum(top_log, _LOWEST)
    return top_log - jax.nn.logsumexp(top_log, axis=-1, keepdims=True)
