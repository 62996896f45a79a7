"""What a recipe may add to a run, beyond its objective and its credit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from wiring import Workbench

from jaxagent.credit.rewards import RewardTransform
from jaxagent.data.augment import Augment
from jaxagent.episodes.loop import AfterGroup
from jaxagent.models.heads import HeadConfig
from jaxagent.models.transformer import Params
from jaxagent.rollout.engine import Engine
from jaxagent.training.passes import Pass


@dataclass(frozen=True)
class Method:
    """Everything is optional.

    Attributes:
      rewards: transforms of the rewards, before credit.
      reads: scores that these transforms read.
      passes: ``(bench, warm start) -> passes``, after those of "reference" and "proximal",
        which come by themselves where an objective or a credit reads them.
      augment: sequences that are trained on beside the episodes.
      heads: small networks on the hidden states; outputs of the same names.
      ema: whether the state keeps a moving average of the weights, the teacher then.
      after_group: what is done with a finished group before it is delivered.
    """

    rewards: Sequence[RewardTransform] = ()
    reads: frozenset[str] = frozenset()
    passes: Callable[[Workbench, Params], Sequence[Pass]] = lambda bench, start: ()
    augment: Callable[[Workbench], Augment] | None = None
    heads: Mapping[str, HeadConfig] = field(default_factory=dict)
    ema: bool = False
    after_group: Callable[[Workbench, Engine], AfterGroup] | None = None
