"""How an action is spelled, and the tokens around it.

An action is parsed from what the policy itself sampled and never from text the
environment printed, so no program's output can end an episode or run a command.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxagent.data.kinds import Kind
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.episodes.environment import Segment

COMMAND_OPEN = "<cmd>"
COMMAND_CLOSE = "</cmd>"
DONE = "<done/>"

INSTRUCTIONS = (
    "You work in a terminal. Each turn, think if you need to, then give exactly one action as "
    f"the last thing you write: {COMMAND_OPEN}a shell command{COMMAND_CLOSE} to run a command, "
    f"or {DONE} once the task is finished."
)


@dataclass(frozen=True)
class Command:
    """A shell command to run."""

    text: str


@dataclass(frozen=True)
class Done:
    """The policy declares the task finished."""


Action = Command | Done


class MalformedAction(ValueError):
    """The policy's text holds no action that can be run; ``reason`` is told to the policy."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def parse_tagged(text: str) -> Action:
    """The one action in ``text``: ``<cmd>...</cmd>`` or ``<done/>``, free text before it.

    Inside a command ``<done/>`` is plain text. More than one action is refused, rather
    than one of them being picked. Raises MalformedAction.
    """
    opened, done = text.find(COMMAND_OPEN), text.find(DONE)
    if opened < 0 and done < 0:
        if COMMAND_CLOSE in text:
            raise MalformedAction(f"{COMMAND_CLOSE} without {COMMAND_OPEN}")
        raise MalformedAction("no action")
    if opened < 0 or 0 <= done < opened:
        before, after = text[:done], text[done + len(DONE) :]
        action: Action = Done()
    else:
        start = opened + len(COMMAND_OPEN)
        closed = text.find(COMMAND_CLOSE, start)
        if closed < 0:
            raise MalformedAction(f"{COMMAND_OPEN} is not closed")
        body = text[start:closed]
        if COMMAND_OPEN in body:
            raise MalformedAction(f"{COMMAND_OPEN} inside a command")
        if not body.strip():
            raise MalformedAction("empty command")
        if "\0" in body:
            raise MalformedAction("NUL character in the command")
        before, after = text[:opened], text[closed + len(COMMAND_CLOSE) :]
        action = Command(body)
    if COMMAND_CLOSE in before:
        raise MalformedAction(f"{COMMAND_CLOSE} without {COMMAND_OPEN}")
    if any(tag in after for tag in (COMMAND_OPEN, COMMAND_CLOSE, DONE)):
        raise MalformedAction("more than one action")
    if after.strip():
        raise MalformedAction("text after the action")
    return action


@dataclass(frozen=True)
class Scaffold:
    """Token ids that surround prompts, actions and observations.

    They are PROMPT tokens inside the prompt and TEMPLATE tokens everywhere else. A
    prompt is ``before_prompt + text + after_prompt + before_action``; then each turn is
    ``[sampled] + after_action + before_observation + (marker + segment)... +
    after_observation + before_action``. When the policy itself sampled the first token of
    ``after_action`` (its end-of-turn token), that token is not repeated.
    """

    before_prompt: tuple[int, ...] = ()
    after_prompt: tuple[int, ...] = ()
    before_action: tuple[int, ...] = ()
    after_action: tuple[int, ...] = ()
    before_observation: tuple[int, ...] = ()
    after_observation: tuple[int, ...] = ()
    observation_marker: tuple[int, ...] = ()
    note_marker: tuple[int, ...] = ()


def malformed_text(reason: str) -> str:
    """The default answer to a turn without a usable action."""
    return (
        f"Not run: {reason}. End with one {COMMAND_OPEN}command{COMMAND_CLOSE}, "
        f"or {DONE} when finished.\n"
    )


def short_malformed_text(reason: str) -> str:
    """The answer to such a turn where every byte is a token."""
    return f"not run: {reason}\n"


def cut_text(tokens: int) -> str:
    """The default notice where an observation was cut."""
    return f"\n[{tokens} tokens cut]\n"


@dataclass(frozen=True)
class ActionProtocol:
    """Everything the loop must know about a policy's way of speaking.

    Attributes:
      tokenizer: encodes new text only, with special tokens disabled.
      scaffold: token ids around the text.
      parse: text of a turn -> action; raises MalformedAction.
      stop_tokens, stop_strings: what ends a turn; a sampled stop token is an ACTION token.
      end_tokens: end-of-turn tokens taken off the end before parsing (kept in the record).
      encode_action: an action as the policy would sample it (demonstrations, tests).
      on_malformed: reason -> what the policy is told (TEMPLATE tokens).
      on_cut: number of tokens -> the notice in place of an observation's middle.
    """

    tokenizer: Tokenizer
    scaffold: Scaffold
    encode_action: Callable[[Action], list[int]]
    parse: Callable[[str], Action] = parse_tagged
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    end_tokens: tuple[int, ...] = ()
    on_malformed: Callable[[str], str] = malformed_text
    on_cut: Callable[[int], str] = cut_text

    def __post_init__(self) -> None:
        if not self.stop_tokens and not self.stop_strings:
            raise ValueError("ActionProtocol needs stop_tokens or stop_strings to end a turn")


def parse_tokens(protocol: ActionProtocol, tokens: Sequence[int]) -> Action:
    """The action in a turn's sampled tokens. Raises MalformedAction."""
    end = len(tokens)
    while end and int(tokens[end - 1]) in protocol.end_tokens:
        end -= 1
    return protocol.parse(protocol.tokenizer.decode(tokens[:end]))


def compact_protocol(tokenizer: Tokenizer) -> ActionProtocol:
    """For small models with one token per tag: ``<bos>``, prompt, then turns.

    ``<bos>prompt`` ``<cmd>ls</cmd>`` ``<obs>a.txt`` ``<note>exit 1`` ``<done/>``: one
    TEMPLATE token a segment and no other scaffolding. Raises KeyError when the tokenizer
    lacks one of the tags.
    """
    special = tokenizer.special
    opened, closed, done = special(COMMAND_OPEN), special(COMMAND_CLOSE), special(DONE)

    def encode_action(action: Action) -> list[int]:
        if isinstance(action, Done):
            return [done]
        return [opened, *tokenizer.encode(action.text), closed]

    return ActionProtocol(
        tokenizer=tokenizer,
        scaffold=Scaffold(
            before_prompt=(special("<bos>"),),
            observation_marker=(special("<obs>"),),
            note_marker=(special("<note>"),),
        ),
        encode_action=encode_action,
        stop_tokens=(closed, done, special("<eos>")),
        end_tokens=(special("<eos>"),),
        on_malformed=short_malformed_text,
    )


def chatml_protocol(tokenizer: Tokenizer, *, system: str = INSTRUCTIONS) -> ActionProtocol:
    """For chat models of the ChatML family (Qwen): append-only, no history is rewritten.

    The turn ends at the end of its action, or at ``<|im_end|>`` when the policy stops
    first. Raises KeyError when the tokenizer lacks ``<|im_start|>`` or ``<|im_end|>``.
    """
    start, end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
    encode = tokenizer.encode
    newline = tuple(encode("\n"))

    def opening(role: str) -> tuple[int, ...]:
        return (start, *encode(f"{role}\n"))

    def encode_action(action: Action) -> list[int]:
        if isinstance(action, Done):
            return encode(DONE)
        return encode(f"{COMMAND_OPEN}{action.text}{COMMAND_CLOSE}")

    system_turn = (*opening("system"), *encode(system), end, *newline) if system else ()
    return ActionProtocol(
        tokenizer=tokenizer,
        scaffold=Scaffold(
            before_prompt=(*system_turn, *opening("user")),
            after_prompt=(end, *newline),
            before_action=opening("assistant"),
            after_action=(end, *newline),
            before_observation=opening("user"),
            after_observation=(end, *newline),
        ),
        encode_action=encode_action,
        stop_tokens=(end,),
        stop_strings=(COMMAND_CLOSE, DONE),
        end_tokens=(end,),
    )


def check_notice(protocol: ActionProtocol, max_observation_tokens: int) -> None:
    """Raises ValueError when the notice of a cut would not fit into an observation."""
    needed = len(protocol.tokenizer.encode(protocol.on_cut(10**9)))
    if needed > max_observation_tokens:
        raise ValueError(
            f"Limits.max_observation_tokens={max_observation_tokens} is too small for the notice "
            f"of a cut, which takes {needed} tokens; raise it or shorten on_cut"
        )


Piece = tuple[list[int], Kind]


def prompt_tokens(protocol: ActionProtocol, segments: Sequence[Segment]) -> list[int]:
    """The whole prompt, up to where the policy samples its first token; all PROMPT."""
    scaffold = protocol.scaffold
    text = [token for s in segments for token in protocol.tokenizer.encode(s.text)]
    return [
        *scaffold.before_prompt,
        *text,
        *scaffold.after_prompt,
        *scaffold.before_action,
    ]


def observation_pieces(
    protocol: ActionProtocol,
    segments: Sequence[Segment],
    *,
    last_token: int,
    max_tokens: int,
    final: bool = False,
) -> list[Piece]:
    """What is fed after a turn whose last sampled token is ``last_token``.

    At most ``max_tokens`` tokens of text are kept, its head and its tail, with a TEMPLATE
    notice between (counted in ``max_tokens``); scaffolding is not counted. ``final`` leaves
    out ``before_action``, since no turn follows.
    """
    scaffold = protocol.scaffold
    after = scaffold.after_action
    if after and last_token == after[0]:
        after = after[1:]
    texts: list[tuple[Kind, list[int]]] = [
        (
            Kind.OBSERVATION if s.source == "observation" else Kind.TEMPLATE,
            protocol.tokenizer.encode(s.text),
        )
        for s in segments
    ]
    pieces: list[Piece] = [([*after, *scaffold.before_observation], Kind.TEMPLATE)]
    if not texts:
        pieces.append((list(scaffold.observation_marker), Kind.TEMPLATE))
    total = sum(len(tokens) for _, tokens in texts)
    head, tail_from, notice = total, total, []
    if total > max_tokens:
        # The count in the notice depends on the notice's own length; the upper bound
        # ``total`` fixes the room it takes.
        room = max_tokens - len(protocol.tokenizer.encode(protocol.on_cut(total)))
        if room < 0:
            raise ValueError(
                f"max_observation_tokens={max_tokens} is too small for the notice of a cut; "
                "raise it"
            )
        head, tail_from = room - room // 2, total - room // 2
        notice = protocol.tokenizer.encode(protocol.on_cut(tail_from - head))
    position = 0
    noticed = not notice
    for kind, tokens in texts:
        marker = scaffold.observation_marker if kind == Kind.OBSERVATION else scaffold.note_marker
        begin, end = position, position + len(tokens)
        position = end
        kept_head = tokens[: max(0, min(end, head) - begin)]
        kept_tail = tokens[max(0, tail_from - begin) :] if end > tail_from else []
        if kept_head or kept_tail or not tokens:
            pieces.append((list(marker), Kind.TEMPLATE))
        pieces.append((kept_head, kind))
        if not noticed and end > head:
            pieces.append((notice, Kind.TEMPLATE))
            noticed = True
        pieces.append((kept_tail, kind))
    following = () if final else scaffold.before_action
    pieces.append(([*scaffold.after_observation, *following], Kind.TEMPLATE))
    return [(tokens, kind) for tokens, kind in pieces if tokens]
