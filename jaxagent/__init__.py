"""jaxagent: reinforcement learning of terminal agents in JAX."""

__version__ = "0.1.0"
