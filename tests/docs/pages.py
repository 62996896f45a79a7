"""What the tests of pages share: code blocks, and tables of code and names."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CODE = re.compile(r"`([^`]+)`")


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def fences(text: str) -> list[tuple[str, str]]:
    """The fenced blocks in order: language and text."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str = "python") -> list[str]:
    """The fenced blocks of a language, in order."""
    return [block for found, block in fences(text) if found == language]


def table(text: str, *header: str) -> dict[str, tuple[frozenset[str], ...]]:
    """The table with this header: code of the first column -> names in each other column."""
    lines = text.splitlines()
    first = lines.index(f"| {' | '.join(header)} |") + 2
    found: dict[str, tuple[frozenset[str], ...]] = {}
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        cells = line.strip("|").split(" | ")
        (call,) = CODE.findall(cells[0])
        assert call not in found, f"{call} has two rows"
        found[call] = tuple(frozenset(CODE.findall(cell)) for cell in cells[1:])
    return found
