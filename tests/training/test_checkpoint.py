"""Checkpoints: bit-for-bit resume, atomicity under kill -9, clear errors."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import losses
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes
from jaxagent.models.config import ModelConfig
from jaxagent.models.transformer import init
from jaxagent.training.checkpoint import Checkpoints
from jaxagent.training.optimizer import adamw, learning_rate_schedule
from jaxagent.training.state import TrainState, create_state
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
)
OPTIMIZER = adamw(learning_rate_schedule(0.05, warmup_steps=4), weight_decay=0.1)


def fresh(seed: int = 0) -> TrainState:
    return create_state(init(jax.random.key(seed), CONFIG), OPTIMIZER, seed=seed)


def equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    batches = [pack(random_episodes(i, vocab_size=16), buckets=(64,), rows=4) for i in range(5)]
    update = make_update(CONFIG, losses.combine(bc=(1.0, losses.supervised())), OPTIMIZER)
    state = fresh(3)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for index, batch in enumerate(batches):
            state, _ = update(state, batch)
            # Donated by the next update while the files are still being written.
            checkpoints.save(state, {"cursor": index + 1, "config": {"lr": 0.05}})
    wanted = jax.device_get(state)

    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [4, 5]
        last, host = checkpoints.restore(jax.eval_shape(fresh))
        equal(last, wanted)
        assert host == {"cursor": 5, "config": {"lr": 0.05}}
        state, host = checkpoints.restore(fresh(1), step=4)
        assert checkpoints.read_host(4) == host == {"cursor": 4, "config": {"lr": 0.05}}
    assert int(state.step) == 4
    for batch in batches[host["cursor"] :]:
        state, _ = update(state, batch)
    equal(jax.device_get(state), wanted)


def test_a_save_may_be_repeated_and_must_be_json(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        assert checkpoints.save(fresh(), {"a": 1}) == 0
        assert checkpoints.save(fresh(), {"a": 1}) == 0
        assert checkpoints.steps == [0]
        for bad in ({"a": object()}, {"a": float("nan")}):
            with pytest.raises(ValueError, match="plain JSON"):
                checkpoints.save(fresh(), bad)


def test_missing_and_unfitting_checkpoints_are_named(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            checkpoints.restore(fresh())
        checkpoints.save(fresh())
        with pytest.raises(FileNotFoundError, match=r"step 7 in .*there are: \[0\]"):
            checkpoints.restore(fresh(), step=7)
        wide = fresh()
        wide.params["embed"] = jnp.zeros((17, 8))
        with pytest.raises(ValueError, match=r"'embed'.* is float32\[16, 8\] there and .*17, 8"):
            checkpoints.restore(wide)
        other = create_state(init(jax.random.key(0), CONFIG), adamw(0.1, max_grad_norm=None))
        with pytest.raises(ValueError, match=r"does not fit this run: .*absent"):
            checkpoints.restore(other)
        with pytest.raises(ValueError, match="both mesh and config"):
            checkpoints.restore(fresh(), config=CONFIG)
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, keep=0)


def test_kill_9_in_the_middle_of_a_save_loses_that_save_only(tmp_path: Path) -> None:
    child = Path(__file__).with_name("checkpoint_child.py")
    done = subprocess.run(
        [sys.executable, str(child), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.glob("2.*tmp*")), "the kill left no half-written checkpoint"

    template = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),  # type: ignore[arg-type]
        params={"w": jax.ShapeDtypeStruct((1 << 24,), jnp.float32)},
        opt_state=(),
        rng=jax.ShapeDtypeStruct((2,), jnp.uint32),  # type: ignore[arg-type]
    )
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [1]
        state, host = checkpoints.restore(template)
        assert host == {"cursor": 10} and int(state.step) == 1
        assert np.all(np.asarray(state.params["w"]) == 1.0)
        # Life goes on: the step that was lost can be written again.
        checkpoints.save(TrainState(jnp.asarray(2), {"w": jnp.zeros(2)}, (), jnp.zeros(2)))
        checkpoints.wait()
        assert checkpoints.steps == [1, 2]
    assert not list(tmp_path.glob("*tmp*"))


def test_a_moving_average_is_saved_and_missed(tmp_path: Path) -> None:
    def averaged() -> TrainState:
        return create_state(init(jax.random.key(0), CONFIG), OPTIMIZER, ema=True)

    batch = pack(random_episodes(0, vocab_size=16), buckets=(64,), rows=4)
    update = make_update(
        CONFIG, losses.combine(bc=(1.0, losses.supervised())), OPTIMIZER, ema_rate=0.25
    )
    start = jax.device_get(averaged().params)
    state, _ = update(averaged(), batch)
    state, _ = update(state, batch)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.ema, state.params)
    assert max(jax.tree.leaves(moved)) > 0
    first, _ = update(averaged(), batch)
    jax.tree.map(
        lambda a, s, p: np.testing.assert_allclose(a, s + 0.25 * (p - s), atol=1e-6),
        first.ema,
        start,
        first.params,
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        found, _ = checkpoints.restore(jax.eval_shape(averaged))
        equal(found, jax.device_get(state))
        with pytest.raises(ValueError, match="ema"):
            checkpoints.restore(jax.eval_shape(fresh))
