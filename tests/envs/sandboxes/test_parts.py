"""Bounded output, control frames and quoting, without a sandbox."""

import subprocess
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sandboxes.channel import (
    ChannelCorrupt,
    Done,
    FrameParser,
    ShellEnded,
    ShellState,
    Started,
    encode,
    quote,
)
from envs.sandboxes.output import OutputBuffer


@given(st.lists(st.binary(max_size=40)), st.integers(2, 60))
def test_output_keeps_whole_or_head_and_tail(parts: list[bytes], limit: int) -> None:
    buffer = OutputBuffer(limit)
    for part in parts:
        buffer.feed(part)
    whole = b"".join(parts)
    kept = buffer.kept()
    if len(whole) <= limit:
        assert kept.text == whole.decode("utf-8", "replace") and kept.cut_bytes == 0
    else:
        assert 0 < len(whole) - limit <= kept.cut_bytes <= len(whole) - limit + 6


@given(st.text(min_size=40, max_size=200), st.integers(2, 30))
def test_a_cut_never_splits_a_character(text: str, limit: int) -> None:
    text = text.encode("utf-8", "replace").decode()
    buffer = OutputBuffer(limit)
    buffer.feed(text.encode())
    kept = buffer.kept()
    head, tail = kept.text[: kept.cut_at], kept.text[kept.cut_at :]
    if kept.cut_bytes:
        assert text.startswith(head) and text.endswith(tail)
        assert len(head.encode()) + len(tail.encode()) + kept.cut_bytes == len(text.encode())


FRAMES = b"Sc1\0Dc1\0" + b"7\0/a b\0export A='1'\n\0X137\0"


@given(st.lists(st.integers(0, len(FRAMES)), max_size=8))
def test_frames_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(FRAMES)]
    parser = FrameParser()
    frames = [f for a, b in pairwise(edges) for f in parser.feed(FRAMES[a:b])]
    state = ShellState("/a b", "export A='1'\n")
    assert frames == [Started("c1"), Done("c1", 7, state), ShellEnded(137)]


@pytest.mark.parametrize("junk", [b"Q\0", b"Xnot a number\0", b"Dc1\0x\0/\0\0", b"\0"])
def test_junk_on_the_control_stream_is_noticed(junk: bytes) -> None:
    with pytest.raises(ChannelCorrupt):
        FrameParser().feed(junk)


def test_an_endless_frame_is_bounded() -> None:
    parser = FrameParser()
    with pytest.raises(ChannelCorrupt, match="longer"):
        for _ in range(100):
            parser.feed(b"S" * (1 << 16))


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(blacklist_characters="\0\r", blacklist_categories=("Cs",))))
def test_quoting_survives_a_shell(text: str) -> None:
    line = f"_jx_nl='\n'; printf %s {quote(text)}"
    assert "\n" not in quote(text)
    done = subprocess.run(["sh"], input=encode(line), capture_output=True, check=True)
    assert done.stdout.decode() == text
