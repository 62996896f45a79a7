"""Saves step 1 completely, then is killed in the middle of saving step 2."""

import os
import signal
import sys
import time
from pathlib import Path

import jax.numpy as jnp

from jaxagent.training.checkpoint import Checkpoints
from jaxagent.training.state import TrainState


def state(step: int) -> TrainState:
    return TrainState(
        step=jnp.asarray(step, jnp.int32),
        params={"w": jnp.full((1 << 24,), float(step), jnp.float32)},
        opt_state=(),
        rng=jnp.zeros(2, jnp.uint32),
    )


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    checkpoints = Checkpoints(directory)
    checkpoints.save(state(1), {"cursor": 10})
    checkpoints.wait()
    checkpoints.save(state(2), {"cursor": 20})
    # Kill only once its files are being written, and before they are complete.
    while not list(directory.glob("2.*tmp*")):
        assert not (directory / "2").exists(), "the save was over before the kill"
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)
