"""Heads beside a NumPy reference, and where each token's number is read from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf

from jaxagent.models.config import ModelConfig
from jaxagent.models.heads import (
    LOG_Z_HEAD,
    HeadConfig,
    add_heads,
    from_token_before,
    head_of,
    head_scalars,
    init_heads,
    prompt_scalars,
)
from jaxagent.models.sharding import make_mesh, shard_params
from jaxagent.models.transformer import init

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=6,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    mlp_size=8,
)
CONFIGS = {
    "values": HeadConfig(),
    "failure": HeadConfig(layers=2, width=5, detach=True),
    "log_z": LOG_Z_HEAD,
}


@jax.jit
def fresh() -> Any:
    return add_heads(init(jax.random.key(0), CONFIG), jax.random.key(1), CONFIG, CONFIGS)


def random_heads(seed: int = 0) -> Any:
    """Heads whose every parameter is random, float64."""
    heads = init_heads(jax.random.key(seed), CONFIG, CONFIGS)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape), heads)


def reference(head: Any, x: np.ndarray) -> np.ndarray:
    for index in range((len(head) - 1) // 2):
        linear, norm = head[f"linear_{index}"], head[f"norm_{index}"]
        x = x @ linear["weight"] + linear["bias"]
        x = 0.5 * x * (1 + erf(x / np.sqrt(2)))
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        x = x * norm["scale"] + norm["bias"]
    return (x @ head["out"]["weight"] + head["out"]["bias"])[..., 0]


def test_heads_are_the_network_they_say(x64: None) -> None:
    heads = random_heads()
    hidden = np.random.default_rng(1).normal(size=(2, 5, 6))
    shapes = {"values": 1, "failure": 3, "log_z": 5}
    for name, parts in shapes.items():
        assert len(heads[name]) == parts
        found = head_scalars(heads[name], jnp.asarray(hidden))
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, reference(heads[name], hidden), rtol=1e-9, atol=1e-9)
    assert heads["failure"]["linear_0"]["weight"].shape == (6, 5)
    assert heads["log_z"]["linear_1"]["weight"].shape == (6, 6)


segments = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.booleans(), min_size=4, max_size=4)),
    min_size=0,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(segments, min_size=2, max_size=2), seed=st.integers(0, 99))
def test_where_each_number_comes_from(rows: Any, seed: int) -> None:
    length = 17
    ids, prompt = np.zeros((2, length), np.int32), np.zeros((2, length), bool)
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(2, length, 6)).astype(np.float32)
    heads = jax.tree.map(lambda x: x.astype(np.float32), random_heads(seed))
    values, log_z = np.zeros((2, length)), np.zeros((2, length))
    for row, runs in enumerate(rows):
        at = 0
        for number, (size, marks) in enumerate(runs):
            here = slice(at, at + size)
            ids[row, here] = 3 * number + 1  # not dense
            prompt[row, here] = marks[:size]
            values[row, at + 1 : at + size] = reference(
                heads["values"], hidden[row, at : at + size - 1]
            )
            lead = [*marks[:size], False].index(False)
            if lead:
                mean = hidden[row, at : at + lead].mean(0)
                log_z[row, here] = reference(heads["log_z"], mean)
            at += size
        # What a packer leaves on padding must not matter.
        prompt[row, at:] = rng.random() < 0.5
    found = from_token_before(head_scalars(heads["values"], jnp.asarray(hidden)), jnp.asarray(ids))
    np.testing.assert_allclose(found, values, atol=1e-4)
    found = prompt_scalars(
        heads["log_z"], jnp.asarray(hidden), jnp.asarray(ids), jnp.asarray(prompt)
    )
    np.testing.assert_allclose(found, log_z, atol=1e-4)


def test_fresh_heads_say_zero_and_depend_on_their_name_alone() -> None:
    params = fresh()
    hidden = jax.random.normal(jax.random.key(2), (1, 4, 6))
    for name in CONFIGS:
        head = head_of(params, name)
        assert not head_scalars(head, hidden).any()
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(head))
    alone = init_heads(jax.random.key(1), CONFIG, {"log_z": LOG_Z_HEAD})["log_z"]
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6),
        alone,
        params["heads"]["log_z"],
    )
    # All that follows the zero layer has no gradient, the layer itself has one.
    wide = params["heads"]["log_z"]
    slope = jax.grad(lambda head: head_scalars(head, hidden).sum())(wide)
    assert slope["out"]["weight"].any() and not slope["linear_0"]["weight"].any()
    assert float(jnp.std(wide["linear_0"]["weight"])) == pytest.approx(6**-0.5, rel=0.4)


def test_bfloat16_states_give_float32_numbers() -> None:
    heads = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), random_heads())
    hidden = jax.random.normal(jax.random.key(2), (2, 8, 6))
    ids = jnp.ones((2, 8), jnp.int32)
    prompt = jnp.arange(8)[None] < jnp.asarray([[3], [5]])
    for name, config in CONFIGS.items():
        given = [hidden.astype(jnp.bfloat16), hidden.astype(jnp.bfloat16).astype(jnp.float32)]
        if config.pooling == "prompt":
            low, full = (prompt_scalars(heads[name], h, ids, prompt) for h in given)
        else:
            low, full = (head_scalars(heads[name], h) for h in given)
        assert low.dtype == jnp.float32
        np.testing.assert_allclose(low, full, atol=0.1, rtol=0.05)


def test_heads_lie_whole_on_every_device_of_a_mesh() -> None:
    params = fresh()
    placed = shard_params(params, CONFIG, make_mesh(devices=jax.devices()[:1]))
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(placed["heads"]))
    jax.tree.map(np.testing.assert_array_equal, placed, params)


def test_misuse_is_named() -> None:
    params = {"heads": random_heads()}
    for make, message in (
        (lambda: HeadConfig(layers=0), "layers must be"),
        (lambda: HeadConfig(width=0, layers=2), "width must be"),
        (lambda: HeadConfig(width=8), "a linear head has none"),
        (lambda: HeadConfig(pooling="mean"), "pooling must be"),  # type: ignore[arg-type]
        (lambda: head_of(params, "progress"), "no head 'progress' .*failure, log_z, values"),
        (lambda: head_of({}, "values"), "they have: none"),
        (
            lambda: add_heads(params, jax.random.key(0), CONFIG, {"values": HeadConfig()}),
            "heads named values already",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
