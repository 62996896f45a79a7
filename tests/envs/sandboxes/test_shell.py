"""What every backend's persistent shell does: state, output, time-outs, hostile commands."""

import asyncio
import resource
import time

import pytest

from envs.sandboxes.base import SandboxDied

from .conftest import Shell

# Counts processes other than PID 1, the shell and what this runs in; needs no ps.
COUNT = "n=0; for p in /proc/[0-9]*; do n=$((n+1)); done; echo $n"


def test_directory_variables_and_functions_persist(shell: Shell) -> None:
    shell("cd /tmp; export A='x  y'; B=2; f() { echo f$1; }")
    assert shell.out('pwd; echo "$A" $B; f 3') == "/tmp\nx  y 2\nf3\n"


def test_exit_status_and_last_status(shell: Shell) -> None:
    assert shell("false").exit_code == 1
    assert shell.out("echo $?") == "1\n"
    assert shell("(exit 42)").exit_code == 42
    assert shell("no-such-program").exit_code == 127


def test_stdout_and_stderr_come_in_order(shell: Shell) -> None:
    assert shell.out("echo a; echo b >&2; echo c") == "a\nb\nc\n"


def test_output_without_a_newline(shell: Shell) -> None:
    assert shell.out("printf abc") == "abc"


def test_stdin_is_empty(shell: Shell) -> None:
    result = shell('cat; read x; echo "[$x]"', timeout=5)
    assert (result.output, result.timed_out) == ("[]\n", False)


def test_nothing_waits_for_a_person(shell: Shell) -> None:
    wanted = "PAGER GIT_PAGER GIT_TERMINAL_PROMPT DEBIAN_FRONTEND TERM LANG TZ"
    values = shell.out(f"for n in {wanted}; do eval echo \\$$n; done").split()
    assert values == ["cat", "cat", "0", "noninteractive", "dumb", "C.UTF-8", "UTC"]


def test_host_variables_are_not_visible(
    shell: Shell, make: type[Shell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    assert "hunter2" not in make().out("env; cat /proc/*/environ 2>/dev/null || :")


def test_configured_variables_and_directory(make: type[Shell]) -> None:
    new = make(env={"A": 'it\'s\n"quoted" $HOME'}, workdir="/srv/deep/er")
    assert new.out('pwd; printf %s "$A"') == '/srv/deep/er\nit\'s\n"quoted" $HOME'
    assert new.clean('pwd; printf %s "$A"').output == '/srv/deep/er\nit\'s\n"quoted" $HOME'


def test_returns_while_a_background_child_holds_the_output(shell: Shell) -> None:
    started = time.monotonic()
    assert shell.out("sleep 30 & echo hi") == "hi\n"
    assert time.monotonic() - started < 5
    shell("kill $!")


def test_output_of_a_finished_command_is_complete(shell: Shell) -> None:
    for size in (1, 4096, 15_000):
        for _ in range(5):
            output = shell.out(f"head -c {size} /dev/zero | tr '\\0' x")
            assert output == "x" * size


def test_late_output_of_a_background_child_is_not_lost_or_final(shell: Shell) -> None:
    shell("(sleep 0.2; echo late) & true")
    assert shell.out("sleep 0.5; echo now") == "late\nnow\n"


def test_long_output_keeps_head_and_tail(shell: Shell) -> None:
    result = shell("i=0; seq 1 100000")
    whole = "".join(f"{n}\n" for n in range(1, 100_001))
    assert result.truncated and result.exit_code == 0
    assert len(result.output) <= 16_384
    head, tail = result.output[: result.cut_at], result.output[result.cut_at :]
    assert whole.startswith(head) and whole.endswith(tail) and head and tail
    assert result.cut_bytes == len(whole) - len(result.output)
    assert f"{result.cut_bytes} bytes left out" in result.text


def test_gigabytes_stay_out_of_memory(shell: Shell) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = 60_000_000 if shell.backend.is_docker else 1_000_000_000
    result = shell(f"head -c {size} /dev/zero", timeout=120)
    assert result.exit_code == 0 and result.cut_bytes == size - len(result.output)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


def test_output_nobody_reads_stalls_no_end(make: type[Shell]) -> None:
    flooded = make()
    for _ in range(2):
        assert flooded("yes & sleep 0.3").exit_code == 0
        time.sleep(0.3)  # every buffer on the way fills up
        assert flooded.clean("echo clean").output == "clean\n"
    assert flooded("yes", timeout=1).timed_out
    assert flooded.out("echo on") == "on\n"
    flooded("yes & sleep 0.3")
    time.sleep(0.3)
    flooded.backend.run(flooded.sandbox.close())


def test_the_loop_stays_free_during_a_flood(shell: Shell) -> None:
    async def flooded() -> float:
        worst = 0.0
        flood = asyncio.ensure_future(shell.sandbox.exec("yes", 0.7))
        while not flood.done():
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            worst = max(worst, time.perf_counter() - before - 0.01)
        result = flood.result()
        assert result.timed_out and result.truncated
        return worst

    assert shell.backend.run(flooded()) < 0.3


def test_characters_split_over_writes_are_whole(shell: Shell) -> None:
    command = r"printf '\342\202'; sleep 0.1; printf '\254 \377 ok'"
    assert shell.out(command) == "€ \ufffd ok"


def test_any_text_is_a_command(shell: Shell) -> None:
    text = "".join(chr(c) for c in range(1, 0x250) if chr(c) not in "\r") + "'\"\\$(x)`\u2028🙂\n"
    quoted = "'" + text.replace("'", "'\\''") + "'"
    assert shell.out(f"printf %s {quoted}") == text
    assert shell("echo a\0b").exit_code == 2
    assert shell.out("printf %s '\ud800'") == "?"


def test_long_commands(shell: Shell) -> None:
    text = "y" * 300_000
    assert shell.out(f"x={text}; echo ${{#x}}") == "300000\n"


def test_here_documents_and_many_lines(shell: Shell) -> None:
    assert (
        shell.out("cat <<'E'\na $b\n'c'\nE\nfor i in 1 2\ndo echo $i\ndone") == "a $b\n'c'\n1\n2\n"
    )


@pytest.mark.parametrize("forged", [r"Dc1\0000\000/\000\000", r"X0\000", r"Sc9\000", "x" * 9])
def test_output_is_never_read_as_control(shell: Shell, forged: str) -> None:
    result = shell(f"printf '{forged}'; printf '{forged}' >&2; echo end; (exit 7)")
    assert result.exit_code == 7 and result.output.endswith("end\n")


def test_forged_control_frames_harm_only_their_own_command(shell: Shell) -> None:
    shell(r"for fd in 3 4 5 10 11 12 13 14; do printf 'X0\0' >&$fd; done 2>/dev/null", timeout=2)
    shell(r"for fd in 3 4 5 10 11 12 13 14; do printf 'junk\0' >&$fd; done 2>/dev/null", timeout=2)
    for word in ("one", "two"):
        assert shell.out(f"echo {word}") == f"{word}\n"


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("exit 3", 3),
        ("exec sh -c 'exit 4'", 4),
        ("kill -9 $$", 137),
        ("set -e; false; echo not reached", 1),
        ("if", 2),
        ("trap '' TERM; kill -9 $$", 137),
    ],
)
def test_a_command_that_ends_the_shell(shell: Shell, command: str, status: int) -> None:
    shell("cd /tmp; export KEPT='a b'")
    assert shell("echo before; " + command if command != "if" else command).exit_code == status
    assert shell.out('pwd; echo "$KEPT"; echo $-').startswith("/tmp\na b\n")


@pytest.mark.parametrize(
    "command",
    [
        "break; continue; return 0",
        "exec >&-; exec 2>&-",
        "exec 3>&- 4>&-",
        "exec </dev/zero",
        "kill -9 -1",
        "kill -9 1; kill -TERM 1; kill -KILL $PPID",
        "set -u; set -x; set -v; IFS=; PS4=x",
        "printf() { :; }; eval() { :; }; export() { :; }; read() { :; }",
        "unset PATH HOME PWD; cd /tmp",
    ],
)
def test_the_shell_survives(shell: Shell, command: str) -> None:
    shell(command, timeout=3)
    assert "still 2" in shell.out("echo still $((1+1))", timeout=5)
    shell("exit")  # Functions and options of this test end here.
    shell("PATH=/usr/local/bin:/usr/bin:/bin")


def test_a_dead_directory_does_not_matter(shell: Shell) -> None:
    shell("mkdir -p /tmp/gone; cd /tmp/gone; rmdir /tmp/gone; exit")
    assert shell.out("echo ok") == "ok\n"


def test_a_time_out_kills_everything_and_keeps_the_shell(shell: Shell) -> None:
    shell("cd /tmp; export KEPT=1; rm -f alive")
    tick = "while :; do echo x >>/tmp/alive; sleep 0.02; done"
    started = time.monotonic()
    result = shell(
        f"echo partial; setsid sh -c '{tick}' & (setsid sh -c '{tick}' &) ; trap '' TERM INT;"
        "sleep 60; echo never",
        timeout=0.5,
    )
    assert result.timed_out and result.exit_code is None
    assert result.output == "partial\n"
    assert time.monotonic() - started < 5
    assert shell.out("pwd; echo $KEPT") == "/tmp\n1\n"
    size = shell.out("wc -c <alive")
    assert shell.out("sleep 0.2; wc -c <alive") == size
    assert int(size) > 0 and int(shell.out(COUNT)) == 2


def test_no_late_frame_ends_the_next_command(shell: Shell) -> None:
    for _ in range(3):
        assert shell("sleep 0.3", timeout=0.3 - 0.001).exit_code in (0, None)
        assert shell.out("sleep 0.1; echo whole") == "whole\n"


def test_a_cancelled_command_leaves_a_usable_shell(shell: Shell) -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(shell.sandbox.exec("echo x >/tmp/c; sleep 60", 60))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    shell.backend.run(cancelled())
    assert shell.out("cat /tmp/c; " + COUNT) == "x\n2\n"


def test_commands_of_one_sandbox_take_turns(shell: Shell) -> None:
    async def both() -> list[str]:
        slow = shell.sandbox.exec("sleep 0.2; echo a", 5)
        fast = shell.sandbox.exec("echo b", 5)
        return [result.output for result in await asyncio.gather(slow, fast)]

    assert shell.backend.run(both()) == ["a\n", "b\n"]


def test_zombies_are_reaped(shell: Shell) -> None:
    shell("for i in 1 2 3 4 5; do (sh -c 'sleep 0.05 &' &); done")
    shell("sleep 0.4")
    states = shell.out("cat /proc/[0-9]*/stat 2>/dev/null || :")
    assert " Z " not in states


def test_a_fork_bomb_is_bounded(make: type[Shell]) -> None:
    sibling, bombed = make(), make(max_processes=40)
    # No job of the bomb that cannot fork passes for the shell and ends the command.
    bomb = "sleep 60 & b() { b | b & }; { b; } 2>/dev/null; wait %1"
    assert bombed(bomb, timeout=1).timed_out
    assert sibling.out("echo fine", timeout=5) == "fine\n"
    assert bombed.out("echo over", timeout=10) == "over\n"
    bombed("i=0; while [ $i -lt 60 ]; do sleep 5 & i=$((i+1)); done", timeout=3)
    assert bombed.clean("echo clean", timeout=10).output == "clean\n"


def test_a_memory_hog_is_bounded(make: type[Shell]) -> None:
    hog = make(memory_mb=48)
    result = hog("x=$(head -c 400000000 /dev/zero | tr '\\0' a); echo ${#x}", timeout=60)
    assert result.output.strip() != "400000000"
    assert hog.out("echo alive") == "alive\n"


def test_the_largest_file_is_bounded(make: type[Shell]) -> None:
    new = make(max_file_mb=1)
    assert new("head -c 3000000 /dev/zero >/tmp/f").exit_code != 0
    assert int(new.out("wc -c </tmp/f")) == 1 << 20


def test_there_is_no_network(shell: Shell) -> None:
    interfaces = shell.out("cat /proc/net/dev").splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]


def test_no_privilege(shell: Shell) -> None:
    status = dict(line.split(":\t", 1) for line in shell.out("cat /proc/self/status").splitlines())
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert status["NoNewPrivs"] == "1"


def test_a_dead_sandbox_says_so_every_time(make: type[Shell]) -> None:
    new = make()
    new.backend.kill_from_outside(new.sandbox)
    time.sleep(0.3)
    with pytest.raises(SandboxDied):
        new.clean("echo hi", timeout=5)
    for _ in range(2):
        with pytest.raises(SandboxDied):
            new("echo hi", timeout=5)
    with pytest.raises(SandboxDied):
        new.write("/tmp/x", b"")


def test_death_during_a_command(make: type[Shell]) -> None:
    new = make()

    async def killed() -> None:
        task = asyncio.ensure_future(new.sandbox.exec("sleep 60", 60))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(new.backend.kill_from_outside, new.sandbox)
        await task

    started = time.monotonic()
    with pytest.raises(SandboxDied):
        new.backend.run(killed())
    assert time.monotonic() - started < 10
