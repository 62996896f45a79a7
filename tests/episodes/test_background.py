import os
import signal
import subprocess
import sys
import time

import pytest

from jaxagent.episodes.background import LoopThread, graceful_signals
from jaxagent.episodes.loop import EpisodeLoop, LoopConfig, LoopStopped
from jaxagent.episodes.rollout import Limits
from tests.episodes.fakes import PROTOCOL, FakeEngine, Sampling, ToyTask, Worlds, keyed_policy


def loop_of(worlds, engine=None, **config):
    tasks = [ToyTask(f"t{i}", 1 + i % 2) for i in range(100)]
    settings = LoopConfig(
        **{"group_size": 2, "groups_per_batch": 2, "gather_seconds": 0.0, **config}
    )
    return EpisodeLoop(
        engine or FakeEngine(keyed_policy), tasks, worlds, PROTOCOL, Sampling(), settings,
        Limits(max_turns=3),
    )  # fmt: skip


def test_blocking_learner_in_step_with_the_loop():
    worlds, engine = Worlds(), FakeEngine(keyed_policy)
    with LoopThread(lambda: loop_of(worlds, engine)) as loop:
        for version in range(1, 4):
            batch = loop.collect()
            assert [g.index for g in batch.groups] == [2 * version - 2, 2 * version - 1]
            assert batch.version == version - 1
            engine.version = version
            loop.set_version(version)
        assert loop.state()["next_index"] == 6
    assert len(worlds.made) == 12 and worlds.all_closed_once()
    loop.close()  # twice does no harm


def test_asynchronous_loop_works_while_the_learner_blocks():
    worlds = Worlds()
    with LoopThread(lambda: loop_of(worlds, max_staleness=1)) as loop:
        loop.collect()
        deadline = time.monotonic() + 5
        while len(worlds.made) < 8 and time.monotonic() < deadline:
            time.sleep(0.005)  # the caller's thread is busy; nobody awaits
        assert len(worlds.made) == 8
    assert worlds.all_closed_once()


def test_errors_cross_threads():
    engine = FakeEngine(keyed_policy)
    engine.error = RuntimeError("device lost")
    worlds = Worlds()
    with (
        pytest.raises(RuntimeError, match="device lost"),
        LoopThread(lambda: loop_of(worlds, engine)) as loop,
    ):
        loop.collect()
    assert worlds.all_closed_once()
    with pytest.raises(KeyError, match="config"):
        LoopThread(lambda: {}["config"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_returns_control_with_everything_closed(number):
    def fault(env, stage):
        if stage == "reset" and env.number == 1:
            os.kill(os.getpid(), number)

    worlds = Worlds(fault)
    engine = FakeEngine(keyed_policy)
    engine.hang = True
    before = signal.getsignal(number)
    with (
        LoopThread(lambda: loop_of(worlds, engine)) as loop,
        graceful_signals(loop.request_stop) as stop,
    ):
        with pytest.raises(LoopStopped):
            loop.collect()
        assert stop.requested and stop.signal == number
        assert worlds.made and worlds.all_closed_once()
        late = []
        stop.on_request(lambda: late.append(1))
        assert late == [1]
    assert signal.getsignal(number) is before


SECOND_SIGNAL = """
import time
from jaxagent.episodes.background import graceful_signals
with graceful_signals() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("stopping", flush=True)
    time.sleep(60)
"""


def test_second_signal_exits_at_once():
    process = subprocess.Popen([sys.executable, "-c", SECOND_SIGNAL], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"stopping\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == -signal.SIGINT
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
