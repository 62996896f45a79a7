"""Seeded parameters that can never coincide between the training and held-out splits.

Structure (how many decoys, which wording) is shared. Parameters (names, contents, numbers)
come from two disjoint pools: a pseudo-word belongs to one split by its checksum, a number by
its remainder. Both pools look alike, so held-out tasks measure copying, not new spelling.
"""

import hashlib
import random
import zlib
from collections.abc import Sequence
from typing import Literal, TypeVar

Split = Literal["train", "heldout"]
T = TypeVar("T")

_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
# Words with a meaning to the shell or to a reader of the instruction.
_RESERVED_TEXT = (
    "cat cut sed tar dir log bin var lib dev run doc set let get put man vim pip zip job pid tag"
    " map max min sum not row rev tac sub tab top num bit sep hex red rot fag nig jap cum tit tits"
    " time date make move name node line file copy size mode code note same save done none more"
    " nice nohup locale nano sudo rename delete remove number value table column"
    " for like case limit rowid begin home pager lineno here some have give take were"
    " below files git had has how hup later lines lose named names new pipe pipes ref times total"
)
_RESERVED = frozenset(_RESERVED_TEXT.split())


def split_of_word(word: str) -> Split:
    """The only split whose tasks may use ``word`` as a parameter (a quarter is held out)."""
    return "heldout" if zlib.crc32(word.encode()) % 4 == 0 else "train"


def split_of_number(number: int) -> Split:
    """The only split whose tasks may use ``number`` as a parameter (a third is held out)."""
    return "heldout" if number % 3 == 1 else "train"


class Draw:
    """The random choices of one task: a function of family, split, difficulty and seed.

    Only ``random.Random.random`` is used below, whose sequence Python guarantees across
    versions and platforms.
    """

    def __init__(self, family: str, split: Split, difficulty: int, seed: int):
        digest = hashlib.sha256(f"{family}/{split}/{difficulty}/{seed}".encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:16], "big")).random
        self.split: Split = split
        self.difficulty = difficulty
        self.drawn_words: list[str] = []
        self.drawn_numbers: list[int] = []

    def below(self, count: int) -> int:
        """A structural integer in ``[0, count)``; not a parameter, so shared by the splits."""
        return int(self._random() * count)

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        pool = list(items)
        return [pool.pop(self.below(len(pool))) for _ in range(len(items))]

    def word(self, length: int | None = None) -> str:
        """A pseudo-word of 3 to 6 letters, consonants and vowels in turn.

        No word of a task contains another one, so patterns match what they name.
        """
        while True:
            # Lengths 3, 4, 5, 6 in the ratio 2 : 5 : 2 : 1.
            size = length or (3, 3, 4, 4, 4, 4, 4, 5, 5, 6)[self.below(10)]
            word = "".join(self.choice((_CONSONANTS, _VOWELS)[i % 2]) for i in range(size))
            if (
                split_of_word(word) == self.split
                and word not in _RESERVED
                and not any(word in old or old in word for old in self.drawn_words)
            ):
                self.drawn_words.append(word)
                return word

    def words(self, count: int, length: int | None = None) -> list[str]:
        return [self.word(length) for _ in range(count)]

    def number(self, low: int, high: int) -> int:
        """A number of the split's pool in ``[low, high]``; the range must span at least 3."""
        if high - low < 2:
            raise ValueError(f"number({low}, {high}): the range must hold at least 3 numbers")
        while True:
            number = low + self.below(high - low + 1)
            if split_of_number(number) == self.split:
                self.drawn_numbers.append(number)
                return number

    def numbers(self, count: int, low: int, high: int) -> list[int]:
        """``count`` different numbers of the split's pool in ``[low, high]``."""
        available = sum(split_of_number(n) == self.split for n in range(low, high + 1))
        if available < count:
            raise ValueError(f"numbers({count}, {low}, {high}): only {available} to choose from")
        found: list[int] = []
        while len(found) < count:
            number = self.number(low, high)
            if number not in found:
                found.append(number)
        return found
