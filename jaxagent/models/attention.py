"""Rotary embeddings and the one attention function behind which implementations switch."""

import math

import jax
import jax.numpy as jnp

from jaxagent.models.config import AttentionImplementation, ModelConfig

# Finite, so that a query with no visible key (padding) yields a mean rather than NaN.
_MASKED = -1e30


def rope_frequencies(config: ModelConfig) -> jax.Array:
    """Return the float32 angular frequencies ``[head_dim / 2]``.

    Llama-3 scaling follows the reference code of Llama 3.1: long wavelengths are slowed by
    ``factor``, short ones kept, and those between interpolated.
    """
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_len * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return frequencies * (smooth + (1.0 - smooth) / scaling.factor)


def rope_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin ``[B, T, 1, head_dim / 2]``, float32 whatever the compute dtype."""
    angles = positions.astype(jnp.float32)[..., None, None] * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn ``x [B, T, heads, head_dim]``; pairs are (i, i + head_dim/2) as in Hugging Face."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def packed_mask(segment_ids: jax.Array) -> jax.Array:
    """Return ``[B, T, T]`` bool: query t sees key s of its own segment with s <= t."""
    length = segment_ids.shape[-1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return causal & same & (segment_ids > 0)[:, :, None]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    implementation: AttentionImplementation = "xla",
) -> jax.Array:
    """Grouped-query attention.

    Shapes: ``q [B, T, heads, head_dim]``; ``k``, ``v`` ``[B, kv_heads, S, head_dim]``; ``mask
    [B, T, S]`` bool; result ``[B, T, heads, head_dim]`` in q's dtype. Scores and softmax are
    float32. A query that sees nothing (padding) returns finite values of no meaning.
    """
    match implementation:
        case "xla":
            return _xla_attention(q, k, v, mask)
        case "cudnn":
            return _cudnn_attention(q, k, v, mask)
        case _:
            raise NotImplementedError(
                f"attention={implementation!r} is not implemented; set ModelConfig.attention='xla'"
            )


def _xla_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    batch, length, heads, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    q = q.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    q = (q * jnp.asarray(head_dim**-0.5, q.dtype)).reshape(
        batch, kv_heads, group * length, head_dim
    )
    scores = jnp.einsum("bgqd,bgkd->bgqk", q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, group, length, keys)
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    weights = weights.reshape(batch, kv_heads, group * length, keys)
    out = jnp.einsum("bgqk,bgkd->bgqd", weights, v)
    out = out.reshape(batch, kv_heads, group, length, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, head_dim)


def _cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    if jax.default_backend() != "gpu":
        raise RuntimeError("attention='cudnn' needs an NVIDIA GPU; set ModelConfig.attention='xla'")
    if q.dtype == jnp.float32:
        raise TypeError(
            "attention='cudnn' needs compute_dtype='bfloat16'; "
            "set it, or ModelConfig.attention='xla'"
        )
    return jax.nn.dot_product_attention(
        q,
        k.transpose(0, 2, 1, 3),
        v.transpose(0, 2, 1, 3),
        mask=mask[:, None],
        implementation="cudnn",
    )
