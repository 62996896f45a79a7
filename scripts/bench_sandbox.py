"""Time to create a sandbox and to run a command in it, beside Docker's own exec call.

    python scripts/bench_sandbox.py --json bench_sandbox.json

Everything is measured in one run, the kinds in turn, so that a busy machine slows all
alike; figures are medians. The comparison: ``container.exec_run`` of the docker package
against a command on this package's persistent channel, in Docker and in local sandboxes.
Without a Docker daemon (``.ci/docker.sh`` starts one) only local figures are reported.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from envs.sandboxes.base import Sandbox, SandboxConfig, SandboxFactory, SandboxUnavailable
from envs.sandboxes.docker import DockerSandboxes
from envs.sandboxes.local import Isolation, LocalSandboxes

COMMAND = "true"
TARGETS = {"local_create_ms": 20.0, "local_command_ms": 8.0}
RATIO_TARGET = 8.0


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--creations", type=int, default=30, help="sandboxes made of each kind")
    parser.add_argument("--commands", type=int, default=100, help="commands run of each kind")
    parser.add_argument("--image", default="jaxagent-test:busybox", help="image of the containers")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.creations, options.commands, options.image))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def show(figures: dict[str, Any]) -> dict[str, Any]:
    """Prints figures as they become known, and hands them on."""
    for name, value in figures.items():
        target = TARGETS.get(name)
        note = "" if target is None else f"   (target: at most {target:g})"
        if name.startswith("ratio"):
            note = f"   (target: at least {RATIO_TARGET:g})"
        shown = f"{value:>12.3f}{note}" if isinstance(value, float) else f"{value:>12}"
        print(f"{name:42} {shown}", flush=True)
    return figures


async def measure(creations: int, commands: int, image: str) -> dict[str, Any]:
    """All figures, in milliseconds unless named otherwise."""
    figures = show(
        {
            "machine": f"{os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
            "load_before": os.getloadavg()[0],
        }
    )
    isolations: tuple[Isolation, ...] = ("bwrap", "unshare")
    for isolation in isolations:
        factory = LocalSandboxes(isolation=isolation)
        # The first kind that works is what users get: it carries the targets' names.
        prefix = "local" if "local_create_ms" not in figures else f"local_{isolation}"
        try:
            sandbox = await factory.create(SandboxConfig())
        except SandboxUnavailable as error:
            print(f"{isolation}: {error}")
            continue
        figures |= show(
            {
                f"{prefix}_isolation": isolation,
                f"{prefix}_create_ms": await created(factory, creations, SandboxConfig()),
                f"{prefix}_command_ms": await commanded(sandbox, commands),
            }
        )
        await factory.close()
    figures |= await beside_docker(min(creations, 10), commands, image)
    return figures | show({"load_after": os.getloadavg()[0]})


async def beside_docker(creations: int, commands: int, image: str) -> dict[str, Any]:
    """Docker's exec call and the persistent channels, one command of each in turn."""
    docker, local = DockerSandboxes(image=image), LocalSandboxes()
    try:
        contained = await docker.create(SandboxConfig())
    except SandboxUnavailable as error:
        print(f"docker: {error}; only local figures follow")
        return {}
    namespaced = await local.create(SandboxConfig())
    container = docker.client.containers.get(contained.container)

    async def exec_call() -> None:
        code, _ = await asyncio.to_thread(container.exec_run, ["/bin/sh", "-c", COMMAND])
        assert code == 0

    times = await in_turn(
        commands,
        {
            "docker_exec_api_ms": exec_call,
            "docker_channel_ms": lambda: run(contained),
            "local_channel_ms": lambda: run(namespaced),
        },
    )
    figures: dict[str, Any] = dict(times)
    for name in ("docker", "local"):
        ratio = times["docker_exec_api_ms"] / times[f"{name}_channel_ms"]
        figures[f"ratio_exec_api_over_{name}_channel"] = ratio
    show(figures)
    figures |= show({"docker_create_ms": await created(docker, creations, SandboxConfig())})
    await local.close()
    await docker.close()
    return figures


async def run(sandbox: Sandbox) -> None:
    result = await sandbox.exec(COMMAND, 30)
    assert result.exit_code == 0


async def created(factory: SandboxFactory, count: int, config: SandboxConfig) -> float:
    """Median time until a sandbox's shell is ready; removal is not counted."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        sandbox = await factory.create(config)
        times.append(time.perf_counter() - started)
        await sandbox.close()
    return statistics.median(times) * 1e3


async def commanded(sandbox: Sandbox, count: int) -> float:
    return (await in_turn(count, {"ms": lambda: run(sandbox)}))["ms"]


async def in_turn(count: int, kinds: dict[str, Callable[[], Awaitable[None]]]) -> dict[str, float]:
    """Median milliseconds of each kind of command."""
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(count):
        for name, once in kinds.items():
            started = time.perf_counter()
            await once()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


if __name__ == "__main__":
    main()
