"""The asyncio driver: tasks in, groups of finished episodes out.

Task i of the run gives group i of ``group_size`` episodes. Groups are started as far
ahead of the learner as ``max_staleness`` allows and no further, so that both the groups
in flight and the groups waiting are bounded by ``(max_staleness + 1) * groups_per_batch``.
With ``max_staleness=0`` nothing is sampled while the learner works, groups are delivered
in task order, and a run is reproducible bit for bit whatever order episodes end in.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from jaxagent.episodes.deadlines import describe, error_cause
from jaxagent.episodes.engine import Engine
from jaxagent.episodes.environment import Environment
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.groups import Group, HasId, episode_seed, staleness
from jaxagent.episodes.history import Rewrite
from jaxagent.episodes.loop_types import (
    AlwaysStale,
    Collected,
    EnvironmentsFailing,
    LoopConfig,
    LoopStopped,
    NoTasksLeft,
)
from jaxagent.episodes.protocol import ActionProtocol, check_notice
from jaxagent.episodes.rollout import Limits, run_episode

__all__ = [
    "AlwaysStale",
    "Collected",
    "EnvironmentsFailing",
    "EpisodeLoop",
    "LoopConfig",
    "LoopStopped",
    "NoTasksLeft",
    "TaskSource",
]

log = logging.getLogger(__name__)

# Failures that belong to the task, not to a passing fault: the same again on a retry.
PERMANENT = frozenset({"PromptTooLong"})

# After so many batches of groups in a row that ``after_group`` filtered out, one is delivered.
MAX_FILTERED_BATCHES = 10

AfterGroup = Callable[[Group], Awaitable[Group | None]]


class TaskSource(Protocol):
    """Task ``i`` of the run; any list will do. IndexError says there are no more."""

    def __getitem__(self, index: int, /) -> HasId: ...


class EpisodeLoop:
    """Drives environments and sampler; use as ``async with EpisodeLoop(...) as loop``.

    ``make_environment`` must be quick (the slow part belongs in ``reset``); it is called
    anew for every try. ``rewrite`` is for histories that do not only grow (see ``history``).
    ``after_group`` gets each group that has enough valid episodes, in the event loop and beside
    other groups' sampling: what it returns is delivered (annotated episodes, say), and for
    None another group is sampled in its place (DAPO's dynamic sampling). ``state`` is what
    ``state()`` of an earlier loop returned.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: TaskSource,
        make_environment: Callable[[Any], Environment],
        protocol: ActionProtocol,
        sampling: Any,
        config: LoopConfig,
        limits: Limits | None = None,
        *,
        rewrite: Rewrite | None = None,
        after_group: AfterGroup | None = None,
        version: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._tasks = tasks
        self._make_environment = make_environment
        self._protocol = protocol
        self._sampling = sampling
        self._config = config
        self._limits = limits or Limits()
        check_notice(protocol, self._limits.max_observation_tokens)
        self._rewrite = rewrite
        self._after_group = after_group
        self._filtered_row = 0
        self._version = version
        state = state or {}
        self._next = int(state.get("next_index", 0))
        self._first = self._next
        self._consumed: set[int] = set(state.get("consumed", ()))
        self._quarantined: set[str] = set(state.get("quarantined", ()))
        self._failures: Counter[str] = Counter(state.get("failures", {}))
        self._running: dict[int, asyncio.Task[None]] = {}
        self._finished: dict[int, Group] = {}
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._changed = asyncio.Event()
        self._live = 0  # groups started and not dropped
        self._collects = 0
        self._failed_row: list[str] = []
        self._skipped_row = 0
        self._stale_row = 0
        self._exhausted = False
        self._stopping = False
        self._error: BaseException | None = None
        self._counts: Counter[str] = Counter()

    async def __aenter__(self) -> "EpisodeLoop":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def version(self) -> int:
        return self._version

    def state(self) -> dict[str, Any]:
        """Where the run stands in its tasks, for a checkpoint (JSON types).

        Groups not yet delivered are not part of it: a run resumed from here samples them
        again.
        """
        return {
            "next_index": self._first,
            "consumed": sorted(self._consumed),
            "quarantined": sorted(self._quarantined),
            "failures": dict(sorted(self._failures.items())),
        }

    def set_version(self, version: int) -> None:
        """Tells the loop that the engine has new weights (after ``engine.set_params``)."""
        if version < self._version:
            raise ValueError(f"version went back from {self._version} to {version}")
        self._version = version

    def request_stop(self) -> None:
        """Starts no more episodes and cancels those that run; ``collect`` then raises."""
        self._stopping = True
        for task in self._running.values():
            task.cancel()
        self._changed.set()

    async def close(self) -> None:
        """Stops, and returns once every environment is closed."""
        self.request_stop()
        while self._running:
            await asyncio.wait(list(self._running.values()))
            await asyncio.sleep(0)  # lets the done callbacks empty ``_running``

    async def collect(self) -> Collected:
        """The next ``groups_per_batch`` groups; fewer when the tasks have run out.

        Raises LoopStopped, EnvironmentsFailing, NoTasksLeft, AlwaysStale, or what the engine
        raised.
        """
        began = time.monotonic()
        self._collects += 1
        try:
            while not self._ready():
                await self._changed.wait()
        except asyncio.CancelledError:
            self._collects -= 1  # what was started for it serves the next call
            raise
        if self._stopping or self._error is not None:
            await self.close()
            raise self._error or LoopStopped("stopped on request")
        # In the order they ended. Synchronously these are all there are, whichever was quick.
        chosen = sorted(list(self._finished)[: self._config.groups_per_batch])
        groups = tuple(self._finished.pop(index) for index in chosen)
        for index in chosen:
            self._consume(index)
        self._stale_row = 0
        counts, self._counts = dict(self._counts), Counter()
        return Collected(groups, self._version, counts, time.monotonic() - began)

    def _ready(self) -> bool:
        """Whether ``collect`` can return or must raise; starts what may be started."""
        self._changed.clear()
        self._drop_stale()
        self._fill()
        return (
            self._stopping
            or self._error is not None
            or len(self._finished) >= self._config.groups_per_batch
            or (self._exhausted and not self._running)
        )

    def _fill(self) -> None:
        """Starts groups as far ahead as staleness allows."""
        # Batch number n is trained on at version n; a group started now is drawn with the
        # version of the latest batch collected, or a later one.
        batches = self._collects + self._config.max_staleness
        while (
            not (self._stopping or self._exhausted or self._error)
            and self._live < batches * self._config.groups_per_batch
        ):
            index = self._next
            self._next += 1
            if index < self._first or index in self._consumed:
                continue
            try:
                task = self._tasks[index]
            except IndexError:
                self._exhausted = True
                break
            if task.id in self._quarantined:
                self._skip(index)
                continue
            self._skipped_row = 0
            self._live += 1
            self._counts["groups/started"] += 1
            running = asyncio.get_running_loop().create_task(self._run_group(index, task))
            self._running[index] = running
            running.add_done_callback(partial(self._group_ended, index))

    def _skip(self, index: int) -> None:
        self._consume(index)
        self._counts["tasks/skipped"] += 1
        self._skipped_row += 1
        if self._skipped_row > 2 * len(self._quarantined) + 1:
            self._fail(
                NoTasksLeft(
                    f"all {len(self._quarantined)} tasks are quarantined after their "
                    "environments failed; see the log for the causes"
                )
            )

    def _group_ended(self, index: int, done: "asyncio.Task[None]") -> None:
        del self._running[index]
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._fail(error)
        if done.cancelled() or error is not None:
            self._live -= 1
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._error = self._error or error
        self._changed.set()

    def _consume(self, index: int) -> None:
        self._consumed.add(index)
        while self._first in self._consumed:
            self._consumed.remove(self._first)
            self._first += 1

    def _drop_stale(self) -> None:
        for index, group in list(self._finished.items()):
            if staleness(group, self._version) > self._config.max_staleness:
                del self._finished[index]
                self._live -= 1
                self._counts["groups/dropped_stale"] += 1
                self._consume(index)
                self._stale_row += 1
        # The version stands still while collect waits, so only groups already in flight
        # can be stale.
        if self._stale_row > 2 * (self._config.max_staleness + 1) * self._config.groups_per_batch:
            self._fail(
                AlwaysStale(
                    f"{self._stale_row} groups in a row were drawn more than max_staleness="
                    f"{self._config.max_staleness} versions before version {self._version}: "
                    "call engine.set_params(params, version) before loop.set_version(version)"
                )
            )

    async def _run_group(self, index: int, task: HasId) -> None:
        config = self._config
        gate = _Gate(min(config.group_size, config.max_concurrent), config.gather_seconds)
        async with asyncio.TaskGroup() as running:
            tries = [
                running.create_task(self._run_slot(index, task, rollout, gate))
                for rollout in range(config.group_size)
            ]
        episodes = tuple(one.result() for one in tries)
        self._counts["episodes/finished"] += len(episodes)
        for episode in episodes:
            if not episode.valid:
                self._counts[f"episodes/invalid/{error_cause(episode.error)}"] += 1
            if "close_error" in episode.info:
                self._counts["environments/close_failed"] += 1
        group = Group(index, task.id, _group_id(index, task), episodes)
        if group.valid:
            self._failed_row.clear()
        if len(group.valid) < config.min_valid:
            self._drop_invalid(group)
            return
        self._failures.pop(task.id, None)
        chosen = await self._choose(group)
        if chosen is None:
            self._live -= 1
            self._counts["groups/filtered"] += 1
            self._consume(index)
        else:
            self._finished[index] = chosen

    async def _choose(self, group: Group) -> Group | None:
        """What ``after_group`` makes of the group; as it is where that fails."""
        if self._after_group is None:
            return group
        try:
            chosen = await self._after_group(group)
        except Exception as error:
            self._counts["groups/annotation_failed"] += 1
            log.warning("after_group failed on task %s: %s", group.task_id, describe(error))
            return group
        # A run in which no group passes must not sample for ever.
        self._filtered_row = 0 if chosen is not None else self._filtered_row + 1
        if self._filtered_row > MAX_FILTERED_BATCHES * self._config.groups_per_batch:
            return group
        return chosen

    def _drop_invalid(self, group: Group) -> None:
        config = self._config
        self._live -= 1
        self._counts["groups/dropped_invalid"] += 1
        self._consume(group.index)
        errors = [str(e.error) for e in group.episodes if not e.valid]
        permanent = any(error_cause(error) in PERMANENT for error in errors)
        self._failures[group.task_id] += 1
        if permanent or self._failures[group.task_id] >= config.quarantine_after:
            del self._failures[group.task_id]
            self._quarantined.add(group.task_id)
            self._counts["tasks/quarantined"] += 1
            log.warning("task %s quarantined: %s", group.task_id, errors[0])
        if group.valid:
            return
        self._failed_row.append(errors[0])
        if len(self._failed_row) >= config.max_failed_groups:
            cause, count = Counter(map(error_cause, self._failed_row)).most_common(1)[0]
            example = next(e for e in self._failed_row if error_cause(e) == cause)
            self._fail(
                EnvironmentsFailing(
                    f"{len(self._failed_row)} groups in a row had no valid episode; "
                    f"{count} of them failed with {example!r}. Fix the environment, or raise "
                    "LoopConfig.max_failed_groups"
                )
            )

    async def _run_slot(self, index: int, task: HasId, rollout: int, gate: "_Gate") -> Episode:
        async with self._slots:
            try:
                return await self._run_with_retries(index, task, rollout, gate)
            finally:
                gate.leave(rollout)

    async def _run_with_retries(
        self, index: int, task: HasId, rollout: int, gate: "_Gate"
    ) -> Episode:
        config = self._config
        seed = episode_seed(config.seed, index, rollout)
        attempt = 0
        while True:
            episode = await self._run_once(index, task, seed, lambda: gate.arrive(rollout))
            cause = error_cause(episode.error)
            if episode.valid or cause in PERMANENT or attempt == config.retries:
                info = {"index": index, "rollout": rollout, "seed": seed, "attempts": attempt + 1}
                return replace(episode, info={**info, **episode.info})
            self._counts["episodes/retried"] += 1
            log.info("retrying task %s: %s", task.id, episode.error)
            await asyncio.sleep(config.retry_delay * 2**attempt)
            attempt += 1

    async def _run_once(
        self, index: int, task: HasId, seed: int, arrive: Callable[[], Awaitable[None]]
    ) -> Episode:
        group_id = _group_id(index, task)
        try:
            environment = self._make_environment(task)
        except Exception as error:
            return Episode(task.id, group_id, (), 0.0, valid=False, error=describe(error))
        return await run_episode(
            environment,
            self._engine,
            self._protocol,
            self._limits,
            self._sampling,
            key=seed,
            task_id=task.id,
            group_id=group_id,
            rewrite=self._rewrite,
            before_sampling=arrive,
        )


def _group_id(index: int, task: HasId) -> str:
    return f"{index}:{task.id}"


class _Gate:
    """Holds a group's first prompts back for a moment, so that they reach the engine together.

    Opens for good when every episode has arrived or left, or when one has waited ``seconds``.
    """

    def __init__(self, expected: int, seconds: float) -> None:
        self._expected = expected
        self._seconds = seconds
        self._seen: set[int] = set()
        self._open = asyncio.Event()

    async def arrive(self, rollout: int) -> None:
        self.leave(rollout)
        if self._open.is_set():
            return
        try:
            await asyncio.wait_for(self._open.wait(), self._seconds)
        except TimeoutError:
            self._open.set()

    def leave(self, rollout: int) -> None:
        self._seen.add(rollout)
        if len(self._seen) >= self._expected:
            self._open.set()
