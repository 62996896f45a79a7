"""Find and signal processes that set-up starts."""

from envs.tasks.procedural.checks import answer, same, texts
from envs.tasks.procedural.draw import Draw
from envs.tasks.procedural.family import Family, Spec, lines

# A pid as set-up leaves it for the verifier: not readable as the answer.
_PID_IS = (
    "set -- $(head -c 64 {out}); case $#$1 in 1|1*[!0-9]*|[!1]*) exit 1;; esac; "
    "read r < .{name}.ref; [ $(($1 * 31 + 7)) = $r ] && echo yes"
)


def _start(name: str) -> str:
    """Starts ``name``, waits until it runs, and notes its pid for the verifier."""
    # The handshake on the pipe makes sure that it runs under its own name before set-up ends.
    return (
        f"mkfifo .{name}.up; chmod +x {name}; ./{name} </dev/null >/dev/null 2>&1 &\n"
        f"p=$!; until [ -p .{name}.up ]; do sleep 0.01; done; read x < .{name}.up\n"
        f"echo $((p * 31 + 7)) > .{name}.ref"
    )


def find_process(draw: Draw) -> Spec:
    name, out, other, third = draw.words(4)
    names = [name, other, third][: draw.difficulty]
    body = {n: lines("#!/bin/sh", f"echo up > .{n}.up", f"read x < .{n}.up") for n in names}
    if draw.difficulty < 3:
        wording = draw.choice(
            ("Write the pid of process {p} to {o}.", "Find {p}'s process id; write it to {o}.")
        )
        near = f"pgrep {other} > {out}" if draw.difficulty == 2 else f"echo {name} > {out}"
        return Spec(
            wording.format(p=name, o=out),
            (f"pgrep {name} > {out}",),
            (near,),
            (
                f"regular {out} || exit 1",
                same(_PID_IS.format(out=out, name=name), "yes"),
                texts(body),
            ),
            body,
            setup="\n".join(_start(n) for n in names),
        )
    targets = {name: draw.word(), other: draw.word()}
    return Spec(
        f"Write the pid of process {name} to {targets[name]} and of {other} to {targets[other]}.",
        tuple(f"pgrep {n} > {o}" for n, o in targets.items()),
        (f"pgrep {name} > {targets[other]}", f"pgrep {other} > {targets[name]}"),
        (
            *(f"regular {o} || exit 1" for o in targets.values()),
            *(same(_PID_IS.format(out=o, name=n), "yes") for n, o in targets.items()),
            texts(body),
        ),
        body,
        setup="\n".join(_start(n) for n in names),
    )


def stop_process(draw: Draw) -> Spec:
    """A process says its last word into a pipe once it gets the right signal.

    Reading the pipe waits for the word, so the outcome does not hang on timing.
    """
    name, out, pipe, *words = draw.words(6)

    def start(process: str, channel: str, word: str, signal: str) -> str:
        # Set-up starts it from a string: the word is in no file.
        loop = "while :; do sleep 60 & wait $!; done"
        program = (
            f"trap 'echo {word} > {channel}; exit' {signal}; echo $$ > {process}.tmp; "
            f"mv {process}.tmp {process}.pid; {loop}"
        )
        return (
            f"mkfifo {channel}\n"
            f'sh -c "{program.replace("$", chr(92) + "$")}" </dev/null >/dev/null 2>&1 &\n'
            f"until [ -s {process}.pid ]; do sleep 0.01; done"
        )

    if draw.difficulty == 1:
        return Spec(
            draw.choice(
                (
                    "Stop the process in {p}.pid; save pipe {q} to {o}.",
                    "Kill the pid in {p}.pid, then save pipe {q} to {o}.",
                )
            ).format(p=name, q=pipe, o=out),
            (f"kill $(cat {name}.pid); cat {pipe} > {out}",),
            (f"kill $(cat {name}.pid); cat {name}.pid > {out}",),
            (answer(out, words[0]),),
            setup=start(name, pipe, words[0], "TERM"),
            answer=words[0],
            command_timeout=3.0,
        )
    if draw.difficulty == 2:
        signal = draw.choice(("USR1", "USR2", "HUP"))
        return Spec(
            f"Send {signal} to the process in {name}.pid; save the word from pipe {pipe} to {out}.",
            (f"kill -{signal} $(cat {name}.pid); cat {pipe} > {out}",),
            (f"kill -9 $(cat {name}.pid); echo {signal} > {out}",),
            (answer(out, words[0]),),
            setup=start(name, pipe, words[0], signal),
            answer=words[0],
            command_timeout=3.0,
        )
    other, second = words[1:3]
    last = draw.word()
    return Spec(
        f"Stop the processes in {name}.pid and {other}.pid; "
        f"save the words from pipes {pipe} and {second} to {out}, in this order.",
        (
            f"kill $(cat {name}.pid) $(cat {other}.pid)",
            f"cat {pipe} > {out}; cat {second} >> {out}",
        ),
        (f"kill $(cat {name}.pid) $(cat {other}.pid)", f"cat {pipe} > {out}"),
        (answer(out, f"{words[0]} {last}"),),
        setup=start(name, pipe, words[0], "TERM") + "\n" + start(other, second, last, "TERM"),
        answer=f"{words[0]} {last}",
        command_timeout=3.0,
    )


FAMILIES = (
    Family("find_process", "process ids by name", find_process, ("pgrep",)),
    Family("stop_process", "signal a running process", stop_process),
)
