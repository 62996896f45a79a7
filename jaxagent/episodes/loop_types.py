"""Settings, results and errors of the episode loop."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxagent.episodes.episode import Episode
from jaxagent.episodes.groups import Group


class LoopStopped(Exception):
    """The loop was asked to stop; every environment has been closed."""


class EnvironmentsFailing(Exception):
    """No group of a long row had a valid episode; the fault is not in one task."""


class AlwaysStale(Exception):
    """Fresh groups carry old versions: the engine was not given the loop's version."""


class NoTasksLeft(Exception):
    """Every task of the source is quarantined."""


@dataclass(frozen=True)
class LoopConfig:
    """How groups are made.

    Attributes:
      group_size: episodes a task.
      groups_per_batch: groups a ``collect`` returns.
      max_staleness: how many versions behind the learner a group's oldest token may be.
      max_concurrent: episodes at once (environments open at once).
      min_valid: a group with fewer valid episodes is dropped (1 for evaluation).
      retries: further tries of an episode whose environment failed, each on a fresh one.
      retry_delay: seconds before the first retry; doubled each time.
      quarantine_after: groups of a task dropped in a row before the task is left out.
      max_failed_groups: groups in a row without any valid episode that stop the run.
      gather_seconds: how long a group's first prompts wait for each other, so that the
        engine sees them together and prefills them once.
      seed: of the run; an episode's seed depends on it, the task index and the rollout.
    """

    group_size: int = 8
    groups_per_batch: int = 8
    max_staleness: int = 0
    max_concurrent: int = 64
    min_valid: int = 2
    retries: int = 2
    retry_delay: float = 0.2
    quarantine_after: int = 2
    max_failed_groups: int = 16
    gather_seconds: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        minimum = {
            "group_size": 1,
            "groups_per_batch": 1,
            "max_staleness": 0,
            "max_concurrent": 1,
            "min_valid": 1,
            "retries": 0,
            "quarantine_after": 1,
            "max_failed_groups": 1,
        }
        for name, least in minimum.items():
            if getattr(self, name) < least:
                raise ValueError(
                    f"LoopConfig.{name} must be at least {least}, got {getattr(self, name)}"
                )
        if self.min_valid > self.group_size:
            raise ValueError(
                f"LoopConfig.min_valid={self.min_valid} exceeds group_size={self.group_size}: "
                "every group would be dropped; lower min_valid"
            )


@dataclass(frozen=True)
class Collected:
    """One batch of groups, by index, and what happened since the batch before.

    ``counts``: ``"groups/started"``, ``"groups/dropped_invalid"``, ``"groups/dropped_stale"``,
    ``"groups/filtered"``, ``"groups/annotation_failed"``, ``"episodes/finished"``,
    ``"episodes/retried"``, ``"episodes/invalid/<cause>"``,
    ``"tasks/quarantined"``, ``"tasks/skipped"``, ``"environments/close_failed"``.
    ``wait_seconds``: how long ``collect`` waited.
    """

    groups: tuple[Group, ...]
    version: int
    counts: Mapping[str, int]
    wait_seconds: float

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return tuple(episode for group in self.groups for episode in group.episodes)
