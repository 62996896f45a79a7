"""The terminal environment on local sandboxes: prompts, observations, verdicts."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from envs.environment import Segment
from envs.sandboxes.base import (
    ExecResult,
    SandboxConfig,
    SandboxDied,
    SandboxUnavailable,
)
from envs.sandboxes.local import LocalSandboxes
from envs.tasks.task import Task
from envs.terminal import Notices, SetupError, TerminalEnv, observe
from envs.verifier import VerifierError


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandboxes(runner: asyncio.Runner) -> Iterator[LocalSandboxes]:
    factory = LocalSandboxes()
    try:
        runner.run(factory._open())
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield factory
    runner.run(factory.close())


def task(**fields: Any) -> Task:
    defaults = {"id": "t/1", "instruction": "Make b.", "verify": "test -f b"}
    return Task(**{**defaults, **fields})


def play(
    runner: asyncio.Runner, sandboxes: LocalSandboxes, one: Task, *actions: str | None
) -> list[Any]:
    """The prompt and every step of an episode."""

    async def episode() -> list[Any]:
        env = TerminalEnv(one, sandboxes)
        try:
            return [await env.reset(), *[await env.step(action) for action in actions]]
        finally:
            await env.close()
            await env.close()

    return runner.run(episode())


def test_an_episode(runner: asyncio.Runner, sandboxes: LocalSandboxes) -> None:
    one = task(files={"/home/agent/a": b"1\n"}, setup="cd /tmp; X=1; echo 2 >>~/a")
    prompt, listed, failed, made, end = play(
        runner, sandboxes, one, "pwd; cat a", "echo $X; ls c", "touch b", None
    )
    assert prompt == [Segment("Make b.", "template")]
    assert listed.segments == [Segment("/home/agent\n1\n2\n", "observation")]
    assert [s.source for s in failed.segments] == ["observation", "template"]
    assert failed.segments[1].text == "[exit 2]\n"
    assert (made.segments, made.reward, made.done) == ([], 0.0, False)
    assert (end.reward, end.done) == (1.0, True)


def test_doing_nothing_scores_zero(runner: asyncio.Runner, sandboxes: LocalSandboxes) -> None:
    assert play(runner, sandboxes, task(), None)[-1].reward == 0.0


def test_time_outs_and_progress_bars_are_shown_as_seen(
    runner: asyncio.Runner, sandboxes: LocalSandboxes
) -> None:
    one = task(command_timeout=0.3)
    _, step = play(runner, sandboxes, one, r"printf '1%%\r50%%\r\033[32m99%%'; sleep 60")
    assert step.segments == [
        Segment("99%", "observation"),
        Segment("\n[timed out after 0.3 s]\n", "template"),
    ]


@pytest.mark.parametrize("verify", ["exit 2", "exit 127", "kill -9 $$", "sleep 60", "if"])
def test_a_broken_verifier_is_no_score(
    runner: asyncio.Runner, sandboxes: LocalSandboxes, verify: str
) -> None:
    with pytest.raises(VerifierError, match="t/1"):
        play(runner, sandboxes, task(verify=verify, verify_timeout=0.5), "touch b", None)


def test_verifier_files_come_after_the_agent_is_dead(
    runner: asyncio.Runner, sandboxes: LocalSandboxes
) -> None:
    one = task(verify="sh /tests/check.sh", verify_files={"/tests/check.sh": b"test -f honest\n"})
    attack = (
        "mkdir -p /tests; ln -s /tmp/mine /tests/check.sh; echo exit 0 >/tmp/mine;"
        "(setsid sh -c 'while :; do echo exit 0 >/tests/check.sh; done' &) ; cat /tests/check.sh"
    )
    assert play(runner, sandboxes, one, attack, None)[-1].reward == 0.0
    assert play(runner, sandboxes, one, "touch honest; ls /tests", None)[-1].reward == 1.0


def test_a_verifier_is_not_hijacked_through_python(
    runner: asyncio.Runner, sandboxes: LocalSandboxes
) -> None:
    one = task(verify="python3 -c 'import json, sys; sys.exit(json.loads(\"1\"))'")
    attack = (
        "echo 'import os; os._exit(0)' | tee json.py sitecustomize.py >/dev/null;"
        "export PYTHONPATH=$PWD PYTHONSTARTUP=$PWD/json.py; v=$(python3 -c "
        "'import sys; print(\"%d.%d\" % sys.version_info[:2])');"
        "mkdir -p .local/lib/python$v/site-packages;"
        "cp json.py .local/lib/python$v/site-packages/usercustomize.py"
    )
    assert play(runner, sandboxes, one, attack, None)[-1].reward == 0.0


def test_a_failing_setup_is_typed(runner: asyncio.Runner, sandboxes: LocalSandboxes) -> None:
    with pytest.raises(SetupError, match=r"status 3.*no luck"):
        play(runner, sandboxes, task(setup="echo no luck; exit 3"))


def test_a_background_process_of_the_setup_lives(
    runner: asyncio.Runner, sandboxes: LocalSandboxes
) -> None:
    one = task(setup="(while :; do date +%s%N >/tmp/now; sleep 0.02; done) &")
    steps = play(runner, sandboxes, one, "cat /tmp/now", "sleep 0.2; cat /tmp/now")
    assert steps[1].segments != steps[2].segments


def test_a_dead_sandbox_ends_the_episode(runner: asyncio.Runner, sandboxes: LocalSandboxes) -> None:
    async def episode() -> None:
        env = TerminalEnv(task(), sandboxes)
        await env.reset()
        env._sandbox.machine.kill_soon()  # type: ignore[union-attr]
        await asyncio.sleep(0.3)
        try:
            with pytest.raises(SandboxDied):
                await env.step("echo hi")
            with pytest.raises(SandboxDied):
                await env.step(None)
        finally:
            await env.close()

    runner.run(episode())


def test_misuse_is_refused(runner: asyncio.Runner, sandboxes: LocalSandboxes) -> None:
    with pytest.raises(RuntimeError, match="reset"):
        runner.run(TerminalEnv(task(), sandboxes).step("ls"))
    with pytest.raises(RuntimeError, match="no end behind"):
        play(runner, sandboxes, task(), None, "ls")


def test_long_output_is_cut_in_the_middle() -> None:
    result = ExecResult("a" * 50 + "b" * 50, 0)
    assert observe(result, 1, 10, Notices()) == [
        Segment("aaaaa", "observation"),
        Segment("\n[... 90 bytes left out ...]\n", "template"),
        Segment("bbbbb", "observation"),
    ]
    assert observe(result, 1, 100, Notices()) == [Segment(result.output, "observation")]


def test_the_sandboxs_cut_and_the_environments_add_up() -> None:
    result = ExecResult("a" * 20 + "b" * 20, 1, truncated=True, cut_at=20, cut_bytes=1000)
    segments = observe(result, 1, 10, Notices())
    assert [s.text for s in segments] == [
        "aaaaa", "\n[... 1030 bytes left out ...]\n", "bbbbb", "\n[exit 1]\n",
    ]  # fmt: skip
    assert [s.source for s in segments] == ["observation", "template"] * 2


def test_notices_can_be_changed() -> None:
    notices = Notices(succeeded="ok {status}\n", silent="(nothing)\n")
    assert [s.text for s in observe(ExecResult("", 0), 1, 10, notices)] == ["(nothing)\n", "ok 0\n"]
    assert observe(ExecResult("", 3), 1, 10, Notices(failed="")) == []


def test_limits_come_from_the_task(runner: asyncio.Runner, sandboxes: LocalSandboxes) -> None:
    one = task(sandbox=SandboxConfig(workdir="/srv/work", env={"MODE": "x"}))
    assert play(runner, sandboxes, one, "pwd; echo $MODE")[1].segments == [
        Segment("/srv/work\nx\n", "observation")
    ]
