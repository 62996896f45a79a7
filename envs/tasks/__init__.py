"""Tasks for terminal agents, whatever format they come from."""

from envs.tasks.procedural import FAMILIES, Family, generate, task_stream
from envs.tasks.task import Task

__all__ = ["FAMILIES", "Family", "Task", "generate", "task_stream"]
