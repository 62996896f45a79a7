"""A whole run: demonstrations, warm start, reinforcement, evaluation before and after.

Recipes give it an objective and a credit pipeline; everything else is the same for all.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import report
from method import Method
from rich.console import Console
from wiring import ModelSize, Reinforce, TaskConfig, WarmStart, Workbench

from jaxagent import config as config_lib
from jaxagent.credit import Credit
from jaxagent.episodes.background import LoopThread, graceful_signals
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.loop import EpisodeLoop, LoopConfig
from jaxagent.episodes.store import EpisodeReader, EpisodeWriter
from jaxagent.losses import Objective
from jaxagent.models.transformer import Params
from jaxagent.rollout.engine import Engine
from jaxagent.training.checkpoint import Checkpoints
from jaxagent.training.evaluate import Rate, episode_success
from jaxagent.training.learner import Learner
from jaxagent.training.metrics import MetricsWriter, read_metrics
from jaxagent.training.optimizer import adamw, learning_rate_schedule, muon
from jaxagent.training.passes import own_tokens
from jaxagent.training.run import Step, train
from jaxagent.training.state import create_state


@dataclass(frozen=True)
class Run:
    """What every recipe has in common."""

    out: Path
    """Folder of the run; an earlier run there is moved aside, unless resumed."""
    seed: int = 0
    """Of weights, tasks and sampling."""
    resume: bool = False
    """Go on from the last checkpoint in out."""
    start: Path | None = None
    """Folder of an earlier run whose warm start is used instead of a new one."""
    tasks: TaskConfig = field(default_factory=TaskConfig)
    model: ModelSize = field(default_factory=ModelSize)
    warm: WarmStart = field(default_factory=WarmStart)
    rl: Reinforce = field(default_factory=Reinforce)

    def __post_init__(self) -> None:
        config_lib.require(
            self.start is None or (self.start / "warm_start").is_dir(),
            f"start: {self.start} holds no warm_start folder; name the folder of an earlier run",
        )
        config_lib.require(
            not self.resume or (self.out / "warm_start").is_dir(),
            f"resume: there is no run in {self.out}; leave out --resume",
        )


class Phases:
    """Seconds of each phase, kept over a resume."""

    def __init__(self, progress: report.Progress, seconds: dict[str, float]) -> None:
        self.progress = progress
        self.seconds = seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.progress.phase(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


@dataclass
class _Job:
    """One recipe at work."""

    run: Run
    bench: Workbench
    checkpoints: Checkpoints
    held_out: EpisodeWriter
    phases: Phases
    facts: dict[str, Any] = field(default_factory=dict)

    def warm_params(self) -> Params:
        """Demonstrations and supervised training on them."""
        run, progress = self.run, self.phases.progress
        count = run.warm.demonstrations
        with self.phases("demonstrations"):
            shown = self.bench.demonstrations(count, lambda n: progress.update(n, count, {}))
        with self.phases("warm start"):
            tokens = sum(episode.num_tokens for episode in shown)

            def on_step(step: int, loss: float) -> None:
                progress.update(
                    step, run.warm.steps, {"loss": f"{loss:.3f} (to {run.warm.target_loss})"}
                )

            params = self.bench.warm_start(run.warm, self.bench.init_params(), shown, on_step)
        self.facts["demonstration_tokens"] = tokens
        return params

    def evaluate(self, engine: Engine, learner: Learner, name: str) -> None:
        """Success on the held-out tasks, into ``facts``; the sampled episodes are kept.

        Sampled at temperature 1, as in training, and greedily. Also the largest difference
        between the sampler's and the trainer's log-probabilities of these episodes.
        """
        step = learner.version
        with self.phases(f"evaluation {name}"):
            tasks = self.bench.held_out_tasks()
            episodes = self.bench.evaluate(engine, tasks)
            self.held_out.append(episodes, step=step)
            self.held_out.flush()
            rate = episode_success(episodes)
            greedy = episode_success(self.bench.evaluate(engine, tasks, temperature=0.0))
            with MetricsWriter(self.run.out) as writer:
                write_rate(writer, step, rate)
            self.facts[f"logprob_gap_{name}"] = learner.logprob_gap(episodes)
        self.facts[f"success_{name}"] = rate.rate
        self.facts[f"success_{name}_interval"] = [rate.low, rate.high]
        self.facts[f"success_{name}_greedy"] = greedy.rate
        self.facts[f"success_{name}_greedy_interval"] = [greedy.low, greedy.high]
        self.facts[f"success_{name}_families"] = by_family(episodes)

    def start(self) -> Params:
        """The weights that reinforcement starts from; kept, so that a resume finds them."""
        template = create_state(self.bench.init_params(), adamw(0.0))
        own, given = self.run.out / "warm_start", self.run.start
        with Checkpoints(own) as checkpoints:
            if checkpoints.steps:
                state, host = checkpoints.restore(template)
                self.phases.seconds.update(host["seconds"])
                return state.params
            if given is not None:
                with Checkpoints(given / "warm_start") as source:
                    params = source.restore(template)[0].params
            else:
                params = self.warm_params()
            checkpoints.save(template.replace(params=params), {"seconds": self.phases.seconds})
        return params

    def keep_policy(self, learner: Learner) -> None:
        """The weights alone, without heads: for another run's teacher."""
        params = {name: x for name, x in learner.params().items() if name != "heads"}
        with Checkpoints(self.run.out / "policy") as kept:
            if not kept.steps:
                kept.save(create_state(params, adamw(0.0)))

    def learner(
        self, start: Params, objective: Objective, credit: Credit, method: Method
    ) -> Learner:
        rl = self.run.rl
        rates = [
            learning_rate_schedule(
                peak,
                "linear",
                warmup_steps=min(3, rl.steps - 1),
                total_steps=rl.steps,
                end=0.1 * peak,
            )
            for peak in (rl.learning_rate, 0.1 * rl.learning_rate)
        ]
        given = {"reference": start, "proximal": None}
        read = objective.scores | credit.scores | method.reads
        own = [own_tokens(name, params) for name, params in given.items() if name in read]
        return self.bench.learner(
            start,
            objective,
            muon(rates[0], adam_learning_rate=rates[1]),
            episodes=rl.groups * rl.group_size,
            credit=credit,
            rewards=method.rewards,
            passes=[*own, *method.passes(self.bench, start)],
            augment=method.augment(self.bench) if method.augment else None,
            heads=method.heads,
            ema=method.ema,
            temperature=rl.temperature,
        )

    def summary(self, engine: Engine, learner: Learner) -> dict[str, Any]:
        """What the run comes to; see docs/metrics.md for the numbers along the way."""
        stats = engine.stats()
        metrics = read_metrics(self.run.out)
        steps = [m for m in metrics.values() if "time/step" in m]
        total = sum(m["time/step"] for m in steps)
        sampled = sum(m["rollout/tokens_per_second"] * m["time/step"] for m in steps)
        warm = stats["compilations_in_warmup"]
        return {
            **{name: fact for name, fact in self.facts.items() if name != "latest"},
            "seconds": {k: round(v, 1) for k, v in self.phases.seconds.items()},
            "seconds_total": round(sum(self.phases.seconds.values()), 1),
            "updates": learner.version,
            "parameters": sum(x.size for x in jax.tree.leaves(learner.state.params)),
            "episodes": int(sum(m["episodes/finished"] for m in steps)),
            "episodes_invalid": int(sum(m["episodes/invalid"] for m in steps)),
            "tokens_sampled": int(sampled),
            "tokens_per_second": round(sampled / total, 1) if total else 0.0,
            "logprob_gap": self.facts["logprob_gap_after"],
            "sampler_idle_share": sum(m["time/idle"] for m in steps) / total if total else 0.0,
            "compilations_after_warmup": int(stats["compilations"] - warm)
            + learner.compilations
            - len(learner.shapes.rows),
        }

    def reinforce(
        self,
        engine: Engine,
        learner: Learner,
        store: EpisodeWriter,
        loop_state: Any,
        method: Method,
    ) -> bool:
        """The reinforcement phase; False when it was asked to stop."""
        run, rl, progress = self.run, self.run.rl, self.phases.progress
        config = LoopConfig(
            group_size=rl.group_size,
            groups_per_batch=rl.groups,
            max_staleness=rl.max_staleness,
            max_concurrent=rl.max_concurrent,
            seed=run.seed,
        )
        tasks = self.bench.training_tasks(1)
        subset = self.bench.held_out_tasks()[: max(1, run.tasks.held_out // 2)]

        def make_loop() -> EpisodeLoop:
            return self.bench.episode_loop(
                engine,
                tasks,
                config,
                rl.temperature,
                version=learner.version,
                state=loop_state,
                after_group=method.after_group(self.bench, engine) if method.after_group else None,
            )

        with (
            self.phases("reinforcement"),
            MetricsWriter(run.out, seconds=5.0) as writer,
            LoopThread(make_loop, self.bench.thread) as loop,
            graceful_signals(loop.request_stop),
        ):

            def on_step(step: Step) -> None:
                m = step.metrics
                progress.update(
                    step.version,
                    rl.steps,
                    {
                        "training success": f"{m['episodes/success']:.2f}",
                        "held-out success": self.facts.get("latest", "-"),
                        "tokens/s": f"{m['rollout/tokens_per_second']:.0f}",
                        "sampler idle": f"{100 * m['time/idle'] / m['time/step']:.0f} %",
                    },
                    m["episodes/success"],
                )
                due = rl.evaluate_every and step.version % rl.evaluate_every == 0
                if due and step.version < rl.steps:
                    rate = episode_success(self.bench.evaluate(engine, subset))
                    self.facts["latest"] = report.percent(rate)
                    write_rate(writer, step.version, rate)

            return train(
                loop,
                engine,
                learner,
                writer,
                steps=rl.steps,
                store=store,
                checkpoints=self.checkpoints,
                checkpoint_every=rl.checkpoint_every,
                host_state=lambda: {"facts": self.facts, "seconds": self.phases.seconds},
                on_step=on_step,
            )


def write_rate(writer: MetricsWriter, step: int, rate: Rate) -> None:
    names = ("eval/success", "eval/success_low", "eval/success_high", "eval/episodes")
    writer.write(step, dict(zip(names, rate, strict=True)))


def by_family(episodes: Sequence[Episode]) -> dict[str, float]:
    """Success by family; the family is the first part of a task's id."""
    families = sorted({e.task_id.split("/")[0] for e in episodes})
    return {
        family: episode_success(e for e in episodes if e.task_id.startswith(f"{family}/")).rate
        for family in families
    }


def run_recipe(
    name: str,
    run: Run,
    config: Any,
    objective: Objective,
    credit: Credit,
    method: Method | None = None,
) -> dict[str, Any] | None:
    """Trains and reports; the summary, or None when it was asked to stop on the way.

    An objective or credit that reads the score ``"reference"`` gets the warm start's, and one
    that reads ``"proximal"`` that of the weights each update starts from.
    """
    method = method or Method()
    console = report.make_console()
    if not run.resume:
        move_aside(run.out, console)
    config_lib.save(config, run.out / "config.json")
    with (
        report.Progress(console) as progress,
        Workbench(run.tasks, run.model, run.seed) as bench,
        Checkpoints(run.out / "checkpoints") as checkpoints,
        EpisodeWriter(run.out / "held_out") as held_out,
        EpisodeWriter(run.out / "episodes") as store,
    ):
        job = _Job(run, bench, checkpoints, held_out, Phases(progress, {}))
        start = job.start()
        learner = job.learner(start, objective, credit, method)
        loop_state = None
        if checkpoints.steps:
            learner.state, host = checkpoints.restore(learner.state)
            learner.version = int(learner.state.step)
            loop_state, job.facts = host["loop"], host["facts"]
            job.phases.seconds.update(host["seconds"])
        with bench.engine(learner.params(), slots=run.rl.max_concurrent) as engine:
            engine.set_params(learner.params(), learner.version)
            with job.phases("warm-up of the update"):
                learner.warmup()
            if learner.version == 0:
                job.evaluate(engine, learner, "before")
            if not job.reinforce(engine, learner, store, loop_state, method):
                console.print(f"stopped at update {learner.version}; --resume True goes on")
                return None
            job.evaluate(engine, learner, "after")
            job.keep_policy(learner)
            summary = job.summary(engine, learner)
    report.write_json(run.out / "summary.json", summary)
    show(name, run.out, bench, summary, console)
    return summary


def show(name: str, out: Path, bench: Workbench, summary: dict[str, Any], console: Console) -> None:
    """The picture, three episodes before and after, and the table."""
    metrics = read_metrics(out)
    held_out = {
        step: Rate(m["eval/success"], m["eval/success_low"], m["eval/success_high"], 0)
        for step, m in metrics.items()
        if "eval/success" in m
    }
    trained = [m for m in metrics.values() if "episodes/success" in m]
    report.learning_curve(
        out / "learning_curve.png",
        [m["episodes/success"] for m in trained],
        held_out,
        [m["batch/observation_nll"] for m in trained],
        f"{name}: success in real terminals",
    )
    reader = EpisodeReader(out / "held_out")
    last = max(record.step for record in reader.records())
    before, after = (
        [reader.episode(r) for r in reader.records() if r.step == step] for step in (0, last)
    )
    report.print_examples(console, report.changed_examples(before, after, 3), bench.tokenizer)
    console.print(report.summary_table(summary, f"{name}: {out}"))


def move_aside(out: Path, console: Console) -> None:
    """Keeps what an earlier run left: nobody's data is overwritten."""
    if not out.exists():
        return
    number = 1
    while (old := out.with_name(f"{out.name}.{number}")).exists():
        number += 1
    out.rename(old)
    console.print(f"moved an earlier run to {old} (--resume True would have continued it)")
