"""An engine over several devices; four forced host devices in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxagent.models.config import ModelConfig
from jaxagent.models.logprobs import shifted_logprobs
from jaxagent.models.sharding import make_mesh
from jaxagent.models.transformer import init
from jaxagent.rollout.engine import Engine, EngineConfig, SamplingConfig

MODEL = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    mlp_size=48,
    qk_norm=True,
    max_len=64,
)
CONFIG = EngineConfig(
    slots=3,
    max_len=64,
    prefill_buckets=(8,),
    prefill_rows=(1,),
    decode_block=4,
    context_buckets=(32, 64),
)


def main() -> None:
    """Two turns each of four sessions in three slots, with a swap of weights in between."""
    params = jax.tree.map(lambda x: x * 3, init(jax.random.key(0), MODEL))
    mesh = make_mesh(tensor=4)
    sampling = SamplingConfig(9, temperature=0.9)
    with Engine(params, MODEL, CONFIG, mesh=mesh) as engine:
        engine.warmup()
        sessions = [engine.open_session(i) for i in range(4)]
        logprobs: list[list[float]] = [[] for _ in sessions]
        sampled: list[list[int]] = [[] for _ in sessions]
        for _ in range(2):
            futures = [s.generate([i + 1, 7, 9], sampling) for i, s in enumerate(sessions)]
            for index, future in enumerate(futures):
                result = future.result(120)
                end = len(sessions[index].tokens)
                sampled[index] += range(end - len(result.tokens), end)
                logprobs[index] += result.logprobs.tolist()
            engine.set_params(params, version=1)
        stats = engine.stats()
    assert stats["compilations"] == stats["compilations_in_warmup"], stats
    assert stats["swaps"] >= 1
    for index, session in enumerate(sessions):
        tokens = np.asarray(session.tokens, np.int32)[None]
        positions = np.arange(tokens.shape[1])[None]
        expected = shifted_logprobs(
            params, MODEL, tokens, positions, np.ones_like(tokens), temperature=0.9
        ).logprobs[0]
        np.testing.assert_allclose(
            logprobs[index], np.asarray(expected)[sampled[index]], atol=1e-5, rtol=0
        )
    held = engine._device._cache.k[0].addressable_shards[0].data.shape
    assert held[1] == MODEL.num_kv_heads // 4, held
    print("agreed on", jax.device_count(), "devices")


def test_four_devices_sample_what_the_trainer_scores() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "agreed on 4 devices" in done.stdout


def test_meshes_that_cannot_serve_are_refused() -> None:
    params = init(jax.random.key(0), MODEL)
    # Devices in name only: enough to find what does not divide.
    same = list(jax.devices()[:1]) * 8
    with pytest.raises(ValueError, match="make an engine for each replica"):
        Engine(params, MODEL, CONFIG, mesh=make_mesh(data=2, tensor=4, devices=same))
    with pytest.raises(ValueError, match=r"kv_heads of 4 does not divide over 8 devices"):
        Engine(params, MODEL, CONFIG, mesh=make_mesh(tensor=8, devices=same))


if __name__ == "__main__":
    main()
