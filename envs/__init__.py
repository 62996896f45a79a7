"""envs: terminal environments, sandboxes and tasks. Knows nothing of JAX."""
