from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import predicted, shifted_logprobs, token_logprobs
from jaxagent.models.transformer import forward, init, unembedding

TIED = ModelConfig(
    vocab_size=97,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_size=24,
)
UNTIED = replace(TIED, tie_embeddings=False)
ROWS, LENGTH = 2, 13


def inputs(config: ModelConfig) -> tuple[Any, jax.Array, jax.Array]:
    params = init(jax.random.key(0), config)
    params = jax.tree.map(lambda x: 20 * x, params)
    hidden = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, config.hidden_size))
    targets = jax.random.randint(jax.random.key(2), (ROWS, LENGTH), 0, config.vocab_size)
    return params, hidden, targets.at[0, 3].set(-1).at[1, 12].set(-7)


def plain(params: Any, config: ModelConfig, hidden: Any, targets: Any, temperature: Any) -> Any:
    """The full-logits version, in whatever precision the inputs have."""
    logits = hidden @ unembedding(params, config) / temperature
    logp = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logp, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    keep = targets >= 0
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return jnp.where(keep, chosen, 0.0), jnp.where(keep, entropy, 0.0)


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("chunk", "temperature"), [(1, 0.7), (8, 1.0), (1000, 1.6)])
def test_values_and_gradients_equal_full_logits(
    config: ModelConfig, entropy: bool, chunk: int, temperature: float
) -> None:
    params, hidden, targets = inputs(config)
    w_lp, w_ent = jax.random.normal(jax.random.key(3), (2, ROWS, LENGTH))
    name = "embed" if config.tie_embeddings else "unembed"

    def ours(table: Any, hidden: Any) -> Any:
        found = token_logprobs(
            params | {name: table},
            config,
            hidden,
            targets,
            temperature=temperature,
            entropy=entropy,
            chunk=chunk,
        )
        ent = found.entropy if found.entropy is not None else jnp.zeros((ROWS, LENGTH))
        return (w_lp * found.logprobs + w_ent * ent).sum(), (found.logprobs, ent)

    def expected(table: Any, hidden: Any) -> Any:
        lp, ent = plain(params | {name: table}, config, hidden, targets, temperature)
        ent = ent if entropy else jnp.zeros_like(ent)
        return (w_lp * lp + w_ent * ent).sum(), (lp, ent)

    grad = partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (_, values), gradients = jax.jit(grad(ours))(params[name], hidden)
    (_, wanted), wanted_gradients = jax.jit(grad(expected))(params[name], hidden)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), values, wanted)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), gradients, wanted_gradients
    )


def test_ignored_targets_give_zero_and_no_gradient() -> None:
    params, hidden, targets = inputs(TIED)
    mask = jnp.ones((ROWS, LENGTH), bool).at[1, :4].set(False)
    # What an ignored position holds must not matter, not even if it overflows.
    hidden = hidden.at[1, 2].set(1e30)

    def loss(hidden: Any) -> Any:
        found = token_logprobs(params, TIED, hidden, targets, entropy=True, mask=mask, chunk=8)
        assert found.entropy is not None
        return found.logprobs.sum() + found.entropy.sum(), found

    gradient, found = jax.jit(jax.grad(loss, has_aux=True))(hidden)
    ignored = ~mask | (targets < 0)
    for x in (found.logprobs, found.entropy, gradient):
        assert not np.asarray(x)[ignored].any()
        assert np.isfinite(x).all()
    assert (found.logprobs[~ignored] < 0).all()


def test_a_traced_temperature_is_the_same_as_a_number() -> None:
    params, hidden, targets = inputs(TIED)
    run = jax.jit(lambda t: token_logprobs(params, TIED, hidden, targets, temperature=t).logprobs)
    expected, _ = plain(params, TIED, hidden, targets, 0.7)
    np.testing.assert_allclose(run(0.7), expected, atol=2e-5, rtol=1e-5)


def test_extreme_logits_stay_finite() -> None:
    params, hidden, targets = inputs(TIED)

    def loss(hidden: Any) -> Any:
        found = token_logprobs(params, TIED, 1e4 * hidden, targets, entropy=True)
        assert found.entropy is not None
        return found.logprobs.sum() + found.entropy.sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(hidden)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_bfloat16_hidden_states_give_float32_results() -> None:
    config = replace(TIED, compute_dtype="bfloat16")
    params, hidden, targets = inputs(config)
    rough = hidden.astype(jnp.bfloat16)

    def loss(table: Any, h: Any) -> Any:
        found = token_logprobs(params | {"embed": table}, config, h, targets).logprobs
        return found.sum(), found

    (d_table, d_hidden), found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(
        params["embed"], rough
    )
    expected, _ = plain(params, config, rough.astype(jnp.float32), targets, 1.0)
    assert found.dtype == d_table.dtype == jnp.float32 and d_hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(found, expected, atol=0.1, rtol=0.03)


def test_shifted_logprobs_describe_each_token_as_a_target() -> None:
    params, _, tokens = inputs(TIED)
    tokens = jnp.abs(tokens)
    segments = jnp.array([[1] * 5 + [2] * 6 + [0] * 2, [3] * 13])
    positions = jnp.array([[*range(5), *range(6), 0, 0], [*range(13)]])
    mask = jnp.ones_like(segments, bool).at[1, 6].set(False)
    found = shifted_logprobs(
        params, TIED, tokens, positions, segments, entropy=True, mask=mask, chunk=8
    )
    assert found.entropy is not None
    hidden, _ = forward(params, TIED, tokens, positions, segments)
    for row, start, stop in ((0, 0, 5), (0, 5, 11), (1, 0, 13)):
        lp, ent = plain(
            params, TIED, hidden[row, start : stop - 1], tokens[row, start + 1 : stop], 1.0
        )
        wanted = jnp.where(mask[row, start:stop], jnp.pad(lp, (1, 0)), 0)
        wanted_entropy = jnp.where(mask[row, start:stop], jnp.pad(ent, (1, 0)), 0)
        np.testing.assert_allclose(found.logprobs[row, start:stop], wanted, atol=1e-4)
        np.testing.assert_allclose(found.entropy[row, start:stop], wanted_entropy, atol=1e-4)
    assert not found.logprobs[0, 11:].any()
    zero = ~(predicted(segments) & mask)
    np.testing.assert_array_equal(found.logprobs == 0, zero)


def test_no_array_of_tokens_times_vocabulary_is_ever_made() -> None:
    config = replace(TIED, vocab_size=5000)
    tokens, chunk = 512, 64
    params = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    hidden = jax.ShapeDtypeStruct((4, tokens // 4, config.hidden_size), jnp.float32)
    targets = jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32)

    def loss(full: bool, params: Any, hidden: Any, targets: Any) -> Any:
        if full:
            return plain(params, config, hidden, targets, 1.0)[0].sum()
        found = token_logprobs(params, config, hidden, targets, entropy=True, chunk=chunk)
        assert found.entropy is not None
        return found.logprobs.sum() + found.entropy.sum()

    def temporary(full: bool) -> int:
        grad = jax.jit(jax.grad(partial(loss, full), argnums=(0, 1)))
        analysis: Any = grad.lower(params, hidden, targets).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    logits = tokens * config.vocab_size * 4
    assert temporary(True) > logits  # the measure sees such an array where there is one
    assert temporary(False) < logits / 2


def test_wrong_arguments_are_named() -> None:
    params, hidden, targets = inputs(TIED)
    with pytest.raises(ValueError, match="targets must have the shape"):
        token_logprobs(params, TIED, hidden, targets[:, :-1])
    with pytest.raises(ValueError, match="chunk"):
        token_logprobs(params, TIED, hidden, targets, chunk=0)
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(params, TIED, hidden, targets, temperature=0.0)
