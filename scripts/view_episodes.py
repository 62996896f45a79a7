"""Prints stored episodes for people: what the policy read, wrote and got for it.

    python scripts/view_episodes.py runs/demo/episodes --last 3
    python scripts/view_episodes.py runs/demo/episodes --solved no --task count --logprobs

Works while the run is still writing.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxagent.data.kinds import Kind
from jaxagent.data.tokenizer import ByteTokenizer, Tokenizer
from jaxagent.episodes.episode import Context, Episode
from jaxagent.episodes.store import EpisodeReader, Record

STYLES = {
    Kind.PROMPT: "cyan",
    Kind.ACTION: "bold green",
    Kind.OBSERVATION: "default",
    Kind.TEMPLATE: "dim yellow",
    Kind.PAD: "dim",
}
LEGEND = (Kind.PROMPT, Kind.ACTION, Kind.OBSERVATION, Kind.TEMPLATE)


@dataclass(frozen=True)
class Options:
    """Which episodes to print, and how."""

    store: Annotated[str, tyro.conf.Positional]
    """Directory of the episode store."""
    solved: Literal["any", "yes", "no", "invalid"] = "any"
    """Only episodes with the full reward, without it, or whose environment failed."""
    task: str = ""
    """Only tasks whose id contains this."""
    step: int | None = None
    """Only episodes of this learner step."""
    last: int = 5
    """The newest so many of them; 0 for all."""
    list: bool = False
    """One line an episode instead of its text."""
    logprobs: bool = False
    """Every sampled token with its log-probability."""


def matches(record: Record, options: Options) -> bool:
    """Whether the options ask for this episode."""
    outcome = "invalid" if not record.valid else "yes" if record.reward >= 1.0 else "no"
    return (
        options.solved in ("any", outcome)
        and options.task in record.task_id
        and options.step in (None, record.step)
    )


def runs(context: Context) -> Iterator[tuple[Kind, slice]]:
    """Stretches of tokens of one kind and turn."""
    position = 0
    keys = zip(context.kinds.tolist(), context.turn_ids.tolist(), strict=True)
    for (kind, _), members in groupby(keys):
        end = position + len(list(members))
        yield Kind(kind), slice(position, end)
        position = end


def render(context: Context, tokenizer: Tokenizer, logprobs: bool) -> Text:
    """The context as coloured text; control characters are shown, never obeyed."""
    text = Text()
    for kind, span in runs(context):
        tokens = context.tokens[span].tolist()
        if kind == Kind.ACTION and logprobs:
            for token, logprob in zip(tokens, context.logprobs[span].tolist(), strict=True):
                text.append(visible(tokenizer.decode([token])), STYLES[kind])
                text.append(f"{logprob:.2f} ", "dim magenta")
        else:
            text.append(visible(tokenizer.decode(tokens)), STYLES[kind])
        if kind == Kind.ACTION:
            text.append("\n")
    return text


def visible(text: str) -> str:
    """Text safe for a terminal: only newlines and tabs keep their effect."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else
        f"\\x{ord(character):02x}"
        for character in text
    )  # fmt: skip


def heading(record: Record) -> Text:
    """One line on the outcome."""
    if not record.valid:
        outcome, style = f"INVALID {record.error}", "bold magenta"
    elif record.reward >= 1.0:
        outcome, style = f"reward {record.reward:g}", "bold green"
    else:
        outcome, style = f"reward {record.reward:g}", "bold red"
    parts = [
        f"step {record.step}",
        record.task_id,
        f"{len(record.turn_rewards)} turns",
        f"{record.num_tokens} tokens",
    ]
    if record.advantage is not None:
        parts.append(f"advantage {record.advantage:+.3f}")
    if record.truncated:
        parts.append(f"truncated: {record.truncated}")
    if record.info.get("malformed"):
        parts.append(f"{record.info['malformed']} malformed")
    return Text.assemble((visible(outcome), style), "  ", visible(" · ".join(parts)))


def show(
    console: Console, record: Record, episode: Episode, tokenizer: Tokenizer, logprobs: bool
) -> None:
    console.rule(heading(record), align="left", style="dim")
    for number, context in enumerate(episode.contexts):
        if len(episode.contexts) > 1:
            console.print(Text(f"context {number}", "dim"))
        console.print(render(context, tokenizer, logprobs))


def table(records: Sequence[Record]) -> Table:
    result = Table("step", "task", "outcome", "turns", "tokens", "advantage", "cause", box=None)
    for record in records:
        outcome = f"{record.reward:g}" if record.valid else "invalid"
        result.add_row(
            str(record.step),
            Text(visible(record.task_id)),
            Text(outcome, "green" if record.valid and record.reward >= 1.0 else "red"),
            str(len(record.turn_rewards)),
            str(record.num_tokens),
            "" if record.advantage is None else f"{record.advantage:+.3f}",
            Text(visible(record.truncated or record.error or "")),
        )
    return result


def main(options: Options, console: Console | None = None) -> int:
    console = console or Console()
    try:
        reader = EpisodeReader(options.store)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    records = list(reader.records())
    if not records:
        print(
            f"error: {options.store} holds no episode yet: the run writes them as its groups "
            "finish",
            file=sys.stderr,
        )
        return 1
    chosen = [record for record in records if matches(record, options)]
    if not chosen:
        print(
            f"error: none of the {len(records)} episodes matches; loosen --solved, --task or "
            "--step",
            file=sys.stderr,
        )
        return 1
    shown = chosen[-options.last :] if options.last else chosen
    if options.list:
        console.print(table(shown))
    else:
        tokenizer = ByteTokenizer()
        legend = [Text(kind.name.lower(), STYLES[kind]) for kind in LEGEND]
        console.print(Text("  ").join(legend))
        for record in shown:
            show(console, record, reader.episode(record), tokenizer, options.logprobs)
    solved = sum(record.valid and record.reward >= 1.0 for record in chosen)
    console.print(
        Text(f"{len(shown)} of {len(chosen)} matching episodes shown; {solved} solved", "dim")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
