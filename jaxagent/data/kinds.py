"""What each token of an episode is."""

from enum import IntEnum


class Kind(IntEnum):
    """The kind of a token; stored as uint8.

    Policy losses act on ACTION, observation prediction on OBSERVATION, and
    nothing is ever trained on PAD or TEMPLATE.
    """

    PAD = 0
    PROMPT = 1
    ACTION = 2  # sampled by the policy, stop tokens included
    OBSERVATION = 3  # the environment's own bytes
    TEMPLATE = 4  # role markers, exit status, truncation notices: our scaffolding
