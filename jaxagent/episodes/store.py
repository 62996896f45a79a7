"""Finished episodes on disk: token arrays in zarr, and an index that commits them.

``<path>/{tokens,kinds,turn_ids,logprobs,versions}`` are one-dimensional zarr v3 arrays
(TensorStore), all contexts end to end. ``<path>/index.jsonl`` has a line for each append:
where its tokens lie, and everything about its episodes but the tokens. Tokens are written
and synced first, then the line; an append exists from the moment its line ends with a
newline. What a killed writer left beyond that is ignored by readers and overwritten by
the next writer, and a store can be read while it is written.
"""

import fcntl
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import tensorstore as ts

from jaxagent.episodes.episode import Context, Episode

FIELDS: Mapping[str, str] = {
    "tokens": "int32",
    "kinds": "uint8",
    "turn_ids": "int32",
    "logprobs": "float32",
    "versions": "int32",
}
CHUNK = 1 << 16
MAX_BACKLOG = 64  # appends that may wait for the disk


@dataclass(frozen=True)
class Record:
    """An episode's line in the index: all but its tokens.

    ``spans`` are ``(start, length)`` of its contexts in the token arrays. ``advantage`` is
    whatever single number the writer was given for it.
    """

    step: int
    task_id: str
    group_id: str
    reward: float
    turn_rewards: tuple[float, ...]
    valid: bool
    truncated: str | None
    error: str | None
    info: Mapping[str, Any]
    advantage: float | None
    spans: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.spans)


class EpisodeWriter:
    """Appends episodes; the only writer of its store (RuntimeError for a second one)."""

    # The disk is written in a thread, so ``append`` costs the caller next to nothing.

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_file = open(self.path / ".lock", "w")  # noqa: SIM115  (held while open)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise RuntimeError(
                f"{self.path} is being written by another process: give each run its own store"
            ) from None
        self._arrays = {name: _open(self.path, name, create=True) for name in FIELDS}
        self._index = os.open(self.path / "index.jsonl", os.O_RDWR | os.O_CREAT, 0o644)
        lines, self._index_end = _read_lines(self.path / "index.jsonl", 0)
        os.ftruncate(self._index, self._index_end)
        _sync_directory(self.path)
        self._end = max((_line_end(line) for line in lines), default=0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="episode-store")
        self._pending: deque[Future[None]] = deque()
        self._closed = False

    def __enter__(self) -> "EpisodeWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(
        self,
        episodes: Sequence[Episode],
        *,
        step: int,
        advantages: Sequence[float] | None = None,
    ) -> None:
        if not episodes:
            return
        contexts = [context for episode in episodes for context in episode.contexts]
        start, end = self._end, self._end + sum(map(len, contexts))
        if end > start:
            writes = [self._write(name, contexts, start, end) for name in FIELDS]
            for write in writes:
                write.result()
        numbers = advantages if advantages is not None else [None] * len(episodes)
        line = {
            "step": int(step),
            "start": start,
            "end": end,
            "episodes": [
                _header(episode, number) for episode, number in zip(episodes, numbers, strict=True)
            ],
        }
        self._commit((json.dumps(line, default=_plain) + "\n").encode())
        self._end = end

    def _write(self, name: str, contexts: Sequence[Context], start: int, end: int) -> Any:
        values = np.concatenate([getattr(context, name) for context in contexts])
        if self._arrays[name].shape[0] < end:  # else what a killed writer left is overwritten
            self._arrays[name] = self._arrays[name].resize(exclusive_max=[end]).result()
        return self._arrays[name][start:end].write(values.astype(FIELDS[name], copy=False))

    def _commit(self, line: bytes) -> None:
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._index, line[written:], self._index_end + written)
            os.fsync(self._index)
        except BaseException:
            os.ftruncate(self._index, self._index_end)
            raise
        self._index_end += len(line)

    def append(
        self,
        episodes: Sequence[Episode],
        *,
        step: int,
        advantages: Sequence[float] | None = None,
    ) -> "Future[None]":
        """Writes the episodes; once the future is done all are committed, or none is.

        ``step`` is the learner's; ``advantages`` one number an episode, for people. Raises
        what an earlier append failed with, so a full disk does not go unseen.
        """
        if advantages is not None and len(advantages) != len(episodes):
            raise ValueError(
                f"advantages must be one number an episode: got {len(advantages)} for "
                f"{len(episodes)}"
            )
        if self._closed:
            raise RuntimeError("this EpisodeWriter is closed")
        while self._pending and (self._pending[0].done() or len(self._pending) >= MAX_BACKLOG):
            self._pending.popleft().result()
        future = self._thread.submit(self._append, episodes, step=step, advantages=advantages)
        self._pending.append(future)
        return future

    def flush(self) -> None:
        """Returns once all that was appended is committed; raises what one failed with."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            self._closed = True
            os.close(self._index)
            self._lock_file.close()


class EpisodeReader:
    """Reads a store, also one that is being written. Raises FileNotFoundError without one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not (self.path / "index.jsonl").is_file():
            raise FileNotFoundError(
                f"no episode store at {self.path}: give the directory that a run wrote its "
                "episodes to (it holds index.jsonl)"
            )
        self._records: list[Record] = []
        self._position = 0
        self._arrays: dict[str, ts.TensorStore] = {}

    def records(self) -> Sequence[Record]:
        """All episodes committed by now, in the order they were written."""
        lines, self._position = _read_lines(self.path / "index.jsonl", self._position)
        for line in lines:
            self._records.extend(_parse(line))
        return self._records

    def episode(self, record: Record) -> Episode:
        """The whole episode of a record."""
        return Episode(
            task_id=record.task_id,
            group_id=record.group_id,
            contexts=tuple(self._context(start, length) for start, length in record.spans),
            reward=record.reward,
            turn_rewards=record.turn_rewards,
            valid=record.valid,
            truncated=record.truncated,
            error=record.error,
            info=record.info,
        )

    def __iter__(self) -> Iterator[Episode]:
        return (self.episode(record) for record in list(self.records()))

    def __len__(self) -> int:
        return len(self.records())

    def _context(self, start: int, length: int) -> Context:
        end = start + length
        if any(self._arrays[n].shape[0] < end if n in self._arrays else True for n in FIELDS):
            self._arrays = {name: _open(self.path, name) for name in FIELDS}
        reads = {name: self._arrays[name][start:end].read() for name in FIELDS}
        return Context(**{name: np.asarray(read.result()) for name, read in reads.items()})


def _open(path: Path, name: str, *, create: bool = False) -> ts.TensorStore:
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path / name)},
    }
    if create:
        spec["metadata"] = {
            "shape": [0],
            "data_type": FIELDS[name],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [CHUNK]}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1}},
            ],
        }
        # An existing array has grown: only its shape may differ from the spec's.
        existing = (path / name / "zarr.json").exists()
        if existing:
            del spec["metadata"]["shape"]
        return ts.open(spec, open=existing, create=not existing).result()
    return ts.open(spec, open=True, read=True).result()


def _read_lines(path: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """The complete lines from ``position`` on, and where they end."""
    with open(path, "rb") as file:
        file.seek(position)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return [json.loads(line) for line in data[:end].splitlines()], position + end


def _line_end(line: Mapping[str, Any]) -> int:
    return int(line["end"])


def _header(episode: Episode, advantage: float | None) -> dict[str, Any]:
    return {
        "task_id": episode.task_id,
        "group_id": episode.group_id,
        "reward": float(episode.reward),
        "turn_rewards": [float(reward) for reward in episode.turn_rewards],
        "valid": bool(episode.valid),
        "truncated": episode.truncated,
        "error": episode.error,
        "info": dict(episode.info),
        "advantage": None if advantage is None else float(advantage),
        "lengths": [len(context) for context in episode.contexts],
    }


def _parse(line: Mapping[str, Any]) -> Iterator[Record]:
    start = line["start"]
    for header in line["episodes"]:
        header = dict(header)
        spans = []
        for length in header.pop("lengths"):
            spans.append((start, length))
            start += length
        rewards = tuple(header.pop("turn_rewards"))
        yield Record(step=line["step"], turn_rewards=rewards, spans=tuple(spans), **header)


def _plain(value: Any) -> Any:
    """What JSON cannot hold: numpy's numbers as numbers, anything else as its text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
