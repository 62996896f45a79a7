"""Distribution, truncation and edge cases of the device sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.rollout.sampling import RowSampling, SamplingConfig, row_uniforms, sample

DRAWS = 8192
draw = jax.jit(sample)


def settings(rows, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0):
    return RowSampling(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_p, np.float32),
        np.full(rows, min_p, np.float32),
        np.full(rows, top_k, np.int32),
    )


def softmax(x):
    e = np.exp(np.float64(x) - np.max(x))
    return e / e.sum()


def reference(logits, temperature, top_k, top_p, min_p):
    """Truncated, renormalised probabilities by sorting, in float64."""
    p = softmax(np.float64(logits) / temperature)
    order = np.argsort(-p)
    keep = np.ones_like(p, bool)
    if top_k:
        keep[order[top_k:]] = False
    q = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(q[order]) - q[order]
    keep[order[before >= top_p]] = False
    keep &= p >= min_p * p.max()
    return np.where(keep, p, 0) / p[keep].sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 8, 0.8, 0.0),
     (1.0, 0, 1.0, 0.2), (0.8, 12, 0.95, 0.05)],
)  # fmt: skip
def test_frequencies_match_the_truncated_softmax(temperature, top_k, top_p, min_p):
    vocab = 37  # prime: the vocabulary does not fold evenly
    logits = np.random.default_rng(1).normal(0, 1.5, vocab).astype(np.float32)
    uniforms = (np.arange(DRAWS) + 0.5).astype(np.float32) / DRAWS
    tokens, logprobs = draw(
        np.tile(logits, (DRAWS, 1)), uniforms, settings(DRAWS, temperature, top_p, min_p, top_k)
    )
    expected = reference(logits, temperature, top_k, top_p, min_p)
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    # Evenly spaced uniforms leave each frequency off by at most one draw at either end.
    np.testing.assert_allclose(counts, DRAWS * expected, atol=2.1)
    assert (expected[counts > 0] > 0).all()
    full = np.log(softmax(logits / temperature))
    np.testing.assert_allclose(logprobs, full[np.asarray(tokens)], atol=1e-5)


def test_session_draws_follow_the_softmax():
    logits = np.random.default_rng(2).normal(0, 1.0, 37).astype(np.float32)
    keys = np.stack([np.zeros(64), np.arange(64)], 1).astype(np.uint32)
    uniforms = jax.jit(row_uniforms)(keys, np.tile(np.arange(DRAWS // 64), (64, 1)))
    assert float(uniforms.min()) >= 0 and float(uniforms.max()) < 1
    assert len(np.unique(uniforms)) > 0.99 * DRAWS
    tokens, _ = draw(np.tile(logits, (DRAWS, 1)), uniforms.reshape(-1), settings(DRAWS))
    expected = DRAWS * softmax(logits)
    chi2 = ((np.bincount(np.asarray(tokens), minlength=37) - expected) ** 2 / expected).sum()
    assert chi2 < 80  # 36 degrees of freedom: a right sampler exceeds this once in 30,000


def test_greedy_takes_the_likeliest_token_at_temperature_one():
    logits = np.random.default_rng(3).normal(0, 3, (DRAWS, 37)).astype(np.float32)
    tokens, logprobs = draw(logits, np.zeros(DRAWS, np.float32), settings(DRAWS, temperature=0.0))
    np.testing.assert_array_equal(tokens, logits.argmax(1))
    expected = jax.nn.log_softmax(jnp.asarray(logits)).max(1)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-23])
def test_extreme_uniforms_never_draw_an_impossible_token(uniform):
    logits = np.random.default_rng(4).normal(0, 1, (DRAWS, 37)).astype(np.float32)
    logits[:, ::2] = -np.inf
    logits[:, -3:] = -np.inf
    uniforms = np.full(DRAWS, uniform, np.float32)
    tokens, logprobs = draw(logits, uniforms, settings(DRAWS))
    assert (np.asarray(tokens) < 34).all() and (np.asarray(tokens) % 2 == 1).all()
    assert np.isfinite(logprobs).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", 0), ("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1),
     ("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.0), ("stop_tokens", (-1,)),
     ("stop_strings", ("",))],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingConfig(**{"max_new_tokens": 1, field: value})
