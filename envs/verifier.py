"""Scores a finished episode: the agent is dead, the tests arrive, a clean shell runs them."""

from dataclasses import dataclass

from envs.sandboxes.base import Sandbox
from envs.tasks.task import Task

# On top of the sandbox's clean environment: neither packages nor modules nor settings that
# the agent left in its home or working directory are picked up by what the verifier runs.
VERIFIER_ENV = {
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}


class VerifierError(Exception):
    """The verifier, not the policy, failed: the episode is invalid, never scored 0."""


@dataclass(frozen=True)
class Verdict:
    """A score, and for people what the verifier printed."""

    reward: float
    output: str
    seconds: float


async def verify(sandbox: Sandbox, task: Task) -> Verdict:
    """Runs ``task.verify``: exit status 0 scores 1, status 1 scores 0.

    Raises VerifierError for any other status and for a time-out, SandboxError if the
    sandbox fails.
    """
    # First, so that nothing of the agent's is alive to see or change the files.
    await sandbox.stop()
    for path, data in task.verify_files.items():
        await sandbox.write_file(path, data, mode=0o755)
    result = await sandbox.exec_clean(task.verify, task.verify_timeout, env=VERIFIER_ENV)
    if result.timed_out:
        raise VerifierError(
            f"task {task.id}: the verifier ran over verify_timeout={task.verify_timeout:g} s; "
            f"its output: {_tail(result.text)}"
        )
    if result.exit_code not in (0, 1):
        raise VerifierError(
            f"task {task.id}: the verifier ended with status {result.exit_code}, where 0 or 1 "
            f"is a verdict; its output: {_tail(result.text)}"
        )
    return Verdict(float(result.exit_code == 0), result.text, result.seconds)


def _tail(text: str, characters: int = 2000) -> str:
    return repr(text[-characters:])
