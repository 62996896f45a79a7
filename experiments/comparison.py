"""Finished runs side by side: curves with bands over seeds, and one table."""

import base64
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from scipy import stats
from wiring import ModelSize, TaskConfig, Workbench

from jaxagent.data.batch import observation_mask
from jaxagent.data.packing import pack
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.store import EpisodeReader
from jaxagent.models.transformer import Params
from jaxagent.training.checkpoint import Checkpoints
from jaxagent.training.metrics import read_metrics
from jaxagent.training.optimizer import adamw
from jaxagent.training.state import create_state
from jaxagent.training.step import make_scorer

matplotlib.use("Agg")


class Mean(NamedTuple):
    """A mean over seeds and half its 95 % interval (Student's t; nan for a single seed)."""

    mean: float
    half: float


def mean_over_seeds(values: Sequence[float]) -> Mean:
    found = np.asarray(values, np.float64)
    if len(found) < 2:
        return Mean(float(found.mean()), math.nan)
    factor = stats.t.ppf(0.975, len(found) - 1)
    return Mean(float(found.mean()), float(factor * found.std(ddof=1) / math.sqrt(len(found))))


def held_out_curve(run: Path) -> dict[int, float]:
    """Success on held-out tasks by update."""
    metrics = read_metrics(run)
    return {step: m["eval/success"] for step, m in metrics.items() if "eval/success" in m}


def observation_nll(run: Path, start: Path) -> dict[str, float]:
    """Cross-entropy of what terminals answered on held-out tasks, in nats a token.

    ``own``: on the run's own last episodes; ``foreign``: on those of the warm start before any
    update, the same for all methods; ``foreign_before``: the warm start's own value there.
    Kept in ``observation.json``: it takes a moment.
    """
    kept = run / "observation.json"
    if kept.exists():
        found: dict[str, float] = json.loads(kept.read_text())
        return found
    config = json.loads((run / "config.json").read_text())["run"]
    bench = Workbench(_of(TaskConfig, config["tasks"]), ModelSize(**config["model"]), 0)
    score = make_scorer(bench.model)

    def nll(params: Params, episodes: Sequence[Episode]) -> float:
        total, count = 0.0, 0
        for first in range(0, len(episodes), 32):
            length = bench.limits.max_context_tokens
            batch = pack(episodes[first : first + 32], buckets=(length,), rows=32)
            mask = np.asarray(observation_mask(batch))
            total -= float(np.asarray(score(params, batch))[mask].sum())
            count += int(mask.sum())
        return total / max(count, 1)

    after = _params(run / "policy", bench)
    before = _params(start / "warm_start", bench)
    own, foreign = _episodes(run, first=False), _episodes(start, first=True)
    found = {
        "own": nll(after, own),
        "foreign": nll(after, foreign),
        "foreign_before": nll(before, foreign),
    }
    kept.write_text(json.dumps(found))
    return found


def _of(kind: type, values: Mapping[str, Any]) -> Any:
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _params(folder: Path, bench: Workbench) -> Params:
    template = create_state(bench.init_params(), adamw(0.0))
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(template)[0].params


def _episodes(run: Path, first: bool) -> list[Episode]:
    reader = EpisodeReader(run / "held_out")
    steps = [record.step for record in reader.records()]
    wanted = min(steps) if first else max(steps)
    return [reader.episode(r) for r in reader.records() if r.step == wanted]


def write(out: Path, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """``report.md``, ``report.html`` and ``curves.png`` of the runs that are done."""
    rows, curves = [], {}
    for method in methods:
        runs = [
            out / method / f"seed{seed}"
            for seed in seeds
            if (out / method / f"seed{seed}" / "summary.json").exists()
        ]
        if not runs:
            continue
        summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
        starts = [Path(json.loads((r / "config.json").read_text())["run"]["start"]) for r in runs]
        seen = [observation_nll(run, start) for run, start in zip(runs, starts, strict=True)]

        def over(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
            mean, half = mean_over_seeds([scale * v for v in values])
            band = "" if math.isnan(half) else f" ± {half:.{digits}f}"
            return f"{mean:.{digits}f}{band}"

        rows.append(
            [
                method,
                str(len(runs)),
                over([s["success_before"] for s in summaries], 100),
                over([s["success_after"] for s in summaries], 100),
                over([s["success_after_greedy"] for s in summaries], 100),
                over([s["own"] for s in seen], digits=3),
                over([s["foreign_before"] for s in seen], digits=3),
                over([s["foreign"] for s in seen], digits=3),
                over([s["episodes"] for s in summaries], digits=0),
                over([s["tokens_sampled"] / 1e3 for s in summaries], digits=0),
                over([s["seconds"]["reinforcement"] for s in summaries], digits=0),
            ]
        )
        curves[method] = [held_out_curve(run) for run in runs]
    if not rows:
        return
    picture = _curves(curves)
    (out / "curves.png").write_bytes(picture)
    (out / "report.md").write_text(_markdown(rows))
    (out / "report.html").write_text(_html(rows, picture))


HEADER = (
    "method",
    "seeds",
    "success before, %",
    "success after, %",
    "greedy after, %",
    "observation CE, own",
    "foreign, before",
    "foreign, after",
    "episodes",
    "tokens, thousands",
    "seconds",
)
NOTE = (
    "Held-out tasks, sampled at temperature 1 unless greedy. Means over seeds with 95 % "
    "intervals (Student's t). Observation CE: nats a token of what terminals answered, on the "
    "run's own last held-out episodes and on those of the warm start, which are the same for "
    "all methods of a seed."
)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADER, ["---"] * len(HEADER), *rows)]
    return "\n".join(["# Study", "", NOTE, "", *lines, "", "![curves](curves.png)", ""])


def _html(rows: Sequence[Sequence[str]], picture: bytes) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    table = line(HEADER, "th") + "".join(line(row, "td") for row in rows)
    image = base64.b64encode(picture).decode()
    style = (
        "body{font:15px sans-serif;margin:2em}td,th{padding:.3em .7em;text-align:right}"
        "tr:nth-child(even){background:#f3f3f3}"
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>Study</title><style>{style}</style>"
        f"<h1>Study</h1><p>{html.escape(NOTE)}</p><table>{table}</table>"
        f'<img alt="success on held-out tasks by update" src="data:image/png;base64,{image}">'
    )


def _curves(curves: Mapping[str, Sequence[Mapping[int, float]]]) -> bytes:
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for number, (method, runs) in enumerate(curves.items()):
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        found = [mean_over_seeds([run[step] for run in runs]) for step in steps]
        middle = np.array([m.mean for m in found])
        half = np.nan_to_num(np.array([m.half for m in found]))
        color = plt.cm.tab10(number % 10)  # type: ignore[attr-defined]
        axes.plot(steps, middle, "o-", color=color, label=method, markersize=3)
        axes.fill_between(steps, middle - half, middle + half, color=color, alpha=0.12)
    axes.set(xlabel="update", ylabel="success on held-out tasks", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130)
    plt.close(figure)
    return buffer.getvalue()
