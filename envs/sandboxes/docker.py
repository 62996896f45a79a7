"""Sandboxes that are Docker containers.

The container's only configured process is the supervisor (PID 1), reached through one
attached connection for the life of the container: a command costs a message, not an exec
call of the API. Time-outs and verifiers kill and start the same container, so its files
stay and nothing that ran before is trusted. The image needs ``/bin/sh`` and nothing else.

Needs the ``docker`` extra. Honours DOCKER_HOST, DOCKER_TLS_VERIFY, DOCKER_CERT_PATH and
the current Docker context; the API version is negotiated.
"""

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from envs.sandboxes import archive, owner
from envs.sandboxes.attach import AttachChannel
from envs.sandboxes.base import (
    ExecResult,
    SandboxConfig,
    SandboxError,
    SandboxUnavailable,
)
from envs.sandboxes.channel import START, SUPERVISOR, ShellState
from envs.sandboxes.defaults import shell_environment
from envs.sandboxes.shell import ShellSession

if TYPE_CHECKING:
    import docker

OWNER = "jaxagent.owner"
DEADLINE = "jaxagent.deadline"
OPEN_FILES = 1024
SHM_BYTES = 64 << 20

P = ParamSpec("P")
T = TypeVar("T")


def connect(timeout: float = 60.0) -> "docker.DockerClient":
    """The client of the daemon that the environment or the current context names."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise SandboxUnavailable(
            "the docker package is missing: pip install 'jaxagent[docker]'"
        ) from error
    try:
        if "DOCKER_HOST" not in os.environ:
            name = os.environ.get("DOCKER_CONTEXT")
            context = docker.ContextAPI.get_context(name) if name else None
            context = context or docker.ContextAPI.get_current_context()
            if context is not None and context.Name != "default":
                return docker.DockerClient(
                    base_url=context.Host,
                    tls=context.TLSConfig or False,
                    version="auto",
                    timeout=int(timeout),
                )
        return docker.from_env(version="auto", timeout=int(timeout))
    except DockerException as error:
        raise SandboxUnavailable(
            f"no Docker daemon answers ({error}); start one or set DOCKER_HOST"
        ) from error


def reap_orphans(client: "docker.DockerClient") -> list[str]:
    """Removes containers and snapshots whose owner is dead or whose deadline has passed.

    Only what carries this package's labels is looked at. An owner on another machine (or in
    another PID namespace) cannot be checked and is left alone until its deadline.
    """
    from docker.errors import APIError

    def orphaned(labels: dict[str, str]) -> bool:
        dead = owner.is_dead(labels[OWNER])
        late = time.time() > float(labels.get(DEADLINE, "inf"))
        return dead is True or (dead is None and late)

    reaped = []
    for found in client.api.containers(all=True, filters={"label": OWNER}):
        if orphaned(found["Labels"]):
            with suppress(APIError):
                client.api.remove_container(found["Id"], v=True, force=True)
                reaped.append(found["Id"])
    for image in client.api.images(filters={"label": OWNER}):
        if orphaned(image["Labels"]):
            with suppress(APIError):
                client.api.remove_image(image["Id"], force=True)
                reaped.append(image["Id"])
    return reaped


class DockerMachine:
    """The processes of one container (``shell.Machine``)."""

    def __init__(self, factory: "DockerSandboxes") -> None:
        self._factory = factory
        self.container = ""

    async def start(self) -> AttachChannel:
        return await self._factory.call(self._start)

    def _start(self) -> AttachChannel:
        from docker.errors import APIError

        api = self._factory.client.api
        try:
            # Before the start, so that nothing the container says is missed.
            stream = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            connection = api.attach_socket(self.container, params=stream)
            channel = AttachChannel(connection)
            try:
                api.start(self.container)
            except BaseException:
                channel.close()
                raise
            return channel
        except APIError as error:
            raise SandboxError(f"cannot start the container: {error.explanation}") from error

    def started(self) -> None:
        pass

    async def kill(self) -> None:
        if self.container:
            await self._factory.call(self._kill)

    def _kill(self) -> None:
        from docker.errors import APIError

        api = self._factory.client.api
        try:
            api.kill(self.container)
            api.wait(self.container)
        except APIError as error:
            # 409: it does not run; 404: it is gone.
            if error.status_code not in (404, 409):
                raise SandboxError(f"cannot kill the container: {error.explanation}") from error

    def kill_soon(self) -> None:
        pass

    async def cause_of_death(self) -> str:
        return await self._factory.call(self._cause)

    def _cause(self) -> str:
        from docker.errors import APIError

        try:
            state = self._factory.client.api.inspect_container(self.container)["State"]
        except APIError as error:
            return f"the container is gone: {error.explanation}"
        except OSError:
            return "the Docker daemon does not answer any more"
        why = "out of memory" if state.get("OOMKilled") else f"exit status {state.get('ExitCode')}"
        return f"the container stopped ({why}) {state.get('Error', '')}".strip()


class DockerSandbox:
    """See ``base.Sandbox``; made by ``DockerSandboxes.create``."""

    def __init__(self, factory: "DockerSandboxes", config: SandboxConfig) -> None:
        self._factory = factory
        self._config = config
        self._machine = DockerMachine(factory)
        self._session = ShellSession(
            self._machine, ShellState(config.workdir, ""), config.max_output_bytes
        )
        self._owner = (0, 0)
        self._snapshots: dict[str, ShellState] = {}
        self._closing: asyncio.Task[None] | None = None

    @property
    def container(self) -> str:
        """The container's identifier; another one after ``restore``."""
        return self._machine.container

    async def open(self) -> None:
        """Makes and starts the container."""
        assert self._config.image is not None
        user = await self._make_container(self._config.image)
        if user.partition(":")[0] not in ("", "0", "root"):
            self._session.state = ShellState("/", "")
            ids = await self._session.exec("id -u && id -g", 30)
            self._owner = tuple(map(int, ids.output.split()))  # type: ignore[assignment]
            self._session.state = ShellState(self._config.workdir, "")
            await self._call(archive.make_directory, self._config.workdir, self._owner)
            await self._session.stop()
        else:
            await self._call(archive.make_directory, self._config.workdir, self._owner)
        await self._session.start()

    async def _make_container(self, image: str) -> str:
        container, user = await self._factory.call(
            self._factory.make_container, image, self._config
        )
        self._machine.container = container
        return user

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        api, container = self._factory.client.api, self.container
        return await self._factory.call(function, api, container, *arguments)

    async def exec(self, command: str, timeout: float) -> ExecResult:
        return await self._session.exec(command, timeout)

    async def exec_clean(
        self, command: str, timeout: float, env: dict[str, str] | None = None
    ) -> ExecResult:
        return await self._session.exec_clean(command, timeout, env)

    async def stop(self) -> None:
        await self._session.stop()

    async def write_file(self, path: str | PurePosixPath, data: bytes, mode: int = 0o644) -> None:
        self._session.check_alive()
        await self._call(archive.write_file, str(path), data, mode, self._owner)

    async def read_file(self, path: str | PurePosixPath, max_bytes: int = 16 << 20) -> bytes:
        self._session.check_alive()
        return await self._call(archive.read_file, str(path), max_bytes)

    async def snapshot(self) -> str:
        self._session.check_alive()
        image = await self._factory.call(self._factory.commit, self.container)
        self._snapshots[image] = self._session.state
        return image

    async def restore(self, snapshot: str) -> None:
        if snapshot not in self._snapshots:
            raise SandboxError(f"snapshot={snapshot!r}: this sandbox has no such snapshot")
        await self._session.stop()
        await self._factory.call(self._factory.remove_container, self.container)
        await self._make_container(snapshot)
        self._session.state = self._snapshots[snapshot]

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        # A cancelled caller leaves, the removal goes on.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            self._session.hang_up()
            if self.container:
                await self._factory.call(self._factory.remove_container, self.container)
            for image in self._snapshots:
                await self._factory.call(self._factory.remove_image, image)
        finally:
            self._machine.container = ""
            await self._session.close()
            self._factory.forget(self)


class DockerSandboxes:
    """Makes ``DockerSandbox``es.

    Args:
      client: a connected client; by default the one of the environment, closed with this.
      image: for configurations that name none.
      max_age: seconds after which a sandbox may be reaped by anyone who cannot tell whether
        its owner lives.
      threads: concurrent calls of the Docker API.
    """

    def __init__(
        self,
        client: "docker.DockerClient | None" = None,
        image: str | None = None,
        max_age: float = 24 * 3600.0,
        threads: int = 16,
    ) -> None:
        self._client = client
        self._own_client = client is None
        self._image = image
        self._max_age = max_age
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="docker")
        self._opening = asyncio.Lock()
        self._opened = False
        self._closed = False
        self._sandboxes: set[DockerSandbox] = set()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def client(self) -> "docker.DockerClient":
        assert self._client is not None, "set by the first create"
        return self._client

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking function in a thread of this factory's."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, functools.partial(function, *args, **kwargs)
        )

    async def create(self, config: SandboxConfig) -> DockerSandbox:
        if self._closed:
            raise SandboxError("this factory is closed")
        image = config.image or self._image
        if image is None:
            raise SandboxUnavailable("image=None: a docker sandbox needs an image")
        async with self._opening:
            if not self._opened:
                await self.call(self._open)
        sandbox = DockerSandbox(self, replace(config, image=image))
        self._sandboxes.add(sandbox)
        # The container may come into being after this call was cancelled; it is then
        # removed by whoever made it.
        making = asyncio.ensure_future(sandbox.open())
        try:
            await asyncio.shield(making)
        except BaseException:
            await self._detach(_abandon(making, sandbox))
            raise
        return sandbox

    async def _detach(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await asyncio.shield(task)

    def _open(self) -> None:
        if self._client is None:
            self._client = connect()
        reap_orphans(self._client)
        self._opened = True

    def make_container(self, image: str, config: SandboxConfig) -> tuple[str, str]:
        """Makes a container; returns its identifier and the image's user."""
        from docker.errors import APIError, ImageNotFound
        from docker.types import LogConfig, Ulimit

        api = self.client.api
        memory = None if config.memory_mb is None else config.memory_mb << 20
        limits = [
            Ulimit(name="core", soft=0, hard=0),
            Ulimit(name="nofile", soft=OPEN_FILES, hard=OPEN_FILES),
        ]
        if config.max_file_mb is not None:
            size = config.max_file_mb << 20
            limits.append(Ulimit(name="fsize", soft=size, hard=size))
        try:
            user = api.inspect_image(image)["Config"].get("User") or ""
            made = api.create_container(
                image,
                name=f"jaxagent-{secrets.token_hex(8)}",
                entrypoint=["/bin/sh", "-c", START + SUPERVISOR, "sh"],
                command=[],
                hostname="sandbox",
                environment={**shell_environment(), **config.env},
                labels=self._labels(),
                stdin_open=True,
                tty=False,
                working_dir="/",
                host_config=api.create_host_config(
                    mem_limit=memory,
                    memswap_limit=memory,
                    pids_limit=config.max_processes,
                    nano_cpus=None if config.cpus is None else int(config.cpus * 1e9),
                    network_mode="bridge" if config.network else "none",
                    cap_drop=["ALL"],
                    security_opt=["no-new-privileges"],
                    ulimits=limits,
                    shm_size=SHM_BYTES,
                    # What commands print goes to the attached connection only, not to a
                    # log file that grows with it.
                    log_config=LogConfig(type="none"),
                ),
            )
        except ImageNotFound as error:
            raise SandboxUnavailable(
                f"image={image!r}: not on the Docker daemon; pull or build it first"
            ) from error
        except APIError as error:
            raise SandboxError(f"cannot make a container: {error.explanation}") from error
        container: str = made["Id"]
        # Without swap accounting memory is limited and swap is not: that is not refused.
        warnings = [w for w in made.get("Warnings") or () if "swap" not in w.lower()]
        if warnings:
            self.remove_container(container)
            raise SandboxUnavailable(
                f"the Docker daemon cannot enforce a limit: {'; '.join(warnings)}"
            )
        return container, user

    def _labels(self) -> dict[str, str]:
        return {OWNER: owner.owner_id(), DEADLINE: f"{time.time() + self._max_age:.0f}"}

    def commit(self, container: str) -> str:
        """Saves a container's file system as an image of this owner's."""
        from docker.errors import APIError

        changes = [f"LABEL {name}={value}" for name, value in self._labels().items()]
        try:
            image: str = self.client.api.commit(container, changes=changes)["Id"]
            return image
        except APIError as error:
            raise SandboxError(f"cannot snapshot the container: {error.explanation}") from error

    def remove_container(self, container: str) -> None:
        """Removes a container, running or not, and its volumes."""
        from docker.errors import APIError

        try:
            self.client.api.remove_container(container, v=True, force=True)
        except APIError as error:
            # 409: its removal is under way.
            if error.status_code not in (404, 409):
                raise SandboxError(f"cannot remove a container: {error.explanation}") from error

    def remove_image(self, image: str) -> None:
        from docker.errors import APIError

        with suppress(APIError):
            self.client.api.remove_image(image, force=True)

    def forget(self, sandbox: DockerSandbox) -> None:
        self._sandboxes.discard(sandbox)

    async def close(self) -> None:
        """Closes every sandbox. Idempotent."""
        self._closed = True
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)))
        if self._own_client and self._client is not None:
            self._client.close()
            self._client = None
            self._opened = False
        self._threads.shutdown(wait=False)


async def _abandon(making: asyncio.Future[None], sandbox: DockerSandbox) -> None:
    """Waits for a creation nobody wants any more and removes what came of it."""
    await asyncio.gather(making, return_exceptions=True)
    await sandbox.close()
