"""The table of every number a run may write.

``python -m jaxagent.training.metric_names`` prints docs/metrics.md.
"""

import difflib
import re
from collections.abc import Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """What a number means, and its unit (``"1"`` for a fraction or a plain ratio)."""

    description: str
    unit: str


def _section(text: str) -> dict[str, Metric]:
    rows = [line.split(" | ") for line in text.strip().splitlines()]
    return {name.strip(): Metric(about.strip(), unit.strip()) for name, unit, about in rows}


# A part in <angle brackets> stands for any one name: a loss's own term, an error's class.
METRICS: Mapping[str, Metric] = _section("""
episodes/success | 1 | fraction of valid episodes that reached the full reward
episodes/reward_mean | reward | mean reward of valid episodes
episodes/reward_std | reward | standard deviation of the rewards of valid episodes
episodes/valid | episodes | valid episodes in the batch
episodes/invalid | episodes | failed by their environment, dropped groups included; never scored
episodes/invalid/<cause> | episodes | the same by the class of the error
episodes/retried | tries | failed tries that were repeated on a fresh environment
episodes/finished | episodes | episodes that ended since the last batch, in whatever way
episodes/truncated | 1 | fraction of valid episodes that a limit ended
episodes/truncated/<cause> | 1 | the same by cause: context, turns, time, tokens
episodes/declared_done | 1 | fraction of valid episodes that the policy ended by itself
episodes/malformed | 1 | fraction of turns without an action that can be run
episodes/skills_unparsable | episodes | valid episodes whose own analysis could not be parsed
episodes/empty | episodes | valid episodes without any sampled token
episodes/turns_mean | turns | mean number of turns of valid episodes
episodes/turns_max | turns | largest number of turns
episodes/action_tokens_mean | tokens | mean number of sampled tokens
episodes/observation_tokens_mean | tokens | mean number of observation tokens
episodes/tokens_mean | tokens | mean length, prompt and scaffolding included
episodes/tokens_max | tokens | largest length
episodes/seconds_mean | s | mean wall time of an episode
episodes/seconds_max | s | longest wall time of an episode
episodes/environment_seconds_mean | s | mean time an episode waited for its environment
episodes/sample_seconds_mean | s | mean time an episode waited for the sampler
groups/count | groups | groups with a valid episode in the batch
groups/no_signal | groups | groups whose valid episodes all have the same reward: no advantage
groups/solved | groups | groups whose valid episodes all succeeded
groups/unsolved | groups | groups of which no valid episode succeeded
groups/reward_mean | reward | mean over groups of the mean reward
groups/reward_std | reward | mean over groups of the standard deviation
groups/started | groups | groups started since the last batch
groups/dropped_invalid | groups | groups dropped for too few valid episodes
groups/filtered | groups | groups that after_group filtered out, such as those without signal
groups/annotation_failed | groups | groups on which after_group failed; delivered as they were
groups/dropped_stale | groups | groups dropped because older than max_staleness
groups/staleness_mean | versions | mean age of a group's oldest token, in updates
groups/staleness_max | versions | largest age of a group's oldest token, in updates
tasks/quarantined | tasks | tasks left out from now on, after repeated failures
tasks/skipped | tasks | quarantined tasks that came up and were passed over
environments/close_failed | environments | environments whose close failed or took too long
rollout/tokens_per_second | tokens/s | sampled tokens over the wall time of the step
rollout/current_tokens | tokens | ACTION tokens drawn by the very weights that are updated
rollout/logprob_gap_mean | nats | mean difference of sampler and trainer log-probs on those tokens
rollout/logprob_gap_max | nats | the largest such difference
rollout/staleness_mean | versions | mean age of an ACTION token, in updates
rollout/staleness_max | versions | largest age of an ACTION token, in updates
engine/tokens | tokens | tokens sampled since the engine started
engine/prefill_tokens | tokens | tokens prefilled since the engine started
engine/copies | sessions | prompts copied from a session that had prefilled them
engine/evictions | sessions | idle sessions that lost their slot
engine/compilations | count | programs the engine compiled since its warm-up; must stay 0
learner/compilations | count | shapes compiled for the update; must not grow after the warm-up
time/step | s | wall time from one update to the next
time/wait | s | time the learner waited for episodes
time/learn | s | time from dispatch to end of the updates that ended in this step
time/sample | s | time the engine's thread was busy
time/idle | s | time the engine's thread had nothing to do
time/environment | s | environment time summed over the batch's episodes
time/evaluate | s | wall time of an evaluation
time/checkpoint | s | time the run stood still for a checkpoint
batch/action_tokens | tokens | ACTION tokens of the batch
batch/observation_tokens | tokens | OBSERVATION tokens of the batch
batch/padding_fraction | 1 | fraction of the batch that is padding
batch/episodes | episodes | valid episodes in the batch
batch/action_nll | nats | mean negative log-prob of ACTION tokens
batch/observation_nll | nats | mean negative log-prob of OBSERVATION tokens
advantages/mean | reward | mean advantage of an ACTION token
advantages/abs_mean | reward | mean size of the advantage of an ACTION token
advantages/clipped_fraction | 1 | fraction of ACTION tokens whose advantage was clipped
rewards/overlong_fraction | 1 | fraction of valid episodes penalised for their length
rewards/kl | nats | k1 estimate of the KL to the reference, as taken off the reward
optimizer/grad_norm | 1 | norm of the whole gradient, before clipping
optimizer/skipped | share | updates not applied because their gradient was not finite; must stay 0
optimizer/update_norm | 1 | norm of the change of the parameters
optimizer/param_norm | 1 | norm of the parameters
optimizer/learning_rate | 1 | learning rate of this update
loss | nats | the weighted sum of all terms
<term>/loss | nats | a term of the objective, before its weight
<term>/tokens | tokens | tokens the term is taken over
<term>/clip_fraction | 1 | fraction of tokens whose ratio was clipped
<term>/dual_clip_fraction | 1 | fraction of tokens at the dual clip
<term>/ratio_mean | 1 | mean probability ratio of the new policy to the old
<term>/ratio_max | 1 | largest probability ratio
<term>/kl_old | nats | k3 estimate of the KL from the old policy
<term>/k1 | nats | k1 estimate of the KL to the reference or teacher
<term>/importance_weight | 1 | mean weight that corrects for the sampler, dropped tokens as 0
<term>/kept_fraction | 1 | fraction of tokens that corrections keep
<term>/trusted_fraction | 1 | fraction of tokens within the trust region
<term>/log_z | nats | mean estimate of the log partition function
<term>/log_ratio | nats | mean log-ratio of an episode to the reference
<term>/energy | 1 | mean energy of an episode
<term>/teacher_gap | nats | mean log-probability of the teacher minus that of the old policy
<term>/value_mean | reward | mean value the critic gives an ACTION token
<term>/accuracy | 1 | fraction predicted or preferred rightly
<term>/pairs | pairs | preference pairs the term is taken over
<term>/nll | nats | mean negative log-prob of the tokens the term is taken over
<term>/nll_first_turn | nats | mean negative log-prob of observation tokens of the first turn
<term>/nll_later_turns | nats | the same for all later turns
teachers/<name>/coverage | 1 | fraction of ACTION tokens that the teacher teaches
teachers/<name>/advised | episodes | episodes of the batch for which there was advice
answers/<name>/answered | 1 | fraction of valid episodes with an answer to score
eval/success | 1 | success rate on held-out tasks
eval/success_low | 1 | lower end of its 95 % interval
eval/success_high | 1 | upper end of its 95 % interval
eval/reward_mean | reward | mean reward on held-out tasks
eval/episodes | episodes | valid episodes of the evaluation
eval/invalid | episodes | episodes of the evaluation whose environment failed
eval/turns_mean | turns | mean number of turns in the evaluation
eval/pass_at_<k> | 1 | unbiased estimate of the chance that one of k tries succeeds
eval/family/<name> | 1 | success rate on the held-out tasks of one family
custom/<name> | any | a number of your own
""")


class UnknownMetricError(KeyError):
    """A name that is not in the table."""

    def __str__(self) -> str:
        return str(self.args[0])


def _pattern(name: str) -> str:
    parts = re.split(r"(<\w+>)", name)
    return "".join("[^/<>]+" if part.startswith("<") else re.escape(part) for part in parts)


def find_metric(name: str, table: Mapping[str, Metric] = METRICS) -> Metric:
    """The entry that ``name`` belongs to. Raises UnknownMetricError."""
    if name in table and "<" not in name:
        return table[name]
    for pattern, metric in table.items():
        if "<" in pattern and re.fullmatch(_pattern(pattern), name):
            return metric
    near = difflib.get_close_matches(name, list(table), 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UnknownMetricError(
        f"unknown metric {name!r}{hint}: add it to METRICS, pass it as "
        "MetricsWriter(extra=...), or call it 'custom/...'"
    )


def metrics_markdown(table: Mapping[str, Metric] = METRICS) -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every number a run writes to `metrics.jsonl` (and to TensorBoard, on request). A part",
        "in `<angle brackets>` stands for any one name, such as a term of the objective. Counts",
        "are since the batch before. This page is printed by `python -m",
        "jaxagent.training.metric_names`; a test keeps it equal to the table in the code.",
        "",
        "| name | unit | meaning |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {metric.unit} | {metric.description} |" for name, metric in table.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(metrics_markdown(), end="")
