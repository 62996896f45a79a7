"""Rendered output is what a terminal shows."""

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.rendering import render


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("plain\ntext\n", "plain\ntext\n"),
        ("tab\tkept  \n", "tab\tkept  \n"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("10%\r50%\r100%\n", "100%\n"),
        ("downloading\rdone\x1b[K\n", "done\n"),
        ("longer\rabc", "abcger"),
        ("ab\b\bcd", "cd"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link", "textlink"),
        ("\x1b(Bx\x1b=y", "xy"),
        ("1\n2\n\x1b[2A\x1b[2Knew\n\x1b[Bend", "new\n2\nend"),
        ("one\x1b[2J\x1b[Htwo", "two"),
        ("shell\n\x1b[?1049hfull screen\x1b[?1049lback", "shell\nback"),
        ("bell\x07 nul\x00.", "bell nul."),
        ("cut off \x1b[3", "cut off 3"),
        ("\x1b", ""),
        ("", ""),
        ("é€🙂\n", "é€🙂\n"),
    ],
)
def test_render(raw: str, seen: str) -> None:
    assert render(raw) == seen


def test_a_hostile_cursor_costs_no_memory() -> None:
    assert len(render("\x1b[999999999Cx" * 3 + "\x1b[999999999B")) <= 5000
    assert render("\x1b[" + "9" * 5000 + "Ax") == "x"


def test_rendering_is_linear() -> None:
    text = "".join(f"\rprogress {n}" for n in range(20_000))
    assert render(text) == "progress 19999"


PIECES = st.sampled_from(
    ["a", "bc", "\n", "\r", "\b", "\x1b[K", "\x1b[1K", "\x1b[2K", "\x1b[A", "\x1b[B", "\x1b[2C",
     "\x1b[D", "\x1b[31m", "\x1b[3G", "\x1b[P", "\x07"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=25))
def test_agrees_with_a_terminal_emulator(pieces: list[str]) -> None:
    # A real terminal keeps the column on a bare newline; a tty driver makes it a new line.
    raw = "".join(pieces)
    screen = pyte.Screen(120, 60)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(raw)
    # A screen has rows below the last line to move down to, an endless one has not.
    if "\x1b[B" in raw:
        return
    shown = [line.rstrip() for line in screen.display]
    seen = [line.rstrip() for line in render(raw).split("\n")]
    assert seen + [""] * (60 - len(seen)) == shown
