"""The same budget for many methods: one warm start, tasks and seeds, one report.

    python experiments/study.py --steps 72 --seeds 0 1 2

Every run is a recipe in a process of its own, from the same warm start for a seed; all get the
same number of episodes. A run that is done is not done again, one that was stopped goes on.
The report (``report.html``, ``report.md``) is written after every run, from what there is.
``--extra`` is passed on to every recipe: ``--extra="--tasks.held-out 64"``.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import comparison
import report
from rich.console import Console

from jaxagent import config as config_lib

HERE = Path(__file__).parent
RECIPES = sorted(p.stem for p in HERE.glob("*.py") if "\nfrom pipeline import Run" in p.read_text())

# Name -> recipe and its arguments. ECHO's baseline is ECHO with the prediction's weight at 0:
# nothing else differs, and its observation cross-entropy is logged all the same.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": ("echo", ("--world-weight", "0")),
    "echo-0.01": ("echo", ("--world-weight", "0.01")),
    "echo-0.05": ("echo", ("--world-weight", "0.05")),
    "echo-0.2": ("echo", ("--world-weight", "0.2")),
    "world-weak": ("echo_verifier_free", ()),
    "tba": ("tba", ()),
    "flow_balance": ("flow_balance", ()),
    "sd_search": ("sd_search", ()),
    "opid": ("opid", ()),
    "gtpo": ("gtpo", ()),
}
# These start from a policy that has seen a third of the demonstrations' updates.
WEAK = frozenset({"world-weak"})


@dataclass(frozen=True)
class Config:
    """Compares methods at equal steps of the environment."""

    out: Path = Path("runs/study")
    """Folder of all runs and of the report."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which: names of this study, or of any recipe."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of warm start, tasks and sampling."""
    steps: int = 72
    """Updates of each run; an update takes the same number of episodes in all of them."""
    evaluate_every: int = 12
    """Updates between evaluations on held-out tasks."""
    weak_steps: int = 60
    """Updates of the weak warm start."""
    extra: str = field(default="")
    """Further arguments of every recipe."""

    def __post_init__(self) -> None:
        unknown = [m for m in self.methods if m not in METHODS and m not in RECIPES]
        config_lib.require(
            not unknown,
            f"methods: unknown {', '.join(unknown)}; there are {', '.join([*METHODS, *RECIPES])}",
        )
        config_lib.require(len(self.seeds) > 0, "seeds is empty: name at least one")
        config_lib.require(self.steps > 1, f"steps must be at least 2, got {self.steps}")


def run(recipe: str, out: Path, arguments: tuple[str, ...], console: Console) -> None:
    """Runs a recipe to its end, or from where it stopped. Raises RuntimeError when it fails."""
    if (out / "summary.json").exists():
        return
    if (out / "warm_start").is_dir() and (out / "config.json").exists():
        arguments = (*arguments, "--resume", "True")
    command = [sys.executable, str(HERE / f"{recipe}.py"), "--out", str(out), *arguments]
    console.print("$", shlex.join(command[1:]), highlight=False)
    if subprocess.run(command).returncode != 0:
        raise RuntimeError(f"{recipe} failed in {out}; run the study again to go on from there")
    if not (out / "summary.json").exists():
        raise SystemExit("stopped; run the study again to go on")


def main(config: Config) -> None:
    console = report.make_console()
    extra = tuple(shlex.split(config.extra))
    for seed in config.seeds:
        for method in config.methods:
            recipe, arguments = METHODS.get(method, (method, ()))
            # A warm start is what a run of two updates leaves behind.
            start = config.out / ("weak" if method in WEAK else "start") / f"seed{seed}"
            weak = ("--warm.steps", str(config.weak_steps)) if method in WEAK else ()
            common = ("--seed", str(seed), *extra)
            run("echo", start, ("--rl.steps", "2", *weak, *common), console)
            budget = ("--rl.steps", str(config.steps))
            every = ("--rl.evaluate-every", str(config.evaluate_every))
            given = ("--start", str(start), *budget, *every, *common, *arguments)
            run(recipe, config.out / method / f"seed{seed}", given, console)
            comparison.write(config.out, config.methods, config.seeds)
    console.print(f"report: {config.out / 'report.html'}")


if __name__ == "__main__":
    main(config_lib.parse(Config()))
