"""Logical axis names per parameter, and the rules that map them onto a device mesh.

The mesh has the axes ``("data", "fsdp", "tensor")``. Rows of a batch are split over ``data``
and ``fsdp``; parameters are split over ``fsdp`` (width) and ``tensor`` (heads, MLP,
vocabulary) and repeated over ``data``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxagent.models.config import ModelConfig
from jaxagent.models.decoding import Packed
from jaxagent.models.transformer import Params, param_shapes

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

Rules = Mapping[str, str | tuple[str, ...] | None]
LogicalAxes = tuple[str | None, ...]

DEFAULT_RULES: Rules = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}

# A decode step reads every weight once: none may have to be gathered first.
_SAMPLING_RULES: Rules = {**DEFAULT_RULES, "embed": None}

_AXES: dict[str, LogicalAxes] = {
    "embed": ("vocab", "embed"),
    "unembed": ("embed", "vocab"),
    "final_norm": (None,),
    "attn_norm": ("layers", None),
    "mlp_norm": ("layers", None),
    "q_norm": ("layers", None),
    "k_norm": ("layers", None),
    "q": ("layers", "embed", "heads"),
    "k": ("layers", "embed", "kv_heads"),
    "v": ("layers", "embed", "kv_heads"),
    "q_bias": ("layers", "heads"),
    "k_bias": ("layers", "kv_heads"),
    "v_bias": ("layers", "kv_heads"),
    "o": ("layers", "heads", "embed"),
    "gate": ("layers", "embed", "mlp"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
}


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Return a mesh of ``data * fsdp * tensor`` devices, all of them unless given.

    Raises ValueError when the product is not the number of devices.
    """
    available = jax.devices() if devices is None else list(devices)
    wanted = data * fsdp * tensor
    if min(data, fsdp, tensor) < 1 or wanted != len(available):
        raise ValueError(
            f"mesh data={data}, fsdp={fsdp}, tensor={tensor} needs {wanted} devices and "
            f"{len(available)} are there; change one of the three, or pass devices="
        )
    if devices is None:
        return jax.make_mesh(
            (data, fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
        )
    return Mesh(np.asarray(available).reshape(data, fsdp, tensor), MESH_AXES)


def logical_axes(config: ModelConfig) -> dict[str, Any]:
    """Return the parameter tree with a tuple of logical axis names at each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _AXES[path[-1].key], param_shapes(config), is_leaf=_is_shape
    )


def param_shardings(
    config: ModelConfig, mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> dict[str, Any]:
    """Return the parameter tree with a ``NamedSharding`` at each leaf.

    Raises ValueError, naming the parameter and the rule, where a dimension (for heads: their
    number) does not divide evenly over its mesh axes.
    """
    units = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}

    def sharding(path: Any, shape: tuple[int, ...]) -> NamedSharding:
        name = path[-1].key
        spec = []
        for size, axis in zip(shape, _AXES[name], strict=True):
            target = None if axis is None else rules[axis]
            parts = _parts(mesh, target)
            if axis is not None and units.get(axis, size) % parts:
                raise ValueError(
                    f"parameter {name!r}: {axis} of {units.get(axis, size)} does not divide over "
                    f"{parts} devices of mesh axis {target!r}; use fewer, or the rule {axis}=None"
                )
            spec.append(target)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding, param_shapes(config), is_leaf=_is_shape)


def sampling_shardings(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Return where parameters lie for sampling: split over ``tensor`` only.

    Raises ValueError where the mesh has other axes of more than one device (a decode step
    gathers nothing: it takes one engine a replica), or heads do not divide.
    """
    if mesh.shape["tensor"] != mesh.size:
        raise ValueError(
            f"the engine's mesh must have one axis, tensor, of more than one device, got "
            f"{dict(mesh.shape)}; make an engine for each replica, with "
            "make_mesh(tensor=..., devices=...)"
        )
    return param_shardings(config, mesh, _SAMPLING_RULES)


def packed_shardings(packed: Packed, mesh: Mesh) -> Any:
    """Return a tree like ``decoding.pack``'s result with a ``NamedSharding`` at each leaf."""
    specs = {"embed": ("tensor", None), "unembed": (None, "tensor"), "final_norm": ()}

    def place(path: Any, _: jax.Array) -> NamedSharding:
        if mesh.size == 1:
            return replicated(mesh)
        if path[0].name != "layers":
            return NamedSharding(mesh, PartitionSpec(*specs[path[0].name]))
        axes = _AXES[path[-1].key][1:]  # a layer's own arrays: no axis of layers
        spec = [None if axis is None else _SAMPLING_RULES[axis] for axis in axes]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, packed)


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of keys and values: by head."""
    return NamedSharding(mesh, PartitionSpec(None, "tensor"))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays whose leading axis is rows (or episodes)."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def shard_params(
    params: Params, config: ModelConfig, mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> Params:
    """Place parameters (host or device arrays) on the mesh; heads lie whole on every device."""
    shardings = param_shardings(config, mesh, rules)
    if "heads" in params:
        shardings["heads"] = jax.tree.map(lambda _: replicated(mesh), params["heads"])
    return jax.device_put(params, shardings)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Place a pytree of arrays on the mesh, split along each leading axis.

    Raises ValueError where a leading axis is not a multiple of ``data * fsdp``; scalars are
    repeated.
    """
    parts = _parts(mesh, BATCH_AXES)

    def place(path: Any, x: Any) -> jax.Array:
        if np.ndim(x) == 0:
            return jax.device_put(x, replicated(mesh))
        if np.shape(x)[0] % parts:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has {np.shape(x)[0]} rows, not a multiple of "
                f"data * fsdp = {parts}; pad the rows when packing"
            )
        return jax.device_put(x, batch_sharding(mesh))

    return jax.tree_util.tree_map_with_path(place, batch)


def _parts(mesh: Mesh, target: str | tuple[str, ...] | None) -> int:
    names = () if target is None else (target,) if isinstance(target, str) else target
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)
