"""The decoder as pure functions over a nested dict of float32 parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxagent.models import cache as kv_cache
from jaxagent.models.attention import (
    apply_rope,
    attention,
    cached_mask,
    packed_mask,
    rope_tables,
)
from jaxagent.models.cache import Cache
from jaxagent.models.config import ModelConfig

Params = dict[str, Any]


def param_shapes(config: ModelConfig) -> Params:
    """Return the parameter tree with a shape tuple at each leaf; layers lead with their axis."""
    d, q, kv, layers = config.hidden_size, config.query_size, config.kv_size, config.num_layers
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "q": (d, q),
        "k": (d, kv),
        "v": (d, kv),
        "o": (q, d),
        "mlp_norm": (d,),
        "gate": (d, config.mlp_size),
        "up": (d, config.mlp_size),
        "down": (config.mlp_size, d),
    }
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    shapes: Params = {
        "embed": (config.vocab_size, d),
        "layers": {name: (layers, *shape) for name, shape in layer.items()},
        "final_norm": (d,),
    }
    if not config.tie_embeddings:
        shapes["unembed"] = (d, config.vocab_size)
    return shapes


def init(key: jax.Array, config: ModelConfig) -> Params:
    """Draw float32 parameters: normal with deviation 0.02, norms 1, biases 0.

    Projections back into the residual stream (``o``, ``down``) are scaled down by
    ``sqrt(2 * num_layers)`` as in GPT-2.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )
    keys = jax.random.split(key, len(leaves))
    residual = (2 * config.num_layers) ** -0.5

    def draw(path: Any, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(shape, jnp.float32)
        if name.endswith("bias"):
            return jnp.zeros(shape, jnp.float32)
        scale = 0.02 * (residual if name in ("o", "down") else 1.0)
        return scale * jax.random.normal(key, shape, jnp.float32)

    drawn = [draw(path, shape, k) for (path, shape), k in zip(leaves, keys, strict=True)]
    return jax.tree_util.tree_unflatten(tree, drawn)


def unembedding(params: Params, config: ModelConfig) -> jax.Array:
    """Return the ``[D, V]`` float32 matrix from hidden states to logits."""
    return params["embed"].T if config.tie_embeddings else params["unembed"]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalise the last axis in float32 and return x's dtype."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale).astype(x.dtype)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    cache: Cache | None = None,
) -> tuple[jax.Array, Cache | None]:
    """Run the decoder.

    ``tokens``, ``positions``, ``segment_ids`` are int ``[B, T]``; segment id 0 is padding and
    positions restart in each segment. Returns the hidden states after the final norm,
    ``[B, T, D]`` in the compute dtype, and the cache.

    Without a cache a token attends to the earlier tokens of its own segment in its row. With
    one, row b is slot b of the cache: the new keys and values are written at ``positions``
    and a token attends to everything its slot holds up to its own position.
    """
    dtype = jnp.dtype(config.compute_dtype)
    x = params["embed"][tokens].astype(dtype)
    rope = rope_tables(config, positions)
    mask = packed_mask(segment_ids) if cache is None else cached_mask(positions, cache.k.shape[3])

    def layer(x: jax.Array, inputs: tuple[Params, Cache | None]) -> tuple[jax.Array, Any]:
        weights, layer_cache = inputs
        attended, layer_cache = _attend(
            weights, config, x, rope, mask, positions, segment_ids, layer_cache
        )
        x = x + attended
        return x + _mlp(weights, config, x), layer_cache

    x, new_cache = jax.lax.scan(_remat(layer, config), x, (params["layers"], cache))
    return rms_norm(x, params["final_norm"], config.norm_eps), new_cache


def _remat(layer: Callable[..., Any], config: ModelConfig) -> Callable[..., Any]:
    match config.remat:
        case "none":
            return layer
        case "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        case _:
            policy = jax.checkpoint_policies.nothing_saveable
    # Inside scan the barrier against common-subexpression elimination is not needed.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _dense(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    out = x @ weight.astype(x.dtype)
    return out if bias is None else out + bias.astype(x.dtype)


def _attend(
    weights: Params,
    config: ModelConfig,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    layer_cache: Cache | None,
) -> tuple[jax.Array, Cache | None]:
    batch, length, _ = x.shape
    h = rms_norm(x, weights["attn_norm"], config.norm_eps)
    q, k, v = (
        _dense(h, weights[name], weights.get(f"{name}_bias")).reshape(
            batch, length, -1, config.head_dim
        )
        for name in ("q", "k", "v")
    )
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.norm_eps)
        k = rms_norm(k, weights["k_norm"], config.norm_eps)
    q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    if layer_cache is None:
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    else:
        keys = kv_cache.write(layer_cache.k, k, positions, segment_ids)
        values = kv_cache.write(layer_cache.v, v, positions, segment_ids)
        layer_cache = Cache(keys, values)
    out = attention(q, keys, values, mask, config.attention)
    return _dense(out.reshape(batch, length, config.query_size), weights["o"]), layer_cache


def _mlp(weights: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    h = rms_norm(x, weights["mlp_norm"], config.norm_eps)
    return _dense(
        jax.nn.silu(_dense(h, weights["gate"])) * _dense(h, weights["up"]), weights["down"]
    )
