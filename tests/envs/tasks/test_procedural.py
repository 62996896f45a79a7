"""Procedural tasks as data: identity, splits, sizes, what they give away. Nothing is run."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import get_args

import pytest

from envs.tasks import FAMILIES, Task, generate, task_stream
from envs.tasks.procedural import (
    DIFFICULTIES,
    Split,
    missing_programs,
    split_of_number,
    split_of_word,
)
from envs.tasks.procedural.catalog import table
from envs.tasks.procedural.draw import _RESERVED, Draw

ROOT = Path(__file__).parents[3]
SEEDS = range(50)
SPLITS: tuple[Split, ...] = get_args(Split)
PSEUDO_WORD = re.compile(r"(?:[bcdfghjklmnprstvwz][aeiou]){1,3}[bcdfghjklmnprstvwz]?")


def tasks(family: str, split: Split, seeds: range = SEEDS) -> Iterator[tuple[Task, Draw]]:
    for difficulty in DIFFICULTIES:
        for seed in seeds:
            draw = Draw(family, split, difficulty, seed)
            FAMILIES[family].make(draw)
            yield generate(family, seed, difficulty=difficulty, split=split), draw


def words_of(task: Task) -> set[str]:
    """Every word of what a policy may read or is to write."""
    text = [task.instruction, task.setup, *task.solution, *task.near_miss]
    text += [f"{path} {data.decode()}" for path, data in task.files.items()]
    text += [f"{key} {value}" for key, value in task.sandbox.env.items()]
    return set(re.findall(r"[a-z]+", " ".join(text).lower()))


def answer_of(family: str, split: Split, difficulty: int, seed: int) -> str:
    return FAMILIES[family].make(Draw(family, split, difficulty, seed)).answer


def fingerprint(seeds: range) -> str:
    digest = hashlib.sha256()
    for split in SPLITS:
        for difficulty in DIFFICULTIES:
            for task in task_stream(FAMILIES, seeds, difficulty, split):
                digest.update(repr(task).encode())
    return digest.hexdigest()


def test_there_are_many_families_and_several_need_more_than_one_turn() -> None:
    assert len(FAMILIES) >= 14
    assert sum(family.turns > 1 for family in FAMILIES.values()) >= 3
    for name, family in FAMILIES.items():
        assert family.name == name and family.description
        shortest = min(len(generate(name, seed).solution) for seed in range(20))
        assert shortest >= family.turns


def test_identifiers_are_unique() -> None:
    seen = [
        task.id
        for split in SPLITS
        for difficulty in DIFFICULTIES
        for task in task_stream(FAMILIES, SEEDS, difficulty, split)
    ]
    assert len(seen) == len(set(seen)) == len(FAMILIES) * len(SPLITS) * 3 * len(SEEDS)
    assert generate("count_lines", 17).id == "count_lines/d1/train/17"


@pytest.mark.parametrize("family", FAMILIES)
def test_tasks_differ_from_seed_to_seed(family: str) -> None:
    for difficulty in DIFFICULTIES:
        distinct = {
            (task.instruction, task.setup, *task.files.items(), task.verify)
            for task in task_stream([family], range(200), difficulty)
        }
        assert len(distinct) == 200


@pytest.mark.parametrize("family", FAMILIES)
def test_wording_varies(family: str) -> None:
    def wording(task: Task, draw: Draw) -> str:
        text = re.sub(r"\d+", "0", task.instruction)
        for word in draw.drawn_words:
            text = re.sub(rf"{word}", "_", text, flags=re.IGNORECASE)
        return text

    first = [pair for pair in tasks(family, "train") if pair[0].difficulty == 1]
    assert len({wording(*pair) for pair in first}) >= 2


def test_equal_arguments_give_equal_tasks_in_another_process() -> None:
    program = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]; import test_procedural as t; "
        "print(t.fingerprint(range(3)))"
    )
    here = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", program, str(ROOT), here],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == fingerprint(range(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_heldout_parameters_never_occur_in_training(family: str) -> None:
    drawn: dict[Split, set[str]] = {}
    numbers: dict[Split, set[int]] = {}
    written: dict[Split, set[str]] = {}
    for split in SPLITS:
        pairs = list(tasks(family, split))
        assert all(draw.drawn_words for _, draw in pairs)
        drawn[split] = {word for _, draw in pairs for word in draw.drawn_words}
        numbers[split] = {number for _, draw in pairs for number in draw.drawn_numbers}
        written[split] = {word for task, _ in pairs for word in words_of(task)}
    assert not numbers["train"] & numbers["heldout"]
    assert not drawn["train"] & written["heldout"]
    assert not drawn["heldout"] & written["train"]
    # Words that were not drawn are fixed wording; no parameter may look like one of them.
    fixed = (written["train"] - drawn["train"]) | (written["heldout"] - drawn["heldout"])
    confusing = {w for w in fixed if 3 <= len(w) <= 6 and PSEUDO_WORD.fullmatch(w)}
    assert confusing <= _RESERVED


def test_pools_divide_words_and_numbers() -> None:
    for split in SPLITS:
        draw = Draw("any", split, 1, 0)
        assert {split_of_word(word) for word in draw.words(40, 5)} == {split}
        assert {split_of_number(number) for number in draw.numbers(20, 0, 200)} == {split}
    with pytest.raises(ValueError, match="at least 3"):
        Draw("any", "train", 1, 0).number(4, 5)
    with pytest.raises(ValueError, match="only 2"):
        Draw("any", "heldout", 1, 0).numbers(3, 1, 6)


def test_no_word_of_a_task_contains_another() -> None:
    words = Draw("any", "train", 1, 3).words(30)
    assert not [(a, b) for a in words for b in words if a != b and a in b]


@pytest.mark.parametrize("family", FAMILIES)
def test_difficulty_one_is_terse(family: str) -> None:
    for split in SPLITS:
        for task in task_stream([family], range(200), 1, split):
            assert len(task.instruction.encode()) <= 60, task.instruction
            for command in task.solution:
                assert len(command.encode()) <= 45, command


@pytest.mark.parametrize("family", FAMILIES)
def test_the_instruction_does_not_give_the_answer_away(family: str) -> None:
    for split in SPLITS:
        for difficulty in DIFFICULTIES:
            for seed in SEEDS:
                answer = answer_of(family, split, difficulty, seed)
                task = generate(family, seed, difficulty=difficulty, split=split)
                if not answer:
                    continue
                instruction = f" {' '.join(re.findall(r'[a-z0-9/]+', task.instruction.lower()))} "
                assert f" {answer} " not in instruction, (task.id, answer)
                # What has to be found out is also what the verifier looks for.
                assert all(word in task.verify for word in answer.split()), (task.id, answer)


def test_files_lie_in_the_working_directory() -> None:
    for difficulty in DIFFICULTIES:
        for task in task_stream(FAMILIES, range(5), difficulty):
            assert task.sandbox.workdir == "/home/agent"
            assert all(path.startswith("/home/agent/") for path in task.files)
            assert task.solution and task.near_miss and task.verify
            assert task.solution != task.near_miss


def test_missing_programs_lists_what_a_sandbox_lacks() -> None:
    everything = {program for family in FAMILIES.values() for program in family.requires}
    assert {"git", "sqlite3", "jq"} <= everything
    assert missing_programs(everything) == {}
    lacking = missing_programs(everything - {"git"})
    assert set(lacking) == {n for n, family in FAMILIES.items() if "git" in family.requires}
    assert set(lacking.values()) == {("git",)}


@pytest.mark.parametrize("family", FAMILIES)
def test_requires_names_every_program_beyond_the_basics(family: str) -> None:
    optional = {"git", "sqlite3", "jq", "tar", "gzip", "pgrep", "pkill", "python3", "perl", "zip"}
    used = set()
    for split in SPLITS:
        for task, draw in tasks(family, split, range(20)):
            scripts = "\n".join([task.setup, task.verify, *task.solution])
            commands = set(re.findall(r"(?:^|[;|&(\n'\"])\s*(?:then |do )?([a-z0-9]+)", scripts))
            used |= {program for program in optional if program in commands} - set(draw.drawn_words)
    declared = set(FAMILIES[family].requires)
    assert used <= declared
    # tar calls gzip without its name being written.
    assert declared - used <= ({"gzip"} if "tar" in declared else set())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "nonsense", "seed": 0}, "family: unknown 'nonsense'"),
        ({"family": "make_dir", "seed": -1}, "seed: -1 is negative"),
        ({"family": "make_dir", "seed": 0, "difficulty": 4}, "difficulty: 4"),
        ({"family": "make_dir", "seed": 0, "split": "test"}, "split: 'test'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(**arguments)  # type: ignore[arg-type]


def test_a_stream_goes_through_the_families_seed_by_seed() -> None:
    stream = task_stream(["make_dir", "copy_file"], count(5), 2, "heldout")
    assert [task.id for task in islice(stream, 3)] == [
        "make_dir/d2/heldout/5",
        "copy_file/d2/heldout/5",
        "make_dir/d2/heldout/6",
    ]


def test_the_documented_table_is_current() -> None:
    page = (ROOT / "docs" / "tasks.md").read_text()
    assert table() in page, "run python -m envs.tasks.procedural.catalog and paste its output"
