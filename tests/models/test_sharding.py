"""One device against eight; the eight are forced host devices in a process of their own."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxagent.models.config import ModelConfig
from jaxagent.models.sharding import (
    MESH_AXES,
    logical_axes,
    make_mesh,
    param_shardings,
    shard_batch,
)
from jaxagent.models.transformer import param_shapes

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=40,
    qk_norm=True,
    qkv_bias=True,
    tie_embeddings=False,
)

EIGHT_DEVICES = """
import jax
import numpy as np
from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import shifted_logprobs
from jaxagent.models.sharding import make_mesh, shard_batch, shard_params
from jaxagent.models.transformer import init

assert jax.device_count() == 8
jax.config.update("jax_disable_most_optimizations", True)
rng = np.random.default_rng(0)
batch = {
    "tokens": rng.integers(0, 48, (8, 11)).astype(np.int32),
    "positions": np.tile([*range(6), *range(5)], (8, 1)).astype(np.int32),
    "segment_ids": np.tile([1] * 6 + [2] * 3 + [0] * 2, (8, 1)).astype(np.int32),
}
weights = rng.normal(size=(8, 11)).astype(np.float32)
config = ModelConfig(
    48, 32, 2, 4, 2, 8, 40, qk_norm=True, qkv_bias=True, tie_embeddings=False
)
params = jax.tree.map(lambda x: 2 * x, init(jax.random.key(0), config))

def loss(params, batch):
    found = shifted_logprobs(params, config, **batch, entropy=True, chunk=16)
    return (weights * (found.logprobs + found.entropy)).sum(), found

def close(a, b):
    # Sums in another order: in float64 the two agree to 1e-14 of the largest entry, in
    # float32 to 2e-6.
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())

grad = jax.value_and_grad(loss, has_aux=True)
expected = jax.jit(grad)(params, batch)
mesh = make_mesh(data=2, fsdp=2, tensor=2)
sharded = shard_params(params, config, mesh)
assert sharded["embed"].addressable_shards[0].data.shape == (24, 16)
assert sharded["unembed"].addressable_shards[0].data.shape == (16, 24)
placed = shard_batch(batch, mesh)
assert placed["tokens"].addressable_shards[0].data.shape[0] == 2
jax.tree.map(close, jax.jit(grad)(sharded, placed), expected)
print("equal")
"""


def test_eight_devices_compute_what_one_does() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("equal")


def test_every_parameter_has_one_logical_name_an_axis() -> None:
    names = logical_axes(CONFIG)
    shapes = param_shapes(CONFIG)
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    jax.tree.map(
        lambda n, s: np.testing.assert_equal(len(n), len(s)), names, shapes, is_leaf=is_leaf
    )
    assert names["layers"]["down"] == ("layers", "mlp", "embed")


def test_a_mesh_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="data=3, fsdp=5, tensor=1 needs 15 devices"):
        make_mesh(data=3, fsdp=5)


# Eight devices in name only: enough to find what does not divide.
ABSTRACT = AbstractMesh((1, 2, 4), MESH_AXES)


def test_what_does_not_divide_is_named_with_its_remedy() -> None:
    with pytest.raises(ValueError, match=r"'k': kv_heads of 2 .* rule kv_heads=None"):
        param_shardings(replace(CONFIG, qkv_bias=False), ABSTRACT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"batch\['a'\] has 3 rows.*pad the rows"):
        shard_batch({"a": np.zeros((3, 2))}, ABSTRACT)  # type: ignore[arg-type]
