"""One event loop and one factory a backend for all tests of sandboxes."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from envs.sandboxes.base import ExecResult, Sandbox, SandboxConfig, SandboxUnavailable
from envs.sandboxes.local import LocalSandboxes

T = TypeVar("T")
IMAGE = os.environ.get("JAXAGENT_TEST_IMAGE", "jaxagent-test:busybox")
BACKENDS = ("bwrap", "unshare", "docker")
Run = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture(scope="session")
def run() -> Iterator[Run[Any]]:
    with asyncio.Runner() as runner:
        yield runner.run


@dataclass
class Backend:
    """A backend under test."""

    name: str
    factory: Any
    run: Run[Any]

    @property
    def is_docker(self) -> bool:
        return self.name == "docker"

    def create(self, **limits: Any) -> Sandbox:
        made: Sandbox = self.run(self.factory.create(SandboxConfig(**limits)))
        return made

    def fresh_factory(self, base_dir: Path) -> Any:
        if self.is_docker:
            from envs.sandboxes.docker import DockerSandboxes

            return DockerSandboxes(image=IMAGE)
        return LocalSandboxes(base_dir, isolation=self.name)  # type: ignore[arg-type]

    def kill_from_outside(self, sandbox: Any) -> None:
        """Ends the supervisor as an operator, or the kernel, would."""
        if self.is_docker:
            self.factory.client.api.kill(sandbox.container)
        else:
            os.kill(init_pid(sandbox), 9)


def init_pid(sandbox: Any) -> int:
    """PID 1 of a local sandbox, as this machine numbers it."""
    pid = sandbox.machine.monitor_pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def available(run: Run[Any], name: str) -> Any:
    """A factory that works here. In CI a missing backend is a failure, elsewhere a skip."""
    try:
        if name == "docker":
            from envs.sandboxes.docker import DockerSandboxes

            factory: Any = DockerSandboxes(image=IMAGE)
        else:
            factory = LocalSandboxes(isolation=name)  # type: ignore[arg-type]
        run(run_once(factory))
        return factory
    except SandboxUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not available in CI: {error}")
        pytest.skip(f"{name} is not available: {error}")


async def run_once(factory: Any) -> None:
    await (await factory.create(SandboxConfig())).close()


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.docker) if n == "docker" else n for n in BACKENDS],
)
def backend(request: pytest.FixtureRequest, run: Run[Any]) -> Iterator[Backend]:
    factory = available(run, request.param)
    yield Backend(request.param, factory, run)
    run(factory.close())


@dataclass
class Shell:
    """Synchronous handle on a sandbox."""

    backend: Backend
    sandbox: Any

    def __call__(self, command: str, timeout: float = 20.0) -> ExecResult:
        result: ExecResult = self.backend.run(self.sandbox.exec(command, timeout))
        return result

    def out(self, command: str, timeout: float = 20.0) -> str:
        """The output of a command that succeeds."""
        result = self(command, timeout)
        assert result.exit_code == 0, result
        return result.output

    def clean(self, command: str, timeout: float = 20.0, **env: str) -> ExecResult:
        result: ExecResult = self.backend.run(self.sandbox.exec_clean(command, timeout, env))
        return result

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        self.backend.run(self.sandbox.write_file(path, data, mode))

    def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        data: bytes = self.backend.run(self.sandbox.read_file(path, max_bytes))
        return data


@pytest.fixture(scope="module")
def shared(backend: Backend) -> Iterator[Shell]:
    """One sandbox for the tests of a module that leave it usable."""
    sandbox = backend.create()
    yield Shell(backend, sandbox)
    backend.run(sandbox.close())


@pytest.fixture
def shell(shared: Shell) -> Shell:
    """The shared sandbox, back in its home."""
    shared("cd /home/agent")
    return shared


@pytest.fixture
def make(backend: Backend) -> Iterator[Callable[..., Shell]]:
    """Makes sandboxes of a test's own."""
    made: list[Shell] = []

    def new(**limits: Any) -> Shell:
        made.append(Shell(backend, backend.create(**limits)))
        return made[-1]

    yield new
    for one in made:
        backend.run(one.sandbox.close())
