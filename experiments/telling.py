"""What the built-in tasks let one tell about an episode: solution, answers, states, roles."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from wiring import Workbench

from jaxagent.credit.state_groups import state_ids
from jaxagent.credit.structure import Role
from jaxagent.data.kinds import Kind
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.protocol import Command, MalformedAction, parse_tokens
from jaxagent.episodes.scripted import demonstrate
from jaxagent.models.transformer import Params
from jaxagent.training.checkpoint import Checkpoints
from jaxagent.training.evaluate import is_success
from jaxagent.training.optimizer import adamw
from jaxagent.training.passes import Pass, fact
from jaxagent.training.state import create_state


def solution_text(bench: Workbench) -> Callable[[Episode], str]:
    """The reference commands of the episode's task, as a teacher may be told."""

    def text(episode: Episode) -> str:
        return "\nsolution: " + "; ".join(bench.task(episode.task_id).solution)

    return text


def solution_tokens(bench: Workbench) -> Callable[[Episode], list[int]]:
    """The last reference command as the policy would write it: the gold answer of a task."""

    def tokens(episode: Episode) -> list[int]:
        last = bench.task(episode.task_id).solution[-1]
        return bench.protocol.encode_action(Command(last))

    return tokens


def turn_tokens(episode: Episode, turn: int, kind: Kind) -> list[int]:
    found: list[int] = []
    for context in episode.contexts:
        found += context.tokens[(context.turn_ids == turn) & (context.kinds == kind)].tolist()
    return found


def own_answer(bench: Workbench) -> Callable[[Episode], list[int] | None]:
    """The last command that the episode ran, as it was sampled."""

    def tokens(episode: Episode) -> list[int] | None:
        for turn in reversed(range(episode.num_turns)):
            sampled = turn_tokens(episode, turn, Kind.ACTION)
            if _command(bench, sampled) is not None:
                return sampled
        return None

    return tokens


def outcome(bench: Workbench) -> Callable[[Episode], Hashable | None]:
    """The same text for episodes that end with the same command; None without one."""
    answer = own_answer(bench)

    def of(episode: Episode) -> Hashable | None:
        found = answer(episode) if episode.valid else None
        return None if found is None else _command(bench, found)

    return of


def outcome_ids(bench: Workbench) -> Pass:
    """``extras["outcome_ids"]``: one id for each distinct last command; -1 without one."""
    of = outcome(bench)

    def values(episodes: Sequence[Episode], count: int, turns: int) -> NDArray[np.int32]:
        ids: dict[Hashable, int] = {}
        found = np.full(count, -1, np.int32)
        for index, episode in enumerate(episodes):
            said = of(episode)
            if said is not None:
                found[index] = ids.setdefault(said, len(ids))
        return found

    return fact("outcome_ids", values)


def states(similarity: float = 0.95) -> Pass:
    """``extras["state_ids"]``: what the policy had just seen, before each turn (GiGPO)."""

    def values(episodes: Sequence[Episode], count: int, turns: int) -> NDArray[np.int32]:
        seen = [
            [
                " ".join(map(str, turn_tokens(episode, turn - 1, Kind.OBSERVATION)))
                for turn in range(min(episode.num_turns, turns))
            ]
            for episode in episodes
        ]
        groups: dict[str, int] = {}
        ids = [groups.setdefault(episode.group_id, len(groups)) for episode in episodes]
        return state_ids(seen, ids, (count, turns), similarity)

    return fact("state_ids", values)


def windows() -> Pass:
    """``extras["window_ids"]``: a turn that got an answer ends a window (WIRL)."""

    def values(episodes: Sequence[Episode], count: int, turns: int) -> NDArray[np.int32]:
        found = np.full((count, turns), -1, np.int32)
        for index, episode in enumerate(episodes):
            window = 0
            for turn in range(min(episode.num_turns, turns)):
                found[index, turn] = window
                window += bool(turn_tokens(episode, turn, Kind.OBSERVATION))
        return found

    return fact("window_ids", values)


def roles(bench: Workbench) -> Pass:
    """``extras["roles"]``: a rule in the place of TRIAGE's judge.

    The last turn of a success is decisive; a turn that repeats a command, or has none that can
    be run, makes no progress; one that was answered explores; the last turn of a failure is
    a regression. The rest has no label.
    """

    def values(episodes: Sequence[Episode], count: int, turns: int) -> NDArray[np.int32]:
        found = np.full((count, turns), -1, np.int32)
        for index, episode in enumerate(episodes):
            seen: set[str] = set()
            last = min(episode.num_turns, turns) - 1
            for turn in range(last + 1):
                said = _command(bench, turn_tokens(episode, turn, Kind.ACTION))
                if turn == last:
                    solved = is_success(episode)
                    found[index, turn] = Role.DECISIVE if solved else Role.REGRESSION
                elif said is None or said in seen:
                    found[index, turn] = Role.NO_PROGRESS
                elif turn_tokens(episode, turn, Kind.OBSERVATION):
                    found[index, turn] = Role.EXPLORATION
                if said is not None:
                    seen.add(said)
        return found

    return fact("roles", values)


def _command(bench: Workbench, sampled: Sequence[int]) -> str | None:
    try:
        action = parse_tokens(bench.protocol, sampled)
    except MalformedAction:
        return None
    return action.text if isinstance(action, Command) else None


def demonstrator(bench: Workbench) -> Callable[[Episode], Episode | None]:
    """Runs an episode's reference solution in a sandbox; None where that fails.

    One run a task, kept: a reference does the same each time.
    """
    known: dict[str, Episode | None] = {}

    def of(episode: Episode) -> Episode | None:
        if episode.task_id not in known:
            task = bench.task(episode.task_id)
            shown = bench.thread.run(
                demonstrate(
                    bench.environment(task),
                    task.solution,
                    bench.protocol,
                    bench.limits,
                    task_id=task.id,
                )
            )
            known[episode.task_id] = shown if shown.valid else None
        return known[episode.task_id]

    return of


def final_params(run: Path, bench: Workbench) -> Params:
    """The last weights of a finished run of the same model size."""
    template = create_state(bench.init_params(), adamw(0.0))
    with Checkpoints(run / "policy") as checkpoints:
        if not checkpoints.steps:
            raise ValueError(f"teacher: {run} holds no policy; name the folder of a finished run")
        return checkpoints.restore(template)[0].params
