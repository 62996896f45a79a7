"""Every recipe: its page, its settings, and an update on real episodes with all it declares."""

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxagent.data.hindsight import Skills

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
RECIPES = sorted(
    p.stem for p in EXPERIMENTS.glob("*.py") if "\nfrom pipeline import Run" in p.read_text()
)
# Every part of the machinery once; all recipes in CI.
CHOSEN = ("ppo", "sdpo", "cope", "ovcsd", "opid", "igpo", "gigpo", "flow_rl")
UPDATED = RECIPES if os.environ.get("CI") else CHOSEN


@pytest.fixture(scope="module", autouse=True)
def experiments() -> Iterator[None]:
    sys.path.insert(0, str(EXPERIMENTS))
    yield
    sys.path.remove(str(EXPERIMENTS))


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Compiles without most of XLA's optimisations: many programs, each run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    import wiring

    size = wiring.ModelSize(hidden=64, layers=1, mlp=32)
    tasks = wiring.TaskConfig(families=("follow_note", "count_lines", "make_dir"))
    with wiring.Workbench(tasks, size, seed=0) as found:
        yield found


@pytest.fixture(scope="module")
def episodes(bench: Any) -> list[Any]:
    """Groups of four attempts at a task, played for real: some succeed, some do not."""
    from jaxagent.episodes.scripted import demonstrate

    tasks = [bench.training_tasks(0)[index] for index in range(3)]

    def play(task: Any, commands: Any) -> Any:
        return bench.thread.run(
            demonstrate(
                bench.environment(task), commands, bench.protocol, bench.limits, task_id=task.id
            )
        )

    found = []
    for index, task in enumerate(tasks):
        for attempt, commands in enumerate(
            (task.solution, ("ls", *task.solution), ("ls", "ls"), ("true",))
        ):
            episode = play(task, commands)
            contexts = tuple(
                replace(c, versions=np.where(c.kinds == 2, 0, -1).astype(np.int32))
                for c in episode.contexts
            )
            info = {**episode.info, "skills": Skills("look", ((0, "list"),))}
            if attempt == 3:
                info = {"skills_error": "nothing readable"}
            found.append(replace(episode, group_id=f"g{index}", contexts=contexts, info=info))
    assert {e.reward for e in found} == {0.0, 1.0} and all(e.valid for e in found)
    return found


def captured(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the recipe asks ``run_recipe`` for."""
    module = importlib.import_module(name)
    found: dict[str, Any] = {}

    def capture(title: str, run: Any, config: Any, *rest: Any) -> None:
        found.update(title=title, objective=rest[0], credit=rest[1], method=(*rest, None)[2])

    monkeypatch.setattr(module, "run_recipe", capture)
    config = module.Config()
    module.main(replace(config, run=replace(config.run, out=tmp_path)))
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_page_with_its_source(name: str) -> None:
    text = (EXPERIMENTS / f"{name}.py").read_text()
    assert len(text.splitlines()) < 100
    doc = importlib.import_module(name).__doc__
    assert doc and len(doc) > 60


@pytest.mark.parametrize("name", UPDATED)
def test_a_recipe_updates_on_real_episodes(
    name: str, bench: Any, episodes: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import method
    import pipeline

    asked = captured(name, monkeypatch, tmp_path)
    run = pipeline.Run(out=tmp_path, rl=replace(pipeline.Reinforce(), groups=3, group_size=4))
    monkeypatch.setattr(pipeline, "muon", lambda *a, **k: pipeline.adamw(1e-3))
    job = pipeline._Job(run, bench, None, None, None)  # type: ignore[arg-type]
    start = bench.init_params()
    learner = job.learner(
        start, asked["objective"], asked["credit"], asked["method"] or method.Method()
    )
    before = jax.tree.map(np.asarray, learner.params())
    metrics = learner.learn(episodes)
    values = {k: float(v) for k, v in metrics.items()}
    assert np.isfinite(list(values.values())).all(), values
    after = learner.params()
    moved = [
        bool((a != np.asarray(b)).any())
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ]
    assert any(moved)
    covered = [v for k, v in values.items() if k.startswith("teachers/") and "coverage" in k]
    assert all(0 < v <= 1 for v in covered)
    answered = [v for k, v in values.items() if k.startswith("answers/")]
    assert all(v > 0.9 for v in answered)
    # Only what a term declares is computed, and every term had something to act on.
    for term in asked["objective"].terms:
        if f"{term.name}/tokens" in values:
            assert values[f"{term.name}/tokens"] > 0
        if f"{term.name}/pairs" in values:
            assert values[f"{term.name}/pairs"] > 0
