"""What a run shows people: live progress, a table, a picture, example episodes."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxagent.data.kinds import Kind
from jaxagent.data.tokenizer import Tokenizer
from jaxagent.episodes.episode import Episode
from jaxagent.training.evaluate import Rate, is_success

SPARKS = "▁▂▃▄▅▆▇█"
STYLES = {
    Kind.PROMPT: "bold",
    Kind.ACTION: "cyan",
    Kind.OBSERVATION: "default",
    Kind.TEMPLATE: "dim",
}


def percent(rate: Rate) -> str:
    return f"{100 * rate.rate:.1f} % [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """The latest ``width`` values in 0..1 as little bars."""
    return "".join(SPARKS[min(7, int(max(0.0, v) * 8))] for v in values[-width:])


class Progress:
    """A live display on a terminal; a line every ``every`` seconds elsewhere."""

    def __init__(self, console: Console, every: float = 10.0) -> None:
        self._console = console
        self._every = every
        self._began = time.monotonic()
        self._printed = -float("inf")
        self._phase = ""
        self._curve: list[float] = []
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def phase(self, name: str) -> None:
        """Starts a phase of the run."""
        self._phase = name
        self._curve = []
        self._printed = -float("inf")
        if not self._live:
            self._console.print(f"== {name}")

    def update(
        self, done: int, total: int, values: Mapping[str, str], point: float | None = None
    ) -> None:
        """Shows ``done`` of ``total``, some named values, and one more point of the curve."""
        if point is not None:
            self._curve.append(point)
        elapsed = time.monotonic() - self._began
        if self._live:
            grid = Table.grid(padding=(0, 2))
            for name, value in values.items():
                grid.add_row(Text(name, style="dim"), value)
            if self._curve:
                grid.add_row(Text("success", style="dim"), Text(sparkline(self._curve), "green"))
            bar = ProgressBar(total=total, completed=done, width=48)
            title = f"{self._phase}  {done}/{total}  {elapsed:.0f} s"
            self._live.update(Panel(Group(bar, grid), title=title, title_align="left"))
        elif time.monotonic() - self._printed >= self._every or done == total:
            self._printed = time.monotonic()
            told = "  ".join(f"{name} {value}" for name, value in values.items())
            self._console.print(f"[{elapsed:5.0f} s] {self._phase} {done}/{total}  {told}")


def transcript(episode: Episode, tokenizer: Tokenizer) -> Text:
    """An episode as coloured text, ending with its outcome."""
    text = Text()
    for context in episode.contexts:
        start = 0
        for end in range(1, len(context) + 1):
            if end < len(context) and context.kinds[end] == context.kinds[start]:
                continue
            kind = Kind(int(context.kinds[start]))
            piece = tokenizer.decode(context.tokens[start:end].tolist())
            if kind == Kind.ACTION and text.plain and not text.plain.endswith("\n"):
                text.append("\n")
            text.append(piece, STYLES[kind])
            start = end
    text.append("\n")
    if not episode.valid:
        text.append(f"invalid: {episode.error}", "yellow")
    elif is_success(episode):
        text.append("solved", "bold green")
    else:
        why = f" (out of {episode.truncated})" if episode.truncated else ""
        text.append(f"not solved{why}", "bold red")
    return text


def changed_examples(
    before: Sequence[Episode], after: Sequence[Episode], count: int
) -> list[tuple[Episode, Episode]]:
    """Pairs of the same task: those that learned first, then those that forgot, then others."""
    later = {episode.task_id: episode for episode in after}
    pairs = [(e, later[e.task_id]) for e in before if e.task_id in later]
    rank = {(False, True): 0, (True, False): 1, (True, True): 2, (False, False): 3}
    pairs.sort(key=lambda pair: rank[is_success(pair[0]), is_success(pair[1])])
    # At most one example a family, as long as there are enough families.
    seen: set[str] = set()
    first = [p for p in pairs if not ((f := p[0].task_id.split("/")[0]) in seen or seen.add(f))]
    return [*first, *(p for p in pairs if p not in first)][:count]


def print_examples(
    console: Console, pairs: Sequence[tuple[Episode, Episode]], tokenizer: Tokenizer
) -> None:
    for before, after in pairs:
        console.print(
            Columns(
                [
                    Panel(transcript(before, tokenizer), title=f"before · {before.task_id}"),
                    Panel(transcript(after, tokenizer), title=f"after · {after.task_id}"),
                ],
                equal=True,
                expand=True,
            )
        )


def learning_curve(
    path: Path,
    train: Sequence[float],
    held_out: Mapping[int, Rate],
    observation_nll: Sequence[float],
    title: str,
) -> None:
    """Success by update (training tasks, and held-out ones with 95 % intervals) as a PNG."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    window = 5
    smooth = [
        sum(train[max(0, i - window + 1) : i + 1]) / len(train[max(0, i - window + 1) : i + 1])
        for i in range(len(train))
    ]
    steps = range(1, len(train) + 1)
    top.plot(steps, train, color="tab:blue", alpha=0.25, linewidth=1)
    top.plot(steps, smooth, color="tab:blue", label=f"training tasks (mean of {window} updates)")
    at = list(held_out)
    rates = [held_out[step] for step in at]
    top.errorbar(
        at,
        [r.rate for r in rates],
        yerr=[[r.rate - r.low for r in rates], [r.high - r.rate for r in rates]],
        fmt="o-",
        color="tab:orange",
        capsize=3,
        label="held-out tasks (95 % interval)",
    )
    top.set(ylabel="success", ylim=(0, 1), title=title)
    top.grid(alpha=0.3)
    top.legend(loc="lower right")
    bottom.plot(steps, observation_nll, color="tab:green")
    bottom.set(xlabel="update", ylabel="observation\ncross-entropy (nats)")
    bottom.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def summary_table(summary: Mapping[str, Any], title: str) -> Table:
    """The numbers people look for first."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    for when in ("before", "after"):
        for suffix, what in (("", "sampled"), ("_greedy", "greedy")):
            low, high = summary[f"success_{when}{suffix}_interval"]
            rate = Rate(summary[f"success_{when}{suffix}"], low, high, 0)
            table.add_row(f"held-out success {when} ({what})", percent(rate))
    gained = summary["success_after"] - summary["success_before"]
    table.add_row("gained by reinforcement", f"{100 * gained:+.1f} points")
    for name in (
        "parameters",
        "updates",
        "episodes",
        "episodes_invalid",
        "tokens_sampled",
        "tokens_per_second",
        "logprob_gap",
        "sampler_idle_share",
        "compilations_after_warmup",
        "seconds_total",
    ):
        value = summary[name]
        table.add_row(name.replace("_", " "), f"{value:.3g}" if value < 1 else f"{value:,}")
    return table


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces the file in one step."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


def make_console() -> Console:
    """A console that does not wrap its lines in a log file."""
    return Console(width=None if sys.stdout.isatty() else 140)
