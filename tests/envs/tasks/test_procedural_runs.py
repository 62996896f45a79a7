"""Every family in real sandboxes: the reference passes, nothing and a near miss fail.

``TASK_SEEDS`` sets the seeds per family and split (default 3, one a difficulty; 50 takes minutes).
"""

import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import get_args

import pytest

from envs.sandboxes.base import Sandbox, SandboxConfig, SandboxUnavailable
from envs.sandboxes.local import LocalSandboxes
from envs.tasks import FAMILIES, Task, generate
from envs.tasks.procedural import DIFFICULTIES, Split, missing_programs

SEEDS = int(os.environ.get("TASK_SEEDS", "3"))
CONCURRENCY = 8
PROGRAMS = {p for f in FAMILIES.values() for p in f.requires if shutil.which(p)}
MISSING = missing_programs(PROGRAMS)


def some_tasks(family: str, seeds: int = SEEDS) -> list[Task]:
    """Both splits; difficulties in turn."""
    return [
        generate(family, seed, difficulty=DIFFICULTIES[seed % 3], split=split)
        for split in get_args(Split)
        for seed in range(seeds)
    ]


async def prepare(sandbox: Sandbox, task: Task) -> None:
    for path, data in task.files.items():
        await sandbox.write_file(path, data)
    if task.setup:
        result = await sandbox.exec(task.setup, 10)
        assert result.exit_code == 0, (task.id, result)
        assert result.output == "", (task.id, result)


async def act(sandbox: Sandbox, task: Task, commands: Sequence[str]) -> list[str]:
    outputs = []
    for command in commands:
        result = await sandbox.exec(command, task.command_timeout)
        assert not result.timed_out, (task.id, command, result)
        outputs.append(result.output)
    return outputs


async def verdict(sandbox: Sandbox, task: Task) -> int | None:
    return (await sandbox.exec_clean(task.verify, task.verify_timeout)).exit_code


async def check_bystanders(sandbox: Sandbox, task: Task) -> None:
    """After success, harm to any file that was there before and is unchanged must fail."""
    for path, before in task.files.items():
        try:
            unchanged = await sandbox.read_file(path) == before
        except FileNotFoundError:
            continue
        if unchanged:
            await sandbox.write_file(path, before + b"junk\n")
            assert await verdict(sandbox, task) == 1, (task.id, path)
            await sandbox.write_file(path, before)


async def attempt(
    sandboxes: LocalSandboxes,
    task: Task,
    commands: Sequence[str],
    *,
    idle_first: bool = False,
    bystanders: bool = False,
) -> tuple[int | None, list[str]]:
    """The verdict on ``commands``.

    With ``idle_first``, doing nothing must fail before them; with ``bystanders``, harm to
    other files must fail after them.
    """
    sandbox = await sandboxes.create(task.sandbox)
    try:
        await prepare(sandbox, task)
        if idle_first:
            assert await verdict(sandbox, task) == 1, (task.id, "nothing done")
        outputs = await act(sandbox, task, commands)
        status = await verdict(sandbox, task)
        if bystanders and status == 0:
            await check_bystanders(sandbox, task)
        return status, outputs
    finally:
        await sandbox.close()


async def check(sandboxes: LocalSandboxes, task: Task) -> None:
    # A verifier run ends all processes, so tasks about them get a sandbox for doing nothing.
    processes = "&\n" in task.setup
    if processes:
        assert (await attempt(sandboxes, task, ()))[0] == 1, (task.id, "nothing done")
    status, outputs = await attempt(
        sandboxes, task, task.solution, idle_first=not processes, bystanders=True
    )
    assert status == 0, (task.id, task.solution, outputs, status)
    if task.difficulty == 1:
        assert all(len(text.encode()) <= 60 for text in outputs), (task.id, outputs)
    status, outputs = await attempt(sandboxes, task, task.near_miss)
    assert status == 1, (task.id, task.near_miss, outputs, status)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for the module: a factory of sandboxes belongs to one loop."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandboxes(runner: asyncio.Runner) -> Iterator[LocalSandboxes]:
    factory = LocalSandboxes()

    async def probe() -> None:
        sandbox = await factory.create(SandboxConfig())
        await sandbox.close()

    try:
        runner.run(probe())
    except SandboxUnavailable as error:
        assert not os.environ.get("CI"), error
        pytest.skip(str(error))
    yield factory
    runner.run(factory.close())


def needs_programs(family: str) -> None:
    if family in MISSING:
        message = f"{family} needs {', '.join(MISSING[family])}"
        assert not os.environ.get("CI"), message
        pytest.skip(message)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_passes_and_nothing_and_near_miss_fail(
    family: str, runner: asyncio.Runner, sandboxes: LocalSandboxes
) -> None:
    needs_programs(family)

    async def main() -> None:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def one(task: Task) -> None:
            async with slots:
                await check(sandboxes, task)

        async with asyncio.TaskGroup() as group:
            for task in some_tasks(family):
                group.create_task(one(task))

    runner.run(main())


CHEATS = {
    "a link to what is there already": ("copy_file", "ln -s {old} {new}"),
    "a pipe in place of the answer": ("count_lines", "mkfifo {out}"),
    "an answer that is a directory": ("count_lines", "mkdir {out}"),
    "every likely answer at once": ("count_lines", "seq 20 > {out}"),
    "everything removed": ("delete_file", "rm -rf /home/agent/*"),
    "the source changed to fit": ("count_lines", ": > {source}; echo 0 > {out}"),
    "shell code as an answer": ("find_process", "echo '1+1' > {out}"),
    "the verifier's path shadowed": (
        "count_lines",
        "mkdir bin; printf '#!/bin/sh\\nexit 0\\n' > bin/grep; cp bin/grep bin/head; "
        "chmod +x bin/*; export PATH=/home/agent/bin:$PATH",
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_fail(cheat: str, runner: asyncio.Runner, sandboxes: LocalSandboxes) -> None:
    family, command = CHEATS[cheat]
    needs_programs(family)

    async def main() -> None:
        for seed in range(2):
            task = generate(family, seed)
            words = task.solution[0].replace("<", " ").split()
            names = {"new": words[-1], "out": words[-1]}
            names |= {"old": words[1], "source": next(iter(task.files)).split("/")[-1]}
            status, _ = await attempt(sandboxes, task, (command.format(**names),))
            assert status == 1, (task.id, command)

    runner.run(main())
