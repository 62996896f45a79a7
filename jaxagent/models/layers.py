"""One decoder layer, the only definition of it: training and sampling both run this."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxagent.models.attention import apply_rope
from jaxagent.models.config import ModelConfig

Params = dict[str, Any]
Extra = TypeVar("Extra")


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalise the last axis in float32 and return x's dtype."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale).astype(x.dtype)


def decoder_layer(
    weights: Params,
    config: ModelConfig,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Extra]],
) -> tuple[jax.Array, Extra]:
    """Run one layer over ``x [B, T, D]``.

    ``attend(q, k, v)`` gets ``q [B, T, heads, head_dim]`` and ``k``, ``v`` ``[B, T, kv_heads,
    head_dim]`` after RoPE and returns the mixed values in q's shape and anything else,
    which is returned beside the new ``x``. ``weights`` may hold the projections fused, as
    ``decoding.pack`` makes them.
    """
    batch, length, _ = x.shape
    h = rms_norm(x, weights["attn_norm"], config.norm_eps)
    q, k, v = (
        part.reshape(batch, length, -1, config.head_dim)
        for part in _project_qkv(weights, config, h)
    )
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.norm_eps)
        k = rms_norm(k, weights["k_norm"], config.norm_eps)
    mixed, extra = attend(apply_rope(q, *rope), apply_rope(k, *rope), v)
    x = x + _dense(mixed.reshape(batch, length, config.query_size), weights["o"])
    h = rms_norm(x, weights["mlp_norm"], config.norm_eps)
    gate, up = _project_mlp(weights, config, h)
    return x + _dense(jax.nn.silu(gate) * up, weights["down"]), extra


def _project_qkv(weights: Params, config: ModelConfig, h: jax.Array) -> Sequence[jax.Array]:
    if "qkv" not in weights:
        return [_dense(h, weights[name], weights.get(f"{name}_bias")) for name in ("q", "k", "v")]
    fused = _dense(h, weights["qkv"], weights.get("qkv_bias"))
    cuts = [config.query_size, config.query_size + config.kv_size]
    return jnp.split(fused, cuts, axis=-1)


def _project_mlp(weights: Params, config: ModelConfig, h: jax.Array) -> Sequence[jax.Array]:
    if "gate_up" not in weights:
        return [_dense(h, weights["gate"]), _dense(h, weights["up"])]
    return jnp.split(_dense(h, weights["gate_up"]), [config.mlp_size], axis=-1)


def _dense(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    # One product of two matrices: with more axes, XLA transposes the cotangents of the
    # outputs, which are the larger arrays, to get the gradient of the weight.
    flat = x.reshape(-1, x.shape[-1]) @ weight.astype(x.dtype)
    out = flat.reshape(*x.shape[:-1], weight.shape[-1])
    return out if bias is None else out + bias.astype(x.dtype)
