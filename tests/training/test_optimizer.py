"""AdamW: decay mask, schedule per update, clipping of the whole gradient, float32 moments."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxagent import losses
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes
from jaxagent.models.config import ModelConfig
from jaxagent.models.transformer import init
from jaxagent.training.optimizer import adamw, decay_mask, learning_rate_schedule
from jaxagent.training.state import create_state
from jaxagent.training.step import make_update

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_size=8,
    qk_norm=True,
    qkv_bias=True,
    tie_embeddings=False,
)


@cache
def initial() -> Any:
    return jax.jit(lambda key: init(key, CONFIG))(jax.random.key(0))


def test_decay_spares_norms_and_biases() -> None:
    params = initial()
    mask = decay_mask({**params, "head": {"scale": jnp.ones(3)}})
    spared = {"attn_norm", "mlp_norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias"}
    assert {name for name, decays in mask["layers"].items() if not decays} == spared
    assert mask["embed"] and mask["unembed"]
    assert not mask["final_norm"] and not mask["head"]["scale"]
    # A gain per layer, stacked, is [layers, d]: two axes, but one a layer.
    assert not decay_mask({"layers": {"gain": jnp.ones((2, 3))}})["layers"]["gain"]


def test_decay_shrinks_the_matrices_alone() -> None:
    params = initial()
    optimizer = adamw(0.1, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    changes, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(changes["layers"]["q"], -0.05 * params["layers"]["q"], rtol=1e-6)
    assert not changes["layers"]["attn_norm"].any() and not changes["final_norm"].any()


def test_schedules() -> None:
    cosine = learning_rate_schedule(1.0, "cosine", warmup_steps=4, total_steps=14, end=0.1)
    assert [round(float(cosine(s)), 4) for s in (0, 1, 3, 4, 9, 14, 99)] == [
        0.25, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1,
    ]  # fmt: skip
    linear = learning_rate_schedule(1.0, "linear", total_steps=10)
    assert [float(linear(s)) for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert float(learning_rate_schedule(0.3)(10**6)) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="total_steps above"):
        learning_rate_schedule(1.0, "cosine", warmup_steps=5, total_steps=5)
    with pytest.raises(ValueError, match="kind must be"):
        learning_rate_schedule(1.0, "step")  # type: ignore[arg-type]


def test_one_schedule_step_and_one_clip_an_update_whatever_the_micro_batches() -> None:
    batch = pack(random_episodes(0, vocab_size=16), buckets=(64,), rows=4)
    schedule = learning_rate_schedule(0.1, warmup_steps=10)
    # Clipped to a norm that the part of every micro-batch exceeds: clipping the parts would
    # leave a sum of another norm, and four schedule steps an update another rate.
    clipped = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(schedule))
    objective = losses.combine(bc=(1.0, losses.supervised()))
    step = make_update(CONFIG, objective, clipped, micro_batches=4)
    state = create_state(initial(), clipped)
    norms = []
    for _ in range(3):
        state, metrics = step(state, batch)
        assert float(metrics["optimizer/grad_norm"]) > 1e-2
        norms.append(float(metrics["optimizer/update_norm"]))
    assert norms == pytest.approx([1e-5, 2e-5, 3e-5], rel=1e-3)


def test_training_learns_and_reports_its_rate() -> None:
    batch = pack(random_episodes(0, vocab_size=16), buckets=(64,), rows=4)
    optimizer = adamw(learning_rate_schedule(0.02, warmup_steps=2))
    step = make_update(CONFIG, losses.combine(bc=(1.0, losses.supervised())), optimizer)
    state = create_state(initial(), optimizer)
    history: list[dict[str, Any]] = []
    for _ in range(40):
        state, metrics = step(state, batch)
        history.append(metrics)
    assert float(history[-1]["bc/loss"]) < 0.5 * float(history[0]["bc/loss"])
    rates = [float(m["optimizer/learning_rate"]) for m in history[:3]]
    assert rates == pytest.approx([0.01, 0.02, 0.02])
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        assert leaf.dtype in (jnp.float32, jnp.int32)


def test_misuse_fails_at_construction() -> None:
    with pytest.raises(ValueError, match="max_grad_norm"):
        adamw(0.1, max_grad_norm=0.0)
    with pytest.raises(ValueError, match="weight_decay"):
        adamw(0.1, weight_decay=-1.0)
    with pytest.raises(ValueError, match="config="):
        create_state({}, adamw(0.1), mesh=jax.make_mesh((1,), ("data",)))
