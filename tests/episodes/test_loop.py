import asyncio
import dataclasses
import itertools
import json
import logging
import random

import numpy as np
import pytest

from jaxagent.episodes.groups import Group, ShuffledTasks, episode_seed, staleness
from jaxagent.episodes.loop import (
    AlwaysStale,
    EnvironmentsFailing,
    EpisodeLoop,
    LoopConfig,
    LoopStopped,
    NoTasksLeft,
)
from jaxagent.episodes.rollout import Limits
from tests.episodes.fakes import (
    DONE,
    PROTOCOL,
    FakeEngine,
    Sampling,
    ToyTask,
    Worlds,
    command,
    keyed_policy,
)

LIMITS = Limits(max_turns=4)
FAST = {"retry_delay": 0.0, "gather_seconds": 0.0}


class Endless:
    def __getitem__(self, index):
        return ToyTask(f"task{index}", 1 + index % 2)


def make(worlds, tasks=None, engine=None, limits=LIMITS, state=None, **config):
    return EpisodeLoop(
        engine or FakeEngine(keyed_policy),
        Endless() if tasks is None else tasks,
        worlds,
        PROTOCOL,
        Sampling(),
        LoopConfig(**{**FAST, "group_size": 3, "groups_per_batch": 2, **config}),
        limits,
        state=state,
    )


def collect(loop, batches=1):
    async def run():
        async with loop:
            return [await loop.collect() for _ in range(batches)]

    return asyncio.run(run())


def fingerprint(collected):
    """Everything about a batch that must not depend on timing."""
    return [
        (
            (g.index, g.group_id, e.reward, e.turn_rewards, e.truncated, e.info["seed"]),
            [a.tobytes() for c in e.contexts for a in vars(c).values()],
        )
        for g in collected.groups
        for e in g.episodes
    ]


def jitter(seed):
    rng = random.Random(seed)
    return lambda env, stage: asyncio.sleep(rng.random() * 0.004) if stage != "close" else None


def test_synchronous_runs_repeat_bit_for_bit_whatever_the_timing():
    runs = []
    for seed in range(3):
        worlds = Worlds(jitter(seed))
        concurrent = [64, 4, 1][seed]
        batches = collect(make(worlds, max_concurrent=concurrent, seed=5), batches=3)
        runs.append([fingerprint(batch) for batch in batches])
        assert worlds.all_closed_once() and len(worlds.made) == 3 * 2 * 3
    assert runs[0] == runs[1] == runs[2]
    assert [[g.index for g in b.groups] for b in batches] == [[0, 1], [2, 3], [4, 5]]
    other = collect(make(Worlds(), seed=6), batches=3)
    assert [fingerprint(batch) for batch in other] != runs[0]


def test_seeds_depend_on_run_index_and_rollout_only():
    seeds = {episode_seed(r, i, k) for r, i, k in itertools.product(range(5), range(20), range(8))}
    assert len(seeds) == 800 and all(0 <= s < 2**31 for s in seeds)
    assert episode_seed(1, 2, 3) == 2053051431


def test_resumed_run_continues_where_the_uninterrupted_one_goes_on():
    tasks = ShuffledTasks([ToyTask(f"t{i}", 1 + i % 2) for i in range(5)], seed=3)
    whole = collect(make(Worlds(), tasks), batches=4)
    first = make(Worlds(), tasks)
    collect(first, batches=2)
    state = json.loads(json.dumps(first.state()))
    rest = collect(make(Worlds(), tasks, state=state), batches=2)
    assert [fingerprint(b) for b in rest] == [fingerprint(b) for b in whole[2:]]


def test_concurrency_is_bounded():
    open_now, most = 0, 0

    def fault(env, stage):
        nonlocal open_now, most
        open_now += (stage == "reset") - (stage == "close")
        most = max(most, open_now)
        return asyncio.sleep(0.002) if stage == "reset" else None

    collect(make(Worlds(fault), max_concurrent=4))
    assert most == 4


def test_failures_are_retried_on_fresh_environments():
    def fault(env, stage):
        if stage == "step" and env.number % 3 == 0:
            raise OSError("flaky")

    worlds = Worlds(fault)
    (batch,) = collect(make(worlds, engine=FakeEngine(lambda *_: command("guess 1"))))
    assert all(e.valid for e in batch.episodes)
    assert batch.counts["episodes/retried"] == len(worlds.made) - 6 > 0
    assert max(e.info["attempts"] for e in batch.episodes) > 1
    assert worlds.all_closed_once()


def test_invalid_episodes_are_counted_by_cause_and_small_groups_dropped():
    def fault(env, stage):
        if stage == "reset" and env.task.id == "task0":
            raise OSError("no disk")
        if stage == "reset" and env.task.id == "task1" and env.number % 3 == 0:
            raise MemoryError("oom")

    worlds = Worlds(fault)
    (batch,) = collect(make(worlds, retries=0, max_concurrent=1))
    assert [g.index for g in batch.groups] == [1, 2]
    assert [e.valid for e in batch.groups[0].episodes] == [False, True, True]
    assert len(batch.groups[0].valid) == 2
    assert batch.counts["episodes/invalid/OSError"] == 3
    assert batch.counts["episodes/invalid/MemoryError"] == 1
    assert batch.counts["groups/dropped_invalid"] == 1
    assert batch.counts["groups/started"] == 3
    assert worlds.all_closed_once()


def test_bad_task_is_quarantined_with_one_line(caplog):
    def fault(env, stage):
        if env.task.id == "bad" and stage == "reset":
            raise OSError("always")

    tasks = ShuffledTasks([ToyTask("good"), ToyTask("bad"), ToyTask("fine")], seed=0)
    worlds = Worlds(fault)
    loop = make(worlds, tasks, retries=0, quarantine_after=2)
    with caplog.at_level(logging.WARNING):
        batches = collect(loop, batches=6)
    assert all(len(b.groups) == 2 for b in batches)
    assert {g.task_id for b in batches for g in b.groups} == {"good", "fine"}
    assert sum(w.task.id == "bad" for w in worlds.made) == 2 * 3
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ["task bad quarantined: OSError: always"]
    assert loop.state()["quarantined"] == ["bad"]
    assert sum(b.counts.get("tasks/skipped", 0) for b in batches) > 0
    worlds = Worlds(fault)
    collect(make(worlds, tasks, state=loop.state()), batches=2)
    assert not any(w.task.id == "bad" for w in worlds.made)


def test_only_failures_in_a_row_count_against_a_task_or_a_run():
    """One task whose first and third groups fail, and every other task's group with it."""

    def fault(env, stage):
        if stage == "reset" and env.number % 2 == 0:
            raise OSError("now and then")

    tasks = ShuffledTasks([ToyTask("only")])
    loop = make(
        Worlds(fault),
        tasks,
        group_size=1,
        min_valid=1,
        groups_per_batch=6,
        max_concurrent=1,
        retries=0,
        quarantine_after=2,
        max_failed_groups=2,
    )
    (batch,) = collect(loop)
    assert [g.index for g in batch.groups] == [1, 3, 5, 7, 9, 11]
    assert batch.counts["groups/dropped_invalid"] == 6
    assert loop.state()["quarantined"] == []


def test_cancelled_collect_starts_nothing_extra():
    async def run():
        worlds = Worlds(lambda env, at: asyncio.sleep(0.03) if at == "reset" else None)
        async with make(worlds) as loop:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(loop.collect(), 0.005)
            batch = await loop.collect()
            assert [g.index for g in batch.groups] == [0, 1] and len(worlds.made) == 6

    asyncio.run(run())


def test_overlong_prompt_is_skipped_at_once_and_counted():
    class Tasks:
        def __getitem__(self, index):
            return ToyTask("long" * 30 if index == 0 else f"task{index}")

    worlds = Worlds()
    (batch,) = collect(make(worlds, Tasks(), limits=Limits(max_context_tokens=80, max_turns=2)))
    assert batch.counts["episodes/invalid/PromptTooLong"] == 3
    assert batch.counts["tasks/quarantined"] == 1 and "episodes/retried" not in batch.counts
    assert [g.index for g in batch.groups] == [1, 2]


def broken(env, stage):
    if stage == "reset":
        raise ConnectionError("no docker")


def test_environments_that_all_fail_end_the_run():
    worlds = Worlds(broken)
    loop = make(worlds, retries=0, max_failed_groups=5, quarantine_after=99)
    with pytest.raises(
        EnvironmentsFailing, match=r"5 groups in a row .*ConnectionError: no docker"
    ):
        collect(loop)
    assert worlds.all_closed_once() and len(worlds.made) <= 3 * 6


def test_failing_factory_is_an_environment_failure():
    def factory(task):
        raise FileNotFoundError("image")

    with pytest.raises(EnvironmentsFailing, match="FileNotFoundError: image"):
        collect(make(factory, max_failed_groups=3, retries=0))


def test_no_tasks_left_instead_of_spinning():
    tasks = ShuffledTasks([ToyTask("a"), ToyTask("b")])
    with pytest.raises(NoTasksLeft, match="all 2 tasks"):
        collect(make(Worlds(broken), tasks, retries=0, quarantine_after=1, max_failed_groups=99))


def test_finite_tasks_run_out():
    tasks = [ToyTask(f"t{i}") for i in range(3)]
    batches = collect(make(Worlds(), tasks, group_size=1, min_valid=1), batches=3)
    assert [[g.task_id for g in b.groups] for b in batches] == [["t0", "t1"], ["t2"], []]


def test_engine_failure_reaches_the_caller_and_closes_everything():
    engine = FakeEngine(keyed_policy)
    engine.error = RuntimeError("device lost")
    worlds = Worlds()
    with pytest.raises(RuntimeError, match="device lost"):
        collect(make(worlds, engine=engine))
    assert worlds.all_closed_once()


@pytest.mark.parametrize("stage", ["reset", "step", "close", "sample"])
def test_stopping_closes_every_environment(stage):
    async def run():
        worlds = Worlds(lambda env, at: asyncio.sleep(0.05) if at == stage else None)
        engine = FakeEngine(lambda *_: command("ls"))
        engine.hang = stage == "sample"
        loop = make(worlds, engine=engine, max_concurrent=4)
        asyncio.get_running_loop().call_later(0.02, loop.request_stop)
        with pytest.raises(LoopStopped):
            await loop.collect()
        assert 0 < len(worlds.made) <= 4 and worlds.all_closed_once()
        with pytest.raises(LoopStopped):
            await loop.collect()

    asyncio.run(run())


def test_leaving_with_an_error_closes_every_environment():
    worlds = Worlds(lambda env, at: asyncio.sleep(0.03) if at == "step" else None)

    async def run():
        async with make(worlds, max_staleness=1) as loop:
            await loop.collect()
            raise KeyError("learner")

    with pytest.raises(KeyError):
        asyncio.run(run())
    assert len(worlds.made) > 6 and worlds.all_closed_once()


def test_cancelling_collect_then_leaving_closes_every_environment():
    worlds = Worlds(lambda env, at: asyncio.sleep(30) if at == "step" else None)

    async def run():
        async with make(worlds) as loop:
            await asyncio.wait_for(loop.collect(), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert worlds.made and worlds.all_closed_once()


def test_group_prompts_reach_the_engine_together():
    """The first prompts of a group wait for its slowest reset, so they can be prefilled once."""
    order = []

    async def reset(number):
        await asyncio.sleep(0.01 * number)
        order.append("reset")

    def fault(env, stage):
        return reset(env.number % 3) if stage == "reset" else None

    class Spy(FakeEngine):
        def open_session(self, key):
            session = super().open_session(key)
            inner = session.generate

            def generate(new, sampling):
                if not session.inputs:
                    order.append("prompt")
                return inner(new, sampling)

            session.generate = generate
            return session

    collect(make(Worlds(fault), engine=Spy(keyed_policy), groups_per_batch=1, gather_seconds=5.0))
    assert order == ["reset"] * 3 + ["prompt"] * 3


def test_gate_does_not_wait_for_episodes_that_never_come():
    def fault(env, stage):
        if stage == "reset" and env.number == 0:
            raise OSError("gone")

    loop = make(Worlds(fault), groups_per_batch=1, gather_seconds=30.0, retries=0)
    (batch,) = asyncio.run(asyncio.wait_for(_one(loop), 5))
    assert len(batch.groups[0].valid) == 2


async def _one(loop):
    async with loop:
        return [await loop.collect()]


def run_async(max_staleness, slow=lambda index: 0.0, updates=8):
    """A learner that bumps the version after every batch; returns per-batch staleness."""
    engine = FakeEngine(lambda *_: command("guess 1"))
    worlds = Worlds(
        lambda env, stage: asyncio.sleep(slow(int(env.task.id[4:]))) if stage == "score" else None
    )
    engine.policy = lambda key, context, turn: command("ls") if turn < 1 else [DONE]
    found, counts, most = [], [], 0

    async def run():
        nonlocal most
        loop = make(worlds, engine=engine, max_staleness=max_staleness, max_concurrent=99)
        async with loop:
            for version in range(1, updates + 1):
                batch = await loop.collect()
                found.append([staleness(g, batch.version) for g in batch.groups])
                counts.append(batch.counts)
                await asyncio.sleep(0.005)  # training
                most = max(most, len(loop._running) + len(loop._finished))
                engine.version = version
                loop.set_version(version)

    asyncio.run(run())
    assert worlds.all_closed_once()
    return found, counts, most


def test_synchronous_mode_samples_nothing_while_the_learner_works():
    found, _, most = run_async(0)
    assert most == 0 and all(s == [0, 0] for s in found)


@pytest.mark.parametrize("k", [1, 3])
def test_asynchronous_groups_are_at_most_k_versions_old_and_bounded(k):
    found, counts, most = run_async(k)
    assert all(s <= k for batch in found for s in batch) and max(map(max, found)) == k
    assert most <= (k + 1) * 2
    assert sum(c.get("groups/dropped_stale", 0) for c in counts) == 0


def test_stale_groups_are_dropped_and_counted():
    found, counts, _ = run_async(1, slow=lambda index: 0.03 if index == 1 else 0.0)
    assert all(s <= 1 for batch in found for s in batch)
    assert sum(c.get("groups/dropped_stale", 0) for c in counts) == 1
    assert all(len(batch) == 2 for batch in found)


def test_engine_left_at_an_old_version_is_an_error_not_a_spin():
    async def run():
        async with make(Worlds()) as loop:
            loop.set_version(1)
            await asyncio.wait_for(loop.collect(), 5)

    with pytest.raises(AlwaysStale, match=r"before version 1: call engine.set_params"):
        asyncio.run(run())


def test_async_state_counts_what_was_delivered_out_of_order():
    worlds = Worlds(
        lambda env, stage: (
            asyncio.sleep(0.05) if env.task.id == "task0" and stage == "reset" else None
        )
    )
    loop = make(worlds, max_staleness=2)

    async def run():
        async with loop:
            first = await loop.collect()
            return [g.index for g in first.groups], loop.state()

    delivered, state = asyncio.run(run())
    assert 0 not in delivered and state["next_index"] == 0
    assert state["consumed"] == delivered
    rest = collect(make(Worlds(), state=state), batches=2)
    resumed = [g.index for b in rest for g in b.groups]
    assert resumed == [i for i in range(6) if i not in delivered][:4]


def test_version_cannot_go_back():
    loop = make(Worlds())
    loop.set_version(3)
    with pytest.raises(ValueError, match="from 3 to 2"):
        loop.set_version(2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"group_size": 1}, "min_valid=2 exceeds group_size=1"),
        ({"max_staleness": -1}, "max_staleness must be at least 0"),
        ({"max_concurrent": 0}, "max_concurrent must be at least 1"),
    ],
)
def test_impossible_settings_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        LoopConfig(**config)


def test_notice_that_does_not_fit_is_found_before_the_run():
    wordy = dataclasses.replace(PROTOCOL, on_cut=lambda tokens: "x" * 40)
    with pytest.raises(ValueError, match=r"max_observation_tokens=32 is too small .* 40 tokens"):
        EpisodeLoop(
            FakeEngine(keyed_policy),
            Endless(),
            Worlds(),
            wordy,
            Sampling(),
            LoopConfig(),
            Limits(max_observation_tokens=32),
        )


def test_shuffled_tasks_visit_each_task_once_a_pass():
    tasks = ShuffledTasks([ToyTask(str(i)) for i in range(7)], seed=1)
    passes = [[tasks[p * 7 + i].id for i in range(7)] for p in range(3)]
    assert all(sorted(p) == sorted(map(str, range(7))) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    with pytest.raises(ValueError, match="two tasks with the id 'a'"):
        ShuffledTasks([ToyTask("a"), ToyTask("a")])
    with pytest.raises(ValueError, match="at least one task"):
        ShuffledTasks([])


def test_staleness_is_that_of_the_oldest_action_token_of_valid_episodes():
    (batch,) = collect(make(Worlds()))
    group = batch.groups[0]
    assert staleness(group, 4) == 4
    for context in group.episodes[0].contexts:
        context.versions[context.versions >= 0] = 3
    assert staleness(Group(0, "t", "g", group.episodes[:1]), 4) == 1
    invalid = dataclasses.replace(group.episodes[1], valid=False)
    assert staleness(Group(0, "t", "g", (group.episodes[0], invalid)), 4) == 1
    assert staleness(Group(0, "t", "g", ()), 4) == 0
    assert np.all(group.episodes[0].contexts[0].versions >= -1)
