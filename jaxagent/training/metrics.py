"""What a run measures: the numbers of its episodes, and the file they all go to.

Every name is in the table of ``jaxagent.training.metric_names``.
"""

import json
import math
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.groups import staleness
from jaxagent.episodes.loop import Collected
from jaxagent.training.evaluate import is_success
from jaxagent.training.metric_names import METRICS, Metric, find_metric


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _kind_count(episode: Episode, kind: Kind) -> int:
    return sum(int((context.kinds == kind).sum()) for context in episode.contexts)


def episode_metrics(collected: Collected, *, version: int | None = None) -> dict[str, float]:
    """The numbers of a batch of groups; means are over its valid episodes, 0 over none.

    ``version`` is that of the weights to be updated; by default the loop's at delivery.
    """
    version = collected.version if version is None else version
    valid = [episode for episode in collected.episodes if episode.valid]
    groups = [group for group in collected.groups if group.valid]
    solved = [[is_success(episode) for episode in group.valid] for group in groups]
    flat = [len({episode.reward for episode in group.valid}) == 1 for group in groups]
    ages = [float(staleness(group, version)) for group in groups]
    turns = [episode.num_turns for episode in valid]
    lengths = [episode.num_tokens for episode in valid]
    rewards = [episode.reward for episode in valid]
    causes = Counter(episode.truncated for episode in valid if episode.truncated)

    def info(name: str) -> list[float]:
        return [float(episode.info.get(name, 0.0)) for episode in valid]

    counts = {
        name: float(collected.counts.get(name, 0))
        for name in (
            "episodes/finished",
            "episodes/retried",
            "groups/started",
            "groups/dropped_invalid",
            "groups/dropped_stale",
            "groups/filtered",
            "groups/annotation_failed",
            "tasks/quarantined",
            "tasks/skipped",
            "environments/close_failed",
        )
    }
    invalid = {
        n: float(c) for n, c in collected.counts.items() if n.startswith("episodes/invalid/")
    }
    return {
        **counts,
        **invalid,
        "episodes/invalid": sum(invalid.values()),
        "episodes/valid": float(len(valid)),
        "episodes/success": _mean([float(is_success(episode)) for episode in valid]),
        "episodes/reward_mean": _mean(rewards),
        "episodes/reward_std": statistics.pstdev(rewards) if rewards else 0.0,
        "episodes/truncated": causes.total() / max(1, len(valid)),
        **{f"episodes/truncated/{cause}": n / len(valid) for cause, n in causes.items()},
        "episodes/declared_done": _mean([float(e.info.get("finished") == "done") for e in valid]),
        "episodes/malformed": sum(info("malformed")) / max(1, sum(turns)),
        "episodes/skills_unparsable": float(sum("skills_error" in e.info for e in valid)),
        "episodes/empty": float(sum(episode.num_action_tokens == 0 for episode in valid)),
        "episodes/turns_mean": _mean(turns),
        "episodes/turns_max": float(max(turns, default=0)),
        "episodes/action_tokens_mean": _mean([e.num_action_tokens for e in valid]),
        "episodes/observation_tokens_mean": _mean(
            [_kind_count(e, Kind.OBSERVATION) for e in valid]
        ),
        "episodes/tokens_mean": _mean(lengths),
        "episodes/tokens_max": float(max(lengths, default=0)),
        "episodes/seconds_mean": _mean(info("seconds")),
        "episodes/seconds_max": max(info("seconds"), default=0.0),
        "episodes/environment_seconds_mean": _mean(info("env_seconds")),
        "episodes/sample_seconds_mean": _mean(info("sample_seconds")),
        "groups/count": float(len(groups)),
        "groups/no_signal": float(sum(flat)),
        "groups/solved": float(sum(map(all, solved))),
        "groups/unsolved": float(sum(not any(tries) for tries in solved)),
        "groups/staleness_mean": _mean(ages),
        "groups/staleness_max": max(ages, default=0.0),
    }


def engine_metrics(stats: Mapping[str, float]) -> dict[str, float]:
    """``Engine.stats()`` under the table's names; counts since the engine started."""
    names = ("tokens", "prefill_tokens", "copies", "evictions")
    compilations = stats["compilations"] - stats["compilations_in_warmup"]
    return {
        **{f"engine/{name}": float(stats[name]) for name in names},
        "engine/compilations": float(compilations),
    }


class MetricsWriter:
    """Writes ``<directory>/metrics.jsonl`` and, on request, TensorBoard files beside it.

    ``write`` returns at once: values still on the device are fetched together, every
    ``interval`` writes or ``seconds``, in a thread of the writer's own. Whole lines are
    appended, so a killed run leaves a readable file. ``extra`` declares further names.
    Raises ModuleNotFoundError when TensorBoard is asked for and tensorboardX is missing.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        interval: int = 10,
        seconds: float = 15.0,
        tensorboard: bool = False,
        extra: Mapping[str, Metric] | None = None,
    ) -> None:
        if interval < 1:
            raise ValueError(f"MetricsWriter interval must be at least 1, got {interval}")
        self.path = Path(directory) / "metrics.jsonl"
        self._table = {**METRICS, **(extra or {})}
        self._known: set[str] = set()
        self._interval = interval
        self._seconds = seconds
        self._pending: list[tuple[int, float, dict[str, Any]]] = []
        self._since = time.monotonic()
        self._board = _tensorboard(directory) if tensorboard else None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, _whole_lines(self.path.read_bytes()))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._running: list[Future[None]] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records scalars (Python, numpy or jax) at a step; several calls a step add up.

        Raises UnknownMetricError for a name not in the table, ValueError for a value that
        is not a scalar, and whatever an earlier write failed with.
        """
        for name, value in metrics.items():
            if name not in self._known:
                find_metric(name, self._table)
                self._known.add(name)
            if np.ndim(value) != 0:
                raise ValueError(f"metric {name!r} must be a scalar, got shape {np.shape(value)}")
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        with self._lock:
            if self._closed:
                raise RuntimeError("this MetricsWriter is closed")
            self._pending.append((step, time.time(), dict(metrics)))
            due = len(self._pending) >= self._interval
            if due or time.monotonic() - self._since >= self._seconds:
                self._submit()

    def flush(self) -> None:
        """Returns once all that was written is in the file."""
        with self._lock:
            self._submit()
            running, self._running = self._running, []
        for future in running:
            future.result()

    def close(self) -> None:
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._thread.shutdown()
            os.close(self._file)
            if self._board is not None:
                self._board.close()

    def _submit(self) -> None:
        rows, self._pending = self._pending, []
        self._since = time.monotonic()
        done = [future for future in self._running if future.done()]
        self._running = [future for future in self._running if not future.done()]
        if rows:
            self._running.append(self._thread.submit(self._store, rows))
        for future in done:
            future.result()

    def _store(self, rows: Iterable[tuple[int, float, dict[str, Any]]]) -> None:
        found = [(step, at, _floats(metrics)) for step, at, metrics in jax.device_get(list(rows))]
        lines = [{"step": int(step), "time": float(at), **m} for step, at, m in found]
        text = "".join(
            json.dumps({k: _finite(v) for k, v in line.items()}) + "\n" for line in lines
        )
        size = os.fstat(self._file).st_size
        data = text.encode()
        if os.write(self._file, data) != len(data):
            os.ftruncate(self._file, size)
            raise OSError(f"could not append to {self.path}: is the disk full?")
        if self._board is not None:
            for step, at, metrics in found:
                for name, value in metrics.items():
                    self._board.add_scalar(name, value, int(step), walltime=float(at))
            self._board.flush()


def read_metrics(path: str | os.PathLike[str]) -> dict[int, dict[str, float]]:
    """``step -> name -> value`` of a metrics file (or its directory), in order of steps.

    The last value of a name wins, so steps repeated after a resume replace the old ones;
    a line cut short by a crash is ignored.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"no metrics at {path}: give a run's directory or metrics.jsonl")
    data = path.read_bytes()
    steps: dict[int, dict[str, float]] = {}
    for line in data[: _whole_lines(data)].splitlines():
        row = json.loads(line)
        step = row.pop("step")
        steps.setdefault(step, {}).update({name: float(value) for name, value in row.items()})
    return dict(sorted(steps.items()))


def _whole_lines(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _finite(value: float) -> float | str:
    """JSON has no NaN and no infinity: they are written as text that ``float`` reads."""
    return value if math.isfinite(value) else str(value)


def _tensorboard(directory: str | os.PathLike[str]) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "tensorboard=True needs tensorboardX: pip install 'jaxagent[tensorboard]'"
        ) from None
    return SummaryWriter(str(directory), write_to_disk=True)
