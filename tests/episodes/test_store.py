import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxagent.episodes import store
from jaxagent.episodes.episode import Context, Episode
from jaxagent.episodes.store import EpisodeReader, EpisodeWriter


def context(number: int, length: int) -> Context:
    rng = np.random.default_rng((number, length))
    return Context(
        tokens=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        kinds=rng.integers(0, 5, length, dtype=np.uint8),
        turn_ids=rng.integers(-1, 9, length, dtype=np.int32),
        logprobs=-rng.random(length, dtype=np.float32),
        versions=rng.integers(-1, 9, length, dtype=np.int32),
    )


def make(number: int, lengths=None) -> Episode:
    """An episode wholly determined by its number."""
    lengths = [number * 37 % 900] if lengths is None else lengths
    return Episode(
        task_id=f"task/{number % 7}",
        group_id=f"{number // 2}:ü\ud800",
        contexts=tuple(context(number + i, n) for i, n in enumerate(lengths)),
        reward=number / 3,
        turn_rewards=(0.0, number / 3),
        valid=number % 5 != 0,
        truncated="turns" if number % 3 == 0 else None,
        error="OSError: x\ny" if number % 5 == 0 else None,
        info={"n": number, "env": {"deep": [1, None, "é\n"]}},
    )


def assert_same(found: Episode, expected: Episode) -> None:
    assert vars(found) | {"contexts": ()} == vars(expected) | {"contexts": ()}
    assert len(found.contexts) == len(expected.contexts)
    for a, b in zip(found.contexts, expected.contexts, strict=True):
        for name in store.FIELDS:
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype and x.shape == y.shape and (x == y).all(), name


def test_episodes_read_back_exactly_and_while_written(tmp_path):
    expected = [make(1), make(2, []), make(3, [0, 5, 0]), make(4, [70_000]), make(5)]
    with EpisodeWriter(tmp_path / "s") as writer:
        reader = EpisodeReader(tmp_path / "s")
        assert list(reader) == [] and len(reader) == 0
        for count, episode in enumerate(expected, 1):
            writer.append([episode], step=count, advantages=[count / 7]).result()
            assert len(reader) == count
            assert_same(reader.episode(reader.records()[-1]), episode)
    for found, episode in zip(reader, expected, strict=True):
        assert_same(found, episode)
    assert [r.step for r in reader.records()] == [1, 2, 3, 4, 5]
    assert [r.advantage for r in reader.records()] == [n / 7 for n in range(1, 6)]
    assert [r.num_tokens for r in reader.records()] == [e.num_tokens for e in expected]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=3), max_size=4))
def test_any_batches_survive_reopening(tmp_path_factory, batches):
    path = tmp_path_factory.mktemp("store")
    expected = []
    for step, batch in enumerate(batches):
        episodes = [make(10 * step + i, lengths) for i, lengths in enumerate(batch)]
        expected += episodes
        with EpisodeWriter(path) as writer:
            writer.append(episodes, step=step).result()
    if batches:
        for found, episode in zip(EpisodeReader(path), expected, strict=True):
            assert_same(found, episode)


def test_chunk_borders(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "CHUNK", 16)
    lengths = [15, 1, 16, 17, 0, 33, 7]
    with EpisodeWriter(tmp_path) as writer:
        for n, length in enumerate(lengths):
            writer.append([make(n, [length])], step=n).result()
    for n, (found, length) in enumerate(zip(EpisodeReader(tmp_path), lengths, strict=True)):
        assert_same(found, make(n, [length]))


def test_torn_tail_is_ignored_and_overwritten(tmp_path):
    with EpisodeWriter(tmp_path) as writer:
        writer.append([make(1)], step=1).result()
        writer.append([make(2)], step=2).result()
    index = tmp_path / "index.jsonl"
    whole = index.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in (first, first + 1, len(whole) - 1):
        index.write_bytes(whole[:cut])
        assert [r.step for r in EpisodeReader(tmp_path).records()] == [1]
    index.write_bytes(whole[:-1])
    with EpisodeWriter(tmp_path):
        assert index.read_bytes() == whole[:first]
    with EpisodeWriter(tmp_path) as writer:  # on top of the lost episode's tokens
        writer.append([make(3, [20])], step=3).result()
    for found, number in zip(EpisodeReader(tmp_path), (1, 3), strict=True):
        assert_same(found, make(number, [20] if number == 3 else None))


def test_failed_commit_leaves_the_store_as_it_was(tmp_path, monkeypatch):
    with EpisodeWriter(tmp_path) as writer:
        writer.append([make(1)], step=1).result()
        real = os.pwrite

        def full(handle, data, offset):
            real(handle, data[: len(data) // 2], offset)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            future = writer.append([make(2)], step=2)
            with pytest.raises(OSError, match="No space"):
                writer.flush()
            assert future.exception() is not None
            assert (tmp_path / "index.jsonl").read_bytes().endswith(b"}\n")
        writer.append([make(3)], step=3).result()
    for found, number in zip(EpisodeReader(tmp_path), (1, 3), strict=True):
        assert_same(found, make(number))


def test_failures_in_the_background_surface_at_the_next_call(tmp_path, monkeypatch):
    writer = EpisodeWriter(tmp_path)
    with pytest.raises(ValueError, match="one number an episode: got 1 for 2"):
        writer.append([make(1), make(2)], step=0, advantages=[1.0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *args: 1 / 0)
        wait([writer.append([make(1)], step=0)])
        with pytest.raises(ZeroDivisionError):
            writer.append([make(2)], step=0)
        writer.append([make(2)], step=0)
        with pytest.raises(ZeroDivisionError):
            writer.close()
    with pytest.raises(RuntimeError, match="closed"):
        writer.append([make(1)], step=0)
    with EpisodeWriter(tmp_path):  # the lock was let go nevertheless
        assert len(EpisodeReader(tmp_path)) == 0


def test_second_writer_is_refused(tmp_path):
    with (
        EpisodeWriter(tmp_path),
        pytest.raises(RuntimeError, match="another process"),
    ):
        EpisodeWriter(tmp_path)


def test_missing_store_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no episode store at .*nowhere"):
        EpisodeReader(tmp_path / "nowhere")


def test_odd_values_in_info_are_kept_as_text_or_numbers(tmp_path):
    info = {"a": np.float32(0.5), "b": Path("/x"), "c": {"z", "y"}, "d": np.arange(2), "e": b"q"}
    with EpisodeWriter(tmp_path) as writer:
        writer.append([Episode("t", "g", (), 0.0, info=info)], step=0).result()
    (record,) = EpisodeReader(tmp_path).records()
    assert record.info == {"a": 0.5, "b": "/x", "c": ["y", "z"], "d": [0, 1], "e": "b'q'"}


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.episodes.test_store import make
from jaxagent.episodes.store import EpisodeReader, EpisodeWriter
from jaxagent.episodes import store
store.CHUNK = 512
with EpisodeWriter(sys.argv[1]) as writer:
    number = len(EpisodeReader(sys.argv[1]))
    print("open", flush=True)
    while True:
        writer.append([make(number), make(number + 1)], step=number).result()
        number += 2
        print(number, flush=True)
"""


def test_committed_episodes_survive_sigkill(tmp_path):
    """Killed again and again at random moments; nothing that was committed is ever lost."""
    root = str(Path(__file__).parents[2])
    rng = random.Random(0)
    promised = 0
    for _ in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "s"), root]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "open\n"
        first = process.stdout.readline()  # each session commits something
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        said = (first + process.stdout.read()).rpartition("\n")[0].splitlines()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        promised = max(promised, *map(int, said))
        reader = EpisodeReader(tmp_path / "s")
        assert len(reader) >= promised and len(reader) % 2 == 0
        for number, found in enumerate(reader):
            assert_same(found, make(number))
    assert promised >= 2 * 6
