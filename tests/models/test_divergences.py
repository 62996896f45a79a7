"""Divergences between whole distributions, made chunk by chunk from two hidden states."""

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.losses.divergences import jensen_shannon, kl_divergence
from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import DivergenceKind, Teacher, shift_logprobs, token_logprobs

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
KINDS = get_args(DivergenceKind)
ROWS, LENGTH = 2, 13


def table(config: ModelConfig, key: int, width: int = 16) -> jax.Array:
    shape = (97, width) if config.tie_embeddings else (width, 97)
    return jax.random.normal(jax.random.key(key), shape)


def name(config: ModelConfig) -> str:
    return "embed" if config.tie_embeddings else "unembed"


def reference(kind: str, policy: jax.Array, teacher: jax.Array) -> jax.Array:
    """From logits, by the functions on distributions."""
    p, q = jax.nn.log_softmax(policy), jax.nn.log_softmax(teacher)
    if kind == "jsd":
        return jensen_shannon(p, q)
    return kl_divergence(q, p) if kind == "forward_kl" else kl_divergence(p, q)


def logits(config: ModelConfig, hidden: jax.Array, weight: jax.Array) -> jax.Array:
    return hidden @ (weight.T if config.tie_embeddings else weight)


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (8, 0.7), (1000, 1.6)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_full_logits(
    config: ModelConfig, chunk: int, temperature: float, kind: DivergenceKind
) -> None:
    keys = iter(jax.random.split(jax.random.key(0), 5))
    hidden = jax.random.normal(next(keys), (ROWS, LENGTH, 16))
    # A teacher of another width, as an external one may be.
    theirs, their_table = jax.random.normal(next(keys), (ROWS, LENGTH, 12)), table(config, 8, 12)
    targets = jax.random.randint(next(keys), (ROWS, LENGTH), 0, 97).at[0, 3].set(-1)
    w_lp, w_div = jax.random.normal(next(keys), (2, ROWS, LENGTH))

    def ours(weight: Any, hidden: Any) -> Any:
        found = token_logprobs(
            {name(config): weight},
            config,
            hidden,
            targets,
            temperature=temperature,
            teachers=[Teacher(kind, theirs, their_table)],
            chunk=chunk,
        )
        (apart,) = found.divergences
        return (w_lp * found.logprobs + w_div * apart).sum(), apart

    def expected(weight: Any, hidden: Any) -> Any:
        mine = logits(config, hidden, weight) / temperature
        other = logits(config, theirs, their_table) / temperature
        apart = jnp.where(targets >= 0, reference(kind, mine, other), 0.0)
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(mine), jnp.maximum(targets, 0)[..., None], -1
        )[..., 0]
        lp = jnp.where(targets >= 0, chosen, 0.0)
        return (w_lp * lp + w_div * apart).sum(), apart

    grad = partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (_, value), gradients = jax.jit(grad(ours))(table(config, 7), hidden)
    (_, wanted), wanted_gradients = jax.jit(grad(expected))(table(config, 7), hidden)
    assert (value[targets >= 0] > 0).all() and value[0, 3] == 0
    np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=2e-5)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), gradients, wanted_gradients
    )


def test_printed_numbers() -> None:
    # Student (.5, .5), teacher (.8, .2).
    config = replace(TIED, vocab_size=2)
    weight = jnp.eye(2)
    hidden, theirs = jnp.log(jnp.array([[[0.5, 0.5]]])), jnp.log(jnp.array([[[0.8, 0.2]]]))
    found = token_logprobs(
        {"embed": weight},
        config,
        hidden,
        jnp.zeros((1, 1), jnp.int32),
        teachers=[Teacher(kind, theirs, weight) for kind in ("jsd", "forward_kl", "reverse_kl")],
    )
    np.testing.assert_allclose(
        [x[0, 0] for x in found.divergences], [0.0506718, 0.1927448, 0.2231436], atol=1e-6
    )


def test_equal_sides_give_zero_and_the_bound_of_jsd_holds() -> None:
    hidden = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, 16))
    weight, targets = table(TIED, 3), jnp.zeros((ROWS, LENGTH), jnp.int32)
    same = [Teacher(kind, hidden, weight) for kind in KINDS]
    found = token_logprobs({"embed": weight}, TIED, hidden, targets, teachers=same)
    for apart in found.divergences:
        np.testing.assert_allclose(apart, 0, atol=1e-6)

    far = Teacher("jsd", -30 * hidden, weight)
    one = token_logprobs({"embed": weight}, TIED, 30 * hidden, targets, teachers=[far])
    back = Teacher("jsd", 30 * hidden, weight)
    other = token_logprobs({"embed": weight}, TIED, -30 * hidden, targets, teachers=[back])
    np.testing.assert_allclose(one.divergences[0], other.divergences[0], atol=1e-6)
    assert (np.asarray(one.divergences[0]) <= np.log(2) + 1e-5).all()
    assert (np.asarray(one.divergences[0]) > 0.6).any()


def test_shifted_teachers_are_read_where_they_predict_the_token() -> None:
    hidden = jax.random.normal(jax.random.key(1), (1, 6, 16))
    weight = table(TIED, 3)
    tokens, segments = jnp.arange(6)[None], jnp.array([[1, 1, 1, 2, 2, 0]])
    # The teacher's own states, moved right by one: they equal the policy's at every target.
    aligned = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    run = partial(shift_logprobs, {"embed": weight}, TIED, hidden, tokens, segments)
    found = run(teachers=[Teacher("jsd", aligned, weight)])
    np.testing.assert_allclose(found.divergences[0], 0, atol=1e-6)
    moved = run(teachers=[Teacher("jsd", hidden, weight)]).divergences[0]
    np.testing.assert_array_equal(moved[0] > 1e-3, [False, True, True, False, True, False])


def test_a_teacher_gets_no_gradient_and_nothing_flows_off_the_targets() -> None:
    hidden = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, 16))
    weight, targets = table(TIED, 3), jnp.zeros((ROWS, LENGTH), jnp.int32).at[0].set(-1)

    def loss(theirs: Any, their_weight: Any, hidden: Any) -> Any:
        teachers = [Teacher(kind, theirs, their_weight) for kind in KINDS]
        found = token_logprobs({"embed": weight}, TIED, hidden, targets, teachers=teachers)
        return sum(x.sum() for x in found.divergences)

    gradients = jax.grad(loss, (0, 1, 2))(hidden[::-1], weight + 1, hidden.at[0].set(1e30))
    assert not np.asarray(gradients[0]).any() and not np.asarray(gradients[1]).any()
    assert not np.asarray(gradients[2][0]).any()
    assert np.isfinite(gradients[2]).all() and np.asarray(gradients[2][1]).any()


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    config, tokens = replace(TIED, vocab_size=5000), 512
    hidden = jax.ShapeDtypeStruct((4, tokens // 4, 16), jnp.float32)
    weight = jax.ShapeDtypeStruct((5000, 16), jnp.float32)
    targets = jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32)

    def loss(weight: Any, hidden: Any, targets: Any) -> Any:
        teachers = [Teacher("jsd", hidden[::-1], weight)]
        found = token_logprobs(
            {"embed": weight}, config, hidden, targets, teachers=teachers, chunk=32
        )
        return found.divergences[0].sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(weight, hidden, targets).compile()
    analysis: Any = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < tokens * config.vocab_size * 4 / 2
