"""Seeded, unlimited task families for terminal agents.

``generate(family, seed)`` makes one task; equal arguments give equal tasks in every process.
Training and held-out tasks use disjoint parameters (see ``draw``). At difficulty 1 a task is
terse enough for a small byte-level model; 2 and 3 add steps, nesting and conditions.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import get_args

from envs.tasks.procedural import chains, data, files, find, processes, system, text, tools
from envs.tasks.procedural.draw import Draw, Split, split_of_number, split_of_word
from envs.tasks.procedural.family import Family, Spec, to_task
from envs.tasks.task import Task

__all__ = [
    "DIFFICULTIES",
    "FAMILIES",
    "Family",
    "Spec",
    "Split",
    "generate",
    "missing_programs",
    "split_of_number",
    "split_of_word",
    "task_stream",
]

DIFFICULTIES = (1, 2, 3)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for module in (files, text, data, find, system, processes, tools, chains)
        for family in module.FAMILIES
    }
)


def generate(family: str, seed: int, *, difficulty: int = 1, split: Split = "train") -> Task:
    """One task, a function of its arguments alone.

    Raises ValueError for an unknown family, difficulty or split, or a negative seed.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: unknown {family!r}; choose from {', '.join(FAMILIES)}")
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty: {difficulty!r} is not one of 1, 2, 3")
    if split not in get_args(Split):
        raise ValueError(f"split: {split!r} is neither 'train' nor 'heldout'")
    if seed < 0:
        raise ValueError(f"seed: {seed} is negative; use 0 or more")
    spec = FAMILIES[family].make(Draw(family, split, difficulty, seed))
    return to_task(family, split, difficulty, seed, spec)


def task_stream(
    families: Iterable[str],
    seeds: Iterable[int],
    difficulty: int = 1,
    split: Split = "train",
) -> Iterator[Task]:
    """For each seed in turn, one task of every family; endless when ``seeds`` is."""
    names = tuple(families)
    for seed in seeds:
        for name in names:
            yield generate(name, seed, difficulty=difficulty, split=split)


def missing_programs(programs: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Families a sandbox with only these ``programs`` cannot run -> what each lacks.

    For the local backend ask ``shutil.which``; for an image run ``command -v`` inside it.
    """
    return {
        name: lacking
        for name, family in FAMILIES.items()
        if (lacking := tuple(p for p in family.requires if p not in programs))
    }
