"""The decoder as pure functions over a nested dict of float32 parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxagent.models import decoding
from jaxagent.models.attention import attention, packed_mask, rope_tables
from jaxagent.models.cache import Cache
from jaxagent.models.config import ModelConfig
from jaxagent.models.layers import Params, decoder_layer, rms_norm

__all__ = ["Params", "forward", "init", "param_shapes", "rms_norm", "unembedding"]


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


def unembedding_table(params: Params) -> jax.Array:
    """Return the unembedding as it is stored: ``[V, D]`` if tied, else ``[D, V]``."""
    return params["unembed"] if "unembed" in params else params["embed"]


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
    one, row b continues slot b: its positions must count up from what the slot holds,
    padding last, and a token attends to everything in its slot up to its own position.
    """
    if cache is not None:
        starts, counts = positions[:, 0], (segment_ids > 0).sum(1)
        slots = jnp.arange(tokens.shape[0])
        packed = decoding.pack(params, config)
        return decoding.extend(packed, config, cache, tokens, slots, starts, counts)
    x = params["embed"][tokens].astype(jnp.dtype(config.compute_dtype))
    rope = rope_tables(config, positions)
    mask = packed_mask(segment_ids)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        return attention(q, keys, values, mask, config.attention), None

    def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        return decoder_layer(weights, config, x, rope, attend)

    x, _ = jax.lax.scan(_remat(layer, config), x, params["layers"])
    return rms_norm(x, params["final_norm"], config.norm_eps), None


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
