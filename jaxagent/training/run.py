"""The run: batches of groups from the episode loop, updates, new weights for the sampler."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxagent.episodes.background import LoopThread
from jaxagent.episodes.loop import Collected, LoopStopped
from jaxagent.episodes.store import EpisodeWriter
from jaxagent.models.transformer import Params
from jaxagent.training.checkpoint import Checkpoints
from jaxagent.training.learner import Learner
from jaxagent.training.metrics import MetricsWriter, engine_metrics, episode_metrics


class Sampler(Protocol):
    """What a run needs of the rollout engine."""

    def set_params(self, params: Params, version: int) -> None: ...

    def stats(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Step:
    """One finished update, for whoever watches the run.

    ``metrics`` are the host's numbers of this step; those of the update itself arrive in
    the metrics file when the device has them.
    """

    version: int
    collected: Collected
    metrics: Mapping[str, float]


def train(
    loop: LoopThread,
    engine: Sampler,
    learner: Learner,
    writer: MetricsWriter,
    *,
    steps: int,
    store: EpisodeWriter | None = None,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 0,
    host_state: Callable[[], Mapping[str, Any]] = dict,
    on_step: Callable[[Step], None] | None = None,
) -> bool:
    """Trains until ``learner.version`` is ``steps`` or the tasks run out.

    Returns False when it was asked to stop before.

    A checkpoint is written every ``checkpoint_every`` updates, after the last one, and when
    the loop is asked to stop: parameters, optimiser and random state, and ``host_state()``
    with the loop's cursor under ``"loop"``. Resume by restoring both.
    """
    saved = -1

    def save() -> None:
        nonlocal saved
        if checkpoints is not None and saved != learner.version:
            saved = learner.version
            checkpoints.save(learner.state, {**host_state(), "loop": loop.state()})

    finished = True
    with ThreadPoolExecutor(1, thread_name_prefix="updates") as watcher:
        clock = _Clock(engine, watcher)
        while learner.version < steps:
            try:
                collected = loop.collect()
            except LoopStopped:
                finished = False
                break
            if not collected.groups:
                break  # a finite list of tasks has come to its end
            began = time.monotonic()
            version = learner.version
            update_metrics = learner.learn(collected.episodes)
            engine.set_params(learner.params(), learner.version)
            loop.set_version(learner.version)
            clock.watch(update_metrics, began)
            host = {
                **episode_metrics(collected, version=version),
                **clock.split(collected),
                **engine_metrics(engine.stats()),
                "learner/compilations": float(learner.compilations),
            }
            writer.write(learner.version, {**update_metrics, **host})
            if store is not None:
                store.append(collected.episodes, step=version)
            if checkpoint_every and learner.version % checkpoint_every == 0:
                save()
            if on_step is not None:
                on_step(Step(learner.version, collected, host))
    save()
    return finished


class _Clock:
    """Where the wall time of each step went, without waiting for the device."""

    def __init__(self, engine: Sampler, watcher: ThreadPoolExecutor) -> None:
        self._engine = engine
        self._watcher = watcher
        self._updates: list[Future[float]] = []
        self._stats = engine.stats()
        self._at = time.monotonic()

    def watch(self, metrics: Any, began: float) -> None:
        def finished() -> float:
            jax.block_until_ready(metrics)
            return time.monotonic() - began

        self._updates.append(self._watcher.submit(finished))

    def split(self, collected: Collected) -> dict[str, float]:
        stats, now = self._engine.stats(), time.monotonic()
        elapsed, self._at = max(now - self._at, 1e-9), now

        def gained(name: str) -> float:
            return float(stats[name]) - float(self._stats[name])

        done = [update for update in self._updates if update.done()]
        self._updates = [update for update in self._updates if not update.done()]
        split = {
            "time/step": elapsed,
            "time/wait": collected.wait_seconds,
            # Of the updates that ended since the last step: the newest one still runs.
            "time/learn": sum(update.result() for update in done),
            "time/sample": gained("device_seconds"),
            "time/idle": gained("idle_seconds"),
            "time/environment": sum(
                float(e.info.get("env_seconds", 0.0)) for e in collected.episodes
            ),
            "rollout/tokens_per_second": gained("tokens") / elapsed,
        }
        self._stats = stats
        return split
