"""Checkpoints of a whole run: train state and the host's own state, atomic and asynchronous."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxagent.models.config import ModelConfig
from jaxagent.training.state import TrainState, state_shardings

FORMAT = 1


class Checkpoints:
    """The checkpoints of one run in ``directory``, one a step.

    A checkpoint holds the parameters, optimiser, step and RNG of a :class:`TrainState`, and
    a JSON object of the host's (task cursor, configuration, counters). It is written to a
    temporary directory and renamed when complete: a run killed in the middle of a save
    restarts from the one before. Use as a context manager, or call ``close``.
    """

    def __init__(self, directory: str | Path, *, keep: int = 3, asynchronous: bool = True) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 checkpoint, got {keep}")
        # Orbax tells of every step it takes at INFO; failures still are raised.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=True,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=asynchronous,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return sorted(self._manager.all_steps(read=True))

    def save(self, state: TrainState, host: Mapping[str, Any] | None = None) -> int:
        """Starts writing ``state`` and ``host``; returns the step.

        Returns once the arrays are copied off the device, so the state may be donated at
        once; the files are written in the background. Waits for the save before it, and
        raises what that one failed with. A step that is saved already is left as it is.
        Raises ValueError when ``host`` is not JSON.
        """
        step = int(state.step)
        try:
            blob = json.loads(json.dumps(dict(host or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"host state must be plain JSON values: {error}") from None
        envelope = {"format": FORMAT, "arrays": _describe(state), "host": blob}
        if step in self._manager.all_steps():
            # A run that stops right after its interval: nothing has changed.
            return step
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_tree(state)), run=ocp.args.JsonSave(envelope)
            ),
        )
        return step

    def restore(
        self,
        template: TrainState,
        *,
        step: int | None = None,
        config: ModelConfig | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state and host state of ``step`` (the latest by default).

        ``template`` has the wanted structure; its leaves may be shapes
        (``jax.eval_shape``). With ``mesh`` (and ``config``) the arrays land sharded on it,
        whatever mesh wrote them, else on the first device. Raises FileNotFoundError when
        there is no such checkpoint and ValueError, naming the array, when it does not fit.
        """
        if (mesh is None) != (config is None):
            raise ValueError("restore needs both mesh and config to shard, or neither")
        step = self._find(step)
        envelope = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
        _check_fit(envelope.run, _describe(template), f"{self.directory}/{step}")
        if mesh is None or config is None:
            single = SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: single, template)
        else:
            shardings = state_shardings(template, config, mesh)
        target = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            template,
            shardings,
        )
        restored = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(_tree(target)))
        )
        return TrainState(**restored.state), envelope.run["host"]

    def read_host(self, step: int | None = None) -> dict[str, Any]:
        """The host state alone: what a restart needs before it can build a template."""
        step = self._find(step)
        envelope = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
        host: dict[str, Any] = envelope.run["host"]
        return host

    def wait(self) -> None:
        """Blocks until the last save is complete; raises what it failed with."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes the save in flight and stops."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _find(self, step: int | None) -> int:
        self._manager.wait_until_finished()
        steps = self.steps
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        if step is not None and step not in steps:
            raise FileNotFoundError(
                f"no checkpoint of step {step} in {self.directory}; there are: {steps}"
            )
        return steps[-1] if step is None else step


def _tree(state: TrainState) -> dict[str, Any]:
    fields = {
        "step": state.step,
        "params": state.params,
        "opt_state": state.opt_state,
        "rng": state.rng,
    }
    return fields if state.ema is None else {**fields, "ema": state.ema}


def _describe(state: TrainState) -> dict[str, str]:
    """Path -> "dtype[shape]" of every array."""
    return {
        jax.tree_util.keystr(path): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(_tree(state))
    }


def _check_fit(envelope: Mapping[str, Any], wanted: Mapping[str, str], where: str) -> None:
    if envelope.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {where} has format {envelope.get('format')}, this version reads {FORMAT}"
        )
    found = envelope["arrays"]
    for path in [*wanted, *found]:
        if found.get(path) != wanted.get(path):
            raise ValueError(
                f"checkpoint {where} does not fit this run: {path} is "
                f"{found.get(path, 'absent')} there and {wanted.get(path, 'absent')} here; "
                "use the model and optimiser it was saved with"
            )
