"""The decoder against an independent float64 NumPy version, one token at a time."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent.models.attention import attention, packed_mask
from jaxagent.models.config import ModelConfig, RopeScaling
from jaxagent.models.transformer import Params, forward, init, unembedding

BASE = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=40,
)
LLAMA = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=64)
VARIANTS = {
    "plain": BASE,
    "qwen3": replace(BASE, qk_norm=True, rope_theta=1e6),
    "qwen2.5": replace(BASE, qkv_bias=True),
    "llama3": replace(BASE, rope_scaling=LLAMA, tie_embeddings=False, rope_theta=5e5),
    "one kv head": replace(BASE, num_kv_heads=1),
    "all kv heads": replace(BASE, num_kv_heads=4, norm_eps=1e-5),
}
run = jax.jit(lambda p, c, *a: forward(p, c, *a)[0], static_argnums=1)


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """Initial weights made larger, and norms and biases moved off 1 and 0."""
    leaves, tree = jax.tree.flatten(init(jax.random.key(seed), config))
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    moved = [x + 0.15 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, moved)


def reference_hidden(params: Params, config: ModelConfig, tokens: Any) -> np.ndarray:
    """Hidden states ``[n, D]`` of one sequence, written from the papers in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / math.sqrt((x**2).mean() + config.norm_eps) * scale

    def frequency(i: int) -> float:
        f = config.rope_theta ** (-2 * i / config.head_dim)
        s = config.rope_scaling
        if s is None:
            return f
        wavelength = 2 * math.pi / f
        if wavelength < s.original_max_len / s.high_freq_factor:
            return f
        if wavelength > s.original_max_len / s.low_freq_factor:
            return f / s.factor
        smooth = (s.original_max_len / wavelength - s.low_freq_factor) / (
            s.high_freq_factor - s.low_freq_factor
        )
        return (1 - smooth) * f / s.factor + smooth * f

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        half = config.head_dim // 2
        out = np.empty_like(x)
        for i in range(half):
            pair = complex(x[i], x[i + half]) * np.exp(1j * position * frequency(i))
            out[i], out[i + half] = pair.real, pair.imag
        return out

    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    hidden = [p["embed"][token] for token in tokens]
    for index in range(config.num_layers):
        w = {name: x[index] for name, x in p["layers"].items()}
        seen: list[tuple[np.ndarray, np.ndarray]] = []
        for position, x in enumerate(hidden):
            h = norm(x, w["attn_norm"])
            q, k, v = (h @ w[n] + w.get(f"{n}_bias", 0.0) for n in ("q", "k", "v"))
            q, k, v = (part.reshape(-1, dim) for part in (q, k, v))
            if config.qk_norm:
                q = np.stack([norm(head, w["q_norm"]) for head in q])
                k = np.stack([norm(head, w["k_norm"]) for head in k])
            q = np.stack([turn(head, position) for head in q])
            seen.append((np.stack([turn(head, position) for head in k]), v))
            mixed = []
            for head in range(config.num_heads):
                scores = np.array([q[head] @ ks[head // group] for ks, _ in seen]) / math.sqrt(dim)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed.append(
                    sum(a * vs[head // group] for a, (_, vs) in zip(weights, seen, strict=True))
                )
            x = x + np.concatenate(mixed) @ w["o"]
            h = norm(x, w["mlp_norm"])
            gate = h @ w["gate"]
            hidden[position] = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return np.stack([norm(x, p["final_norm"]) for x in hidden])


def packed_inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two rows: segments of 5, 7 and 3 padding; one of 9 and 6 padding."""
    tokens = np.random.default_rng(0).integers(0, BASE.vocab_size, (2, 15)).astype(np.int32)
    segments = np.array([[1] * 5 + [2] * 7 + [0] * 3, [1] * 9 + [0] * 6], np.int32)
    positions = np.array([[*range(5), *range(7), 0, 0, 0], [*range(9)] + [0] * 6], np.int32)
    return tokens, positions, segments


PIECES = ((0, slice(0, 5)), (0, slice(5, 12)), (1, slice(0, 9)))


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_rows_equal_the_reference_of_each_segment(name: str) -> None:
    config = VARIANTS[name]
    params = random_params(config)
    tokens, positions, segments = packed_inputs()
    hidden = run(params, config, tokens, positions, segments)
    assert hidden.shape == (2, 15, config.hidden_size)
    table = np.asarray(unembedding(params, config), np.float64)
    for row, piece in PIECES:
        expected = reference_hidden(params, config, tokens[row, piece])
        np.testing.assert_allclose(hidden[row, piece], expected, atol=3e-5, rtol=3e-5)
        np.testing.assert_allclose(
            hidden[row, piece] @ table, expected @ table, atol=5e-4, rtol=1e-4
        )


def test_llama3_scaling_reaches_all_three_bands() -> None:
    # Else the comparison above would not see an error in one of them.
    wavelengths = [2 * math.pi * 5e5 ** (2 * i / 8) for i in range(4)]
    assert wavelengths[0] < 64 / 4 and wavelengths[-1] > 64
    mixed = replace(VARIANTS["llama3"], rope_theta=1e3)
    wavelengths = [2 * math.pi * 1e3 ** (2 * i / 8) for i in range(4)]
    assert any(64 / 4 < w < 64 for w in wavelengths)
    params = random_params(mixed)
    tokens, positions, segments = packed_inputs()
    hidden = run(params, mixed, tokens, positions, segments)
    expected = reference_hidden(params, mixed, tokens[1, :9])
    np.testing.assert_allclose(hidden[1, :9], expected, atol=3e-5, rtol=3e-5)


def test_padding_and_neighbours_never_change_a_token() -> None:
    config = VARIANTS["qwen3"]
    params = random_params(config)
    tokens, positions, segments = packed_inputs()
    hidden = run(params, config, tokens, positions, segments)
    other = tokens.copy()
    other[segments == 0] = 7
    other[0, 5:12] = 3
    moved = positions.copy()
    moved[segments == 0] = 900
    changed = run(params, config, other, moved, segments)
    np.testing.assert_array_equal(hidden[0, :5], changed[0, :5])
    np.testing.assert_array_equal(hidden[1, :9], changed[1, :9])
    assert np.isfinite(hidden).all() and np.isfinite(changed).all()
    later = tokens.copy()
    later[1, 8] += 1
    np.testing.assert_array_equal(
        hidden[1, :8], run(params, config, later % 48, positions, segments)[1, :8]
    )


def test_remat_changes_no_gradient() -> None:
    tokens, positions, segments = packed_inputs()
    params = random_params(VARIANTS["qwen3"])

    def gradient(remat: Any) -> Params:
        config = replace(VARIANTS["qwen3"], remat=remat)
        loss = lambda p: (run(p, config, tokens, positions, segments) ** 3).sum()  # noqa: E731
        return jax.jit(jax.grad(loss))(params)

    plain = gradient("none")
    for remat in ("dots", "full"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4),
            plain,
            gradient(remat),
        )


def test_bfloat16_computes_near_float32_and_keeps_float32_angles() -> None:
    config = VARIANTS["qwen3"]
    half = replace(config, compute_dtype="bfloat16")
    params = init(jax.random.key(0), config)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    tokens, positions, segments = packed_inputs()
    # Far positions: bfloat16 angles would be off by whole turns there.
    far = positions + 30000
    exact = run(params, config, tokens, far, segments)
    rough = run(params, half, tokens, far, segments)
    assert exact.dtype == jnp.float32 and rough.dtype == jnp.bfloat16
    keep = segments > 0
    error = np.abs(np.asarray(rough, np.float32) - exact)[keep]
    assert 0 < error.max() < 0.06


def test_only_relative_positions_matter() -> None:
    config = VARIANTS["qwen3"]
    params = random_params(config)
    tokens, positions, segments = packed_inputs()
    keep = segments > 0
    np.testing.assert_allclose(
        run(params, config, tokens, positions, segments)[keep],
        run(params, config, tokens, positions + 11, segments)[keep],
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("implementation", "error"), [("splash", NotImplementedError), ("cudnn", RuntimeError)]
)
def test_an_implementation_that_cannot_run_says_so(
    implementation: Any, error: type[Exception]
) -> None:
    if jax.default_backend() == "gpu" and implementation == "cudnn":
        pytest.skip("cuDNN is there")
    x = jnp.zeros((1, 4, 2, 8))
    mask = packed_mask(jnp.ones((1, 4), jnp.int32))
    with pytest.raises(error, match=r"ModelConfig\.attention='xla'"):
        attention(x, x.swapaxes(1, 2), x.swapaxes(1, 2), mask, implementation)
