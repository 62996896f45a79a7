"""The one place where jaxagent and envs meet: tasks, sandboxes, warm start, evaluation.

Recipes build a ``Workbench`` and call its methods; nothing here knows a loss.
"""

import asyncio
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from envs.sandboxes.base import SandboxFactory
from envs.sandboxes.local import LocalSandboxes
from envs.tasks.procedural import FAMILIES, Split, generate
from envs.tasks.task import Task
from envs.terminal import TerminalEnv
from jaxagent import losses
from jaxagent.config import require
from jaxagent.credit.base import Credit
from jaxagent.credit.rewards import RewardTransform
from jaxagent.data.augment import Augment
from jaxagent.data.kinds import Kind
from jaxagent.data.tokenizer import ByteTokenizer, Tokenizer
from jaxagent.episodes.background import EventLoopThread
from jaxagent.episodes.episode import Episode
from jaxagent.episodes.loop import AfterGroup, EpisodeLoop, LoopConfig
from jaxagent.episodes.protocol import ActionProtocol, compact_protocol
from jaxagent.episodes.rollout import Limits
from jaxagent.episodes.scripted import demonstrate
from jaxagent.models.config import ModelConfig
from jaxagent.models.heads import HeadConfig, add_heads
from jaxagent.models.transformer import Params, init
from jaxagent.rollout.engine import Engine, EngineConfig
from jaxagent.rollout.sampling import SamplingConfig
from jaxagent.training.evaluate import is_success
from jaxagent.training.heads import head_outputs
from jaxagent.training.learner import Learner, Shapes
from jaxagent.training.optimizer import Optimizer, learning_rate_schedule, muon
from jaxagent.training.passes import Pass
from jaxagent.training.state import create_state
from jaxagent.training.step import make_update

FAMILIES_SMALL = (
    "write_file",
    "make_dir",
    "move_file",
    "copy_file",
    "delete_file",
    "append_line",
    "replace_word",
    "grep_lines",
    "count_lines",
    "sort_lines",
    "set_mode",
    "make_link",
    "archive",
    "find_content",
    "follow_note",
    "obey_note",
)


LIMITS = Limits(
    max_turns=4,
    max_turn_tokens=48,
    max_context_tokens=256,
    max_observation_tokens=64,
    max_seconds=120.0,
    end_on_long_turn=True,
)


@dataclass(frozen=True)
class TaskConfig:
    """Which tasks are trained on and evaluated."""

    families: tuple[str, ...] = FAMILIES_SMALL
    """Families of procedural tasks; docs/tasks.md lists them all."""
    difficulty: int = 1
    """1, 2 or 3."""
    held_out: int = 256
    """Number of held-out tasks, spread evenly over the families."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.families if name not in FAMILIES]
        require(not unknown, f"tasks.families: unknown {', '.join(unknown)}; see docs/tasks.md")
        require(len(self.families) > 0, "tasks.families is empty: name at least one family")
        require(self.difficulty in (1, 2, 3), f"tasks.difficulty: {self.difficulty} is not 1-3")
        require(self.held_out > 0, f"tasks.held_out must be positive, got {self.held_out}")


@dataclass(frozen=True)
class ModelSize:
    """A small byte-level transformer, from scratch."""

    hidden: int = 128
    """Width of the residual stream."""
    layers: int = 5
    """Number of layers."""
    mlp: int = 448
    """Width of the MLP."""

    def __post_init__(self) -> None:
        require(self.hidden % 64 == 0, f"model.hidden must be a multiple of 64, got {self.hidden}")


@dataclass(frozen=True)
class WarmStart:
    """Supervised training on reference solutions, before any reinforcement."""

    demonstrations: int = 1536
    """Reference solutions, each really run in a sandbox."""
    steps: int = 360
    """Updates, at the most."""
    target_loss: float = 0.22
    """Stops as soon as the running mean of the actions' loss is below this."""
    episodes: int = 32
    """Demonstrations in an update."""
    learning_rate: float = 0.02
    """Muon's learning rate; constant, since the reinforcement goes on from there."""

    def __post_init__(self) -> None:
        require(
            0 < self.episodes <= self.demonstrations,
            f"warm.episodes={self.episodes} must lie in 1..warm.demonstrations",
        )
        require(self.steps > 0, f"warm.steps must be positive, got {self.steps}")


@dataclass(frozen=True)
class Reinforce:
    """The reinforcement phase, whatever its objective."""

    steps: int = 72
    """Updates."""
    groups: int = 32
    """Tasks in an update."""
    group_size: int = 4
    """Rollouts of a task."""
    max_staleness: int = 1
    """How many updates old an episode may be; 0 is synchronous and reproducible bit for bit."""
    learning_rate: float = 8e-3
    """Peak of Muon's learning rate, which falls to a tenth; Adam, for all but the layers'
    matrices, has a tenth of it."""
    temperature: float = 1.0
    """Of sampling, in training."""
    max_concurrent: int = 64
    """Episodes at once."""
    evaluate_every: int = 24
    """Updates between evaluations on held-out tasks; 0 for none in between."""
    checkpoint_every: int = 24
    """Updates between checkpoints."""

    def __post_init__(self) -> None:
        require(self.steps > 0, f"rl.steps must be positive, got {self.steps}")
        require(self.group_size > 1, "rl.group_size must be at least 2: advantages need a group")


@dataclass(frozen=True)
class Tasks:
    """Task ``i`` of an endless, seeded stream that takes the families in turn."""

    families: tuple[str, ...]
    difficulty: int
    split: Split
    first_seed: int

    def __getitem__(self, index: int) -> Task:
        round_, which = divmod(index, len(self.families))
        family = self.families[which]
        return generate(
            family, self.first_seed + round_, difficulty=self.difficulty, split=self.split
        )


def slip(command: str, rng: np.random.Generator) -> str:
    """The command with one letter left out or replaced."""
    letters = [i for i, letter in enumerate(command) if letter.isalpha()]
    at = int(rng.choice(letters))
    other = str(rng.choice(list(string.ascii_lowercase))) if rng.random() < 0.5 else ""
    return command[:at] + other + command[at + 1 :]


def without_first_turn(episode: Episode) -> Episode:
    """The episode with the first turn's action as scaffolding: seen, but not trained on."""
    (context,) = episode.contexts
    first = (context.kinds == Kind.ACTION) & (context.turn_ids == 0)
    kinds = np.where(first, Kind.TEMPLATE, context.kinds).astype(np.uint8)
    return replace(episode, contexts=(replace(context, kinds=kinds),))


@dataclass
class Workbench:
    """A model size, a tokenizer, tasks and sandboxes that fit together.

    Use as a context manager: environments live in ``thread``, and leaving closes every
    sandbox.
    """

    tasks: TaskConfig
    size: ModelSize
    seed: int
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    limits: Limits = LIMITS

    def __enter__(self) -> "Workbench":
        self.thread = EventLoopThread()
        self.sandboxes: SandboxFactory = LocalSandboxes()
        return self

    def __exit__(self, *exc: object) -> None:
        self.thread.run(self.sandboxes.close())
        self.thread.close()

    def __post_init__(self) -> None:
        self.protocol: ActionProtocol = compact_protocol(self.tokenizer)
        self.model = ModelConfig(
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=self.size.hidden,
            num_layers=self.size.layers,
            num_heads=self.size.hidden // 32,
            num_kv_heads=self.size.hidden // 64,
            head_dim=32,
            mlp_size=self.size.mlp,
            qk_norm=True,
            remat="dots",
        )

    def training_tasks(self, part: int) -> Tasks:
        """Streams with different ``part`` share no task; the warm start takes part 0."""
        first = (self.seed * 64 + part) * 1_000_000
        return Tasks(self.tasks.families, self.tasks.difficulty, "train", first)

    def held_out_tasks(self) -> list[Task]:
        """The same for every seed: no parameter of theirs occurs in any training task."""
        stream = Tasks(self.tasks.families, self.tasks.difficulty, "heldout", 0)
        return [stream[index] for index in range(self.tasks.held_out)]

    def task(self, task_id: str) -> Task:
        """The task of that id, made anew: ``family/d1/train/17``."""
        family, difficulty, split, seed = task_id.split("/")
        return generate(
            family,
            int(seed),
            difficulty=int(difficulty.removeprefix("d")),
            split="train" if split == "train" else "heldout",
        )

    def environment(self, task: Task) -> TerminalEnv:
        return TerminalEnv(task, self.sandboxes)

    def init_params(self) -> Params:
        return init(jax.random.key(self.seed), self.model)

    def demonstrations(
        self, count: int, on_done: Callable[[int], None] = lambda done: None
    ) -> list[Episode]:
        """Runs reference solutions of training tasks in sandboxes and records them as episodes.

        Every third one starts with a slip: the first command with a letter wrong, whose
        tokens are not trained on, so that the policy has seen error messages, and how to go
        on after one. Raises RuntimeError when a reference does not solve its task here.
        """

        async def all_of_them() -> list[Episode]:
            stream, gate, done = self.training_tasks(0), asyncio.Semaphore(8), 0

            async def play(task: Task, commands: Sequence[str]) -> Episode:
                return await demonstrate(
                    self.environment(task), commands, self.protocol, self.limits, task_id=task.id
                )

            async def one(index: int) -> Episode:
                nonlocal done
                task, rng = stream[index], np.random.default_rng((self.seed, index))
                async with gate:
                    episode = None
                    if index % 3 == 0 and len(task.solution) < self.limits.max_turns - 1:
                        tried = await play(task, [slip(task.solution[0], rng), *task.solution])
                        # Some slips do harm that the reference does not undo.
                        episode = without_first_turn(tried) if is_success(tried) else None
                    if episode is None:
                        episode = await play(task, task.solution)
                if not is_success(episode):
                    why = episode.error or "its verifier says no"
                    raise RuntimeError(f"the reference of {task.id} fails here: {why}")
                done += 1
                on_done(done)
                return episode

            return list(await asyncio.gather(*map(one, range(count))))

        return self.thread.run(all_of_them())

    def warm_start(
        self,
        config: WarmStart,
        params: Params,
        demonstrations: Sequence[Episode],
        on_step: Callable[[int, float], None] = lambda step, loss: None,
    ) -> Params:
        """Trains on ``demonstrations`` (actions, and a little on observations)."""
        rates = [
            learning_rate_schedule(peak, warmup_steps=min(20, config.steps // 4))
            for peak in (config.learning_rate, 3e-3)
        ]
        optimizer = muon(rates[0], adam_learning_rate=rates[1])
        objective = losses.combine(
            actions=(1.0, losses.supervised()), world=(0.2, losses.observation_prediction())
        )
        learner = self.learner(params, objective, optimizer, episodes=config.episodes)
        rng, order = np.random.default_rng(self.seed), np.array([], np.int64)
        running: float | None = None
        for step in range(config.steps):
            if len(order) < config.episodes:
                order = np.concatenate([order, rng.permutation(len(demonstrations))])
            chosen, order = order[: config.episodes], order[config.episodes :]
            metrics = learner.learn([demonstrations[i] for i in chosen])
            loss = float(metrics["actions/loss"])
            running = loss if running is None else 0.9 * running + 0.1 * loss
            on_step(step + 1, running)
            if running < config.target_loss:
                break
        return learner.params()

    def learner(
        self,
        params: Params,
        objective: losses.Objective,
        optimizer: Optimizer,
        *,
        episodes: int,
        credit: Credit | None = None,
        rewards: Sequence[RewardTransform] = (),
        passes: Sequence[Pass] = (),
        augment: Augment | None = None,
        heads: Mapping[str, HeadConfig] | None = None,
        ema: bool = False,
        temperature: float = 1.0,
    ) -> Learner:
        """A learner of up to ``episodes`` a batch, and what ``augment`` adds to them."""
        # Forecasts are contexts of their own: their batches may take twice the rows.
        shares = (2, 3, 4, 8) if augment is None else (2, 4, 8, 16)
        shapes = Shapes(
            row_length=self.limits.max_context_tokens,
            rows=tuple(sorted({max(1, episodes * share // 8) for share in shares})),
            episodes=episodes * (1 + (augment.more if augment else 0)),
            turns=self.limits.max_turns,
        )
        if heads:
            params = add_heads(params, jax.random.key(self.seed), self.model, heads)
        return Learner(
            create_state(params, optimizer, seed=self.seed, ema=ema),
            make_update(
                self.model,
                objective,
                optimizer,
                temperature=temperature,
                outputs=head_outputs(heads or {}),
            ),
            shapes,
            self.model,
            credit=credit,
            rewards=rewards,
            passes=passes,
            augment=augment,
            temperature=temperature,
        )

    @contextmanager
    def engine(self, params: Params, slots: int) -> Iterator[Engine]:
        """A warmed-up rollout engine."""
        config = EngineConfig(
            slots=slots,
            max_len=self.limits.max_context_tokens,
            prefill_buckets=(16, 64),
            prefill_rows=(8, 32),
            decode_block=8,
        )
        engine = Engine(params, self.model, config)
        try:
            engine.warmup()
            yield engine
        finally:
            engine.close()

    def episode_loop(
        self,
        engine: Engine,
        tasks: Tasks | Sequence[Task],
        config: LoopConfig,
        temperature: float,
        *,
        version: int = 0,
        state: Mapping[str, Any] | None = None,
        after_group: AfterGroup | None = None,
    ) -> EpisodeLoop:
        return EpisodeLoop(
            engine,
            tasks,
            self.environment,
            self.protocol,
            SamplingConfig(temperature=temperature, max_new_tokens=self.limits.max_turn_tokens),
            config,
            self.limits,
            version=version,
            state=state,
            after_group=after_group,
        )

    def evaluate(
        self, engine: Engine, tasks: Sequence[Task], *, temperature: float = 1.0
    ) -> list[Episode]:
        """One episode a task with the engine's present weights; invalid ones are left out."""
        config = LoopConfig(
            group_size=1, groups_per_batch=len(tasks), min_valid=1, max_concurrent=64, seed=1
        )

        async def all_of_them() -> list[Episode]:
            async with self.episode_loop(engine, tasks, config, temperature) as loop:
                return list((await loop.collect()).episodes)

        return self.thread.run(all_of_them())
