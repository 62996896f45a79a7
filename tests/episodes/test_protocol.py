from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxagent.data.kinds import Kind
from jaxagent.data.tokenizer import SPECIAL_TOKENS, ByteTokenizer
from jaxagent.episodes.protocol import (
    INSTRUCTIONS,
    ActionProtocol,
    Command,
    Done,
    MalformedAction,
    Scaffold,
    chatml_protocol,
    compact_protocol,
    observation_pieces,
    parse_tagged,
    parse_tokens,
    prompt_tokens,
)

TAGS = ("<cmd>", "</cmd>", "<done/>")
TOKENIZER = ByteTokenizer((*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"))
COMPACT, CHATML = compact_protocol(TOKENIZER), chatml_protocol(TOKENIZER)
START, STOP = TOKENIZER.special("<|im_start|>"), TOKENIZER.special("<|im_end|>")


@dataclass(frozen=True)
class Text:
    text: str
    source: str = "observation"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<cmd>ls -l</cmd>", Command("ls -l")),
        ("I look first.\n<cmd>ls\ncat a</cmd>\n ", Command("ls\ncat a")),
        ("<done/>", Done()),
        ("All is well: <done/>\n", Done()),
        ("<cmd>echo '<done/>'</cmd>", Command("echo '<done/>'")),
        ("<cmd>  </cmd", "not closed"),
        ("<cmd>ls", "not closed"),
        ("ls", "no action"),
        ("", "no action"),
        ("<cmd> \n</cmd>", "empty command"),
        ("<cmd>a<cmd>b</cmd>", "<cmd> inside a command"),
        ("<cmd>a</cmd><cmd>b</cmd>", "more than one action"),
        ("<cmd>a</cmd><done/>", "more than one action"),
        ("<done/><cmd>a</cmd>", "more than one action"),
        ("<done/><done/>", "more than one action"),
        ("<cmd>a</cmd> and then", "text after the action"),
        ("</cmd><cmd>a</cmd>", "</cmd> without <cmd>"),
        ("ls</cmd>", "</cmd> without <cmd>"),
        ("</cmd><done/>", "</cmd> without <cmd>"),
        ("<cmd>a\0b</cmd>", "NUL"),
        ("<CMD>ls</CMD>", "no action"),
        ("< cmd>ls</cmd>", "</cmd> without <cmd>"),
    ],
)
def test_parsing(text, action):
    if isinstance(action, str):
        with pytest.raises(MalformedAction) as caught:
            parse_tagged(text)
        assert action in caught.value.reason
    else:
        assert parse_tagged(text) == action


free = st.text().filter(lambda s: not any(tag in s for tag in TAGS))


@given(free, free.filter(lambda s: s.strip() and "\0" not in s), st.sampled_from(["", " ", "\n"]))
def test_any_command_survives_the_round_trip(before, body, after):
    # Text can complete a tag across a seam ("<" + "cmd>"); such strings are other texts.
    text = f"{before}<cmd>{body}</cmd>{after}"
    if text.count("<cmd>") == text.count("</cmd>") == 1 and "<done/>" not in text:
        assert parse_tagged(text) == Command(body)


@given(st.lists(st.sampled_from([*TAGS, "ls", " ", "<", ">", "\n"]), max_size=8).map("".join))
def test_parsing_is_total_and_never_picks_between_actions(text):
    try:
        action = parse_tagged(text)
    except MalformedAction as malformed:
        assert malformed.reason
        return
    if isinstance(action, Command):
        assert text.count("<cmd>") == text.count("</cmd>") == 1
        assert f"<cmd>{action.text}</cmd>" in text and action.text.strip()
    else:
        assert text.count("<done/>") == 1 and "<cmd>" not in text and "</cmd>" not in text


@pytest.mark.parametrize("protocol", [COMPACT, CHATML])
@pytest.mark.parametrize("action", [Command("ls 'ü'"), Done()])
def test_encoded_actions_parse_and_stop(protocol, action):
    tokens = protocol.encode_action(action)
    assert parse_tokens(protocol, tokens) == action
    assert parse_tokens(protocol, [*tokens, *protocol.end_tokens]) == action
    text = TOKENIZER.decode(tokens)
    assert tokens[-1] in protocol.stop_tokens or text.endswith(protocol.stop_strings)


def test_compact_layout_costs_one_token_a_segment():
    prompt = prompt_tokens(COMPACT, [Text("ab"), Text("c", "template")])
    assert prompt == [TOKENIZER.special("<bos>"), *b"abc"]
    pieces = observation_pieces(
        COMPACT, [Text("out"), Text("exit 1", "template")], last_token=0, max_tokens=99
    )
    assert pieces == [
        ([TOKENIZER.special("<obs>")], Kind.TEMPLATE),
        (list(b"out"), Kind.OBSERVATION),
        ([TOKENIZER.special("<note>")], Kind.TEMPLATE),
        (list(b"exit 1"), Kind.TEMPLATE),
    ]
    silent = observation_pieces(COMPACT, [], last_token=0, max_tokens=99)
    assert silent == [([TOKENIZER.special("<obs>")], Kind.TEMPLATE)]


def spelled(pieces):
    return TOKENIZER.decode([token for tokens, _ in pieces for token in tokens])


def test_chatml_layout():
    assert TOKENIZER.decode(prompt_tokens(CHATML, [Text("Do it.")])) == (
        f"<|im_start|>system\n{INSTRUCTIONS}<|im_end|>\n"
        "<|im_start|>user\nDo it.<|im_end|>\n<|im_start|>assistant\n"
    )
    segments = [Text("a.txt\n"), Text("[exit 0]", "template")]
    rest = "\n<|im_start|>user\na.txt\n[exit 0]<|im_end|>\n<|im_start|>assistant\n"
    pieces = observation_pieces(CHATML, segments, last_token=62, max_tokens=99)
    assert spelled(pieces) == "<|im_end|>" + rest
    assert [kind for _, kind in pieces].count(Kind.OBSERVATION) == 1
    # The policy's own end-of-turn token is its action and is not repeated.
    assert spelled(observation_pieces(CHATML, segments, last_token=STOP, max_tokens=99)) == rest
    final = observation_pieces(CHATML, segments, last_token=STOP, max_tokens=99, final=True)
    assert spelled(final) == rest.removesuffix("<|im_start|>assistant\n")


@given(
    st.lists(st.builds(Text, st.text(max_size=60), st.sampled_from(["observation", "template"]))),
    st.integers(32, 120),
)
def test_cut_keeps_head_and_tail_and_says_how_much(segments, max_tokens):
    pieces = observation_pieces(COMPACT, segments, last_token=0, max_tokens=max_tokens)
    marks = {TOKENIZER.special("<obs>"), TOKENIZER.special("<note>")}
    text = [t for tokens, _ in pieces for t in tokens if t not in marks]
    whole = [t for s in segments for t in TOKENIZER.encode(s.text)]
    observed = {t for tokens, kind in pieces if kind == Kind.OBSERVATION for t in tokens}
    assert not observed & marks and all(t < 256 or t in marks for p, _ in pieces for t in p)
    if len(whole) <= max_tokens:
        assert text == whole
        return
    assert len(text) <= max_tokens
    kept = next(
        kept for kept in range(max_tokens) if len(whole) - kept == _noticed(pieces, kept, whole)
    )
    notice = TOKENIZER.encode(COMPACT.on_cut(len(whole) - kept))
    head, tail = kept - kept // 2, kept // 2
    assert text == [*whole[:head], *notice, *whole[len(whole) - tail :]]
    kinds = [k for tokens, k in pieces for t in tokens if t not in marks]
    assert all(k == Kind.TEMPLATE for k in kinds[head : head + len(notice)])
    original = [
        Kind.OBSERVATION if s.source == "observation" else Kind.TEMPLATE
        for s in segments
        for _ in TOKENIZER.encode(s.text)
    ]
    assert kinds[:head] == original[:head]
    assert kinds[head + len(notice) :] == original[len(whole) - tail :]


def _noticed(pieces, kept, whole):
    """The count in the notice, if the notice is the one for ``kept`` kept tokens."""
    count = len(whole) - kept
    notice = TOKENIZER.encode(COMPACT.on_cut(count))
    return count if (notice, Kind.TEMPLATE) in pieces else -1


def test_environment_text_never_becomes_a_special_token():
    evil = Text("".join(TOKENIZER.special_tokens))
    assert all(t < 256 for t in prompt_tokens(COMPACT, [evil])[1:])
    (_, (tokens, kind)) = observation_pieces(COMPACT, [evil], last_token=0, max_tokens=999)
    assert kind == Kind.OBSERVATION and all(t < 256 for t in tokens)
    with pytest.raises(MalformedAction):
        parse_tokens(COMPACT, [])


def test_missing_tags_and_stops_are_named():
    with pytest.raises(KeyError, match="im_start"):
        chatml_protocol(ByteTokenizer())
    with pytest.raises(ValueError, match="stop_tokens or stop_strings"):
        ActionProtocol(TOKENIZER, Scaffold(), lambda action: [])
