"""Log-probabilities of given tokens without a ``[tokens, vocab]`` array.

Logits are made for one chunk of tokens at a time, forward and backward. Full-vocabulary
quantities between two hidden states (the divergences of distillation) belong in the same
loop: they would be further per-token outputs of ``_chunk_forward`` with their own term in
``_chunk_logit_gradient``.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxagent.models.config import ModelConfig
from jaxagent.models.transformer import Params, forward

DEFAULT_CHUNK = 1024


class TokenLogprobs(NamedTuple):
    """``logprobs [B, T]`` float32 and, where asked for, ``entropy [B, T]`` float32."""

    logprobs: jax.Array
    entropy: jax.Array | None


def token_logprobs(
    params: Params,
    config: ModelConfig,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
    mask: jax.Array | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> TokenLogprobs:
    """Return log-softmax(logits / temperature) at ``targets``, and its entropy.

    ``hidden [B, T, D]`` at t predicts ``targets [B, T]`` at t. Where a target is negative or
    ``mask [B, T]`` is False both results are 0 and no gradient flows. Gradients reach
    ``hidden`` and the unembedding (the embedding if tied), not the temperature. ``chunk`` is
    about how many tokens' logits exist at a time; chunks run along T, so rows may be
    sharded over devices.
    """
    if hidden.shape[:2] != targets.shape:
        raise ValueError(
            f"targets must have the shape {hidden.shape[:2]} of hidden's rows, got {targets.shape}"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; sample greedily apart")
    keep = targets >= 0
    if mask is not None:
        keep = keep & mask
    targets = jnp.where(keep, targets, -1)
    weight = params["embed"] if config.tie_embeddings else params["unembed"]
    inverse = 1.0 / jnp.asarray(temperature, jnp.float32)
    width = max(1, min(chunk // max(hidden.shape[0], 1), hidden.shape[1]))
    logprobs, entropies = _chunked(
        config.tie_embeddings, entropy, width, hidden, weight, targets, inverse
    )
    return TokenLogprobs(logprobs, entropies if entropy else None)


def shifted_logprobs(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
    mask: jax.Array | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> TokenLogprobs:
    """Return at index t the log-probability of ``tokens[t]`` given what precedes it.

    All inputs are ``[B, T]``. The first token of a segment, padding, and tokens where
    ``mask`` is False get 0 (entropy likewise) and no gradient.
    """
    hidden, _ = forward(params, config, tokens, positions, segment_ids)
    return shift_logprobs(
        params,
        config,
        hidden,
        tokens,
        segment_ids,
        temperature=temperature,
        entropy=entropy,
        mask=mask,
        chunk=chunk,
    )


def shift_logprobs(
    params: Params,
    config: ModelConfig,
    hidden: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
    mask: jax.Array | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> TokenLogprobs:
    """As ``shifted_logprobs``, from hidden states ``[B, T, D]`` that exist already."""
    follows = predicted(segment_ids)
    if mask is not None:
        follows = follows & mask
    # Targets move left by one, rather than hidden states right: they are the smaller array.
    targets = _shift_left(jnp.where(follows, tokens, -1), -1)
    result = token_logprobs(
        params, config, hidden, targets, temperature=temperature, entropy=entropy, chunk=chunk
    )
    return TokenLogprobs(
        _shift_right(result.logprobs),
        None if result.entropy is None else _shift_right(result.entropy),
    )


def predicted(segment_ids: jax.Array) -> jax.Array:
    """Return ``[B, T]`` bool: the token is not padding and has a predecessor in its segment."""
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    return jnp.pad(same, ((0, 0), (1, 0))) & (segment_ids > 0)


def _shift_left(x: jax.Array, fill: int) -> jax.Array:
    return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=fill)


def _shift_right(x: jax.Array) -> jax.Array:
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _chunked(
    tied: bool,
    entropy: bool,
    width: int,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    inverse: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    (logprobs, entropies), _ = _chunked_forward(
        tied, entropy, width, hidden, weight, targets, inverse
    )
    return logprobs, entropies


def _logits(tied: bool, hidden: jax.Array, weight: jax.Array, inverse: jax.Array) -> jax.Array:
    """Return float32 logits ``[n, V]`` of ``hidden [n, D]`` at the temperature."""
    contract = (((1,), (1 if tied else 0,)), ((), ()))
    logits = jax.lax.dot_general(hidden, weight, contract, preferred_element_type=jnp.float32)
    return logits * inverse


def _chunk_forward(
    logits: jax.Array, targets: jax.Array, entropy: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log-probability, entropy and log-normaliser, each ``[n]``."""
    top = jnp.max(logits, axis=-1)
    exps = jnp.exp(logits - top[:, None])
    total = jnp.sum(exps, axis=-1)
    log_total = top + jnp.log(total)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    keep = targets >= 0
    logprobs = jnp.where(keep, chosen - log_total, 0.0)
    if not entropy:
        return logprobs, jnp.zeros_like(logprobs), log_total
    mean = jnp.sum(exps * logits, axis=-1) / total
    return logprobs, jnp.where(keep, log_total - mean, 0.0), log_total


def _split(x: jax.Array, width: int) -> jax.Array:
    """Cut ``[B, T, ...]`` into ``[chunks, B * width, ...]`` (T a multiple of the width)."""
    batch, length = x.shape[:2]
    x = x.reshape(batch, length // width, width, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0).reshape(length // width, batch * width, *x.shape[3:])


def _join(x: jax.Array, batch: int) -> jax.Array:
    chunks, rows = x.shape[:2]
    x = x.reshape(chunks, batch, rows // batch, *x.shape[2:])
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * (rows // batch), *x.shape[3:])


def _pad(x: jax.Array, width: int, fill: int = 0) -> jax.Array:
    extra = -x.shape[1] % width
    widths = ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, widths, constant_values=fill) if extra else x


def _chunked_forward(
    tied: bool,
    entropy: bool,
    width: int,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    inverse: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    batch, length = targets.shape
    weight_in = weight.astype(hidden.dtype)

    def step(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        h, y = inputs
        return None, _chunk_forward(_logits(tied, h, weight_in, inverse), y, entropy)

    inputs = (_split(_pad(hidden, width), width), _split(_pad(targets, width, -1), width))
    _, outputs = jax.lax.scan(step, None, inputs)
    logprobs, entropies, log_total = (_join(x, batch)[:, :length] for x in outputs)
    residuals = (hidden, weight, targets, inverse, entropies, log_total)
    return (logprobs, entropies), residuals


def _chunked_backward(
    tied: bool,
    entropy: bool,
    width: int,
    residuals: Any,
    gradients: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    hidden, weight, targets, inverse, entropies, log_total = residuals
    batch, length = targets.shape
    weight_in = weight.astype(hidden.dtype)
    keep = targets >= 0
    g_logprob, g_entropy = (jnp.where(keep, g, 0.0) for g in gradients)

    def step(total: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        h, y, norm, ent, g_lp, g_ent = inputs
        logits = _logits(tied, h, weight_in, inverse)
        logp = logits - norm[:, None]
        probs = jnp.exp(logp)
        scale = -g_lp[:, None]
        if entropy:
            # d entropy / d logit_v = -p_v (log p_v + entropy)
            scale = scale - g_ent[:, None] * (logp + ent[:, None])
        hit = y[:, None] == jnp.arange(logits.shape[1])
        d_logits = (jnp.where(hit, g_lp[:, None], 0.0) + probs * scale) * inverse
        d_logits = d_logits.astype(h.dtype)
        d_hidden = d_logits @ (weight_in if tied else weight_in.T)
        d_weight = d_logits.T @ h if tied else h.T @ d_logits
        return total + d_weight.astype(jnp.float32), d_hidden

    inputs = tuple(
        _split(_pad(x, width, fill), width)
        for x, fill in (
            (hidden, 0),
            (targets, -1),
            (log_total, 0),
            (entropies, 0),
            (g_logprob, 0),
            (g_entropy, 0),
        )
    )
    d_weight, d_hidden = jax.lax.scan(step, jnp.zeros_like(weight), inputs)
    return (
        _join(d_hidden, batch)[:, :length].astype(hidden.dtype),
        d_weight.astype(weight.dtype),
        None,
        jnp.zeros_like(inverse),
    )


_chunked.defvjp(_chunked_forward, _chunked_backward)
