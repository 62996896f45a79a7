"""The page of methods says what the code does: names, compositions, needs, recipes, sources."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxagent import credit, losses
from jaxagent.credit.rewards import RewardTransform
from jaxagent.data import augment, hindsight
from jaxagent.data.augment import Augment
from jaxagent.data.batch import Batch
from jaxagent.data.packing import pack
from jaxagent.data.synthetic import random_episodes
from jaxagent.models import heads as model_heads
from jaxagent.training import heads, passes
from jaxagent.training.passes import Pass
from jaxagent.training.step import MODEL_OUTPUTS
from tests.docs.pages import CODE, ROOT, blocks, read, table

PAGE = read("methods.md")
# Recipes that are still to come; the page names them already.
UPCOMING = ("reverse_curriculum", "tree", "wm_ppo")
# Takes the needs of the loss it makes as arguments.
DECLARES_NOTHING = {"token_loss"}
FACTORIES = {"losses": (losses, losses.Loss), "credit": (credit, credit.Credit)}
_NONE = frozenset[str]()
PROVIDERS = (hindsight, augment, passes, heads)

_sections = re.split(r"^### (.+)\n", PAGE.split("\n## Pieces\n")[0], flags=re.MULTILINE)
SECTIONS = dict(zip(_sections[1::2], _sections[2::2], strict=True))
NEEDS = table(PAGE, "factory", "scores", "outputs", "extras")
REWARDS = table(PAGE, "reward transform", "scores", "extras")
PROVIDED = table(PAGE, "call", "scores", "extras", "hidden states", "outputs")


def returning(names: Mapping[str, Any], *kinds: Any) -> set[str]:
    """Functions that say they return one of ``kinds``."""
    return {
        name
        for name, value in names.items()
        if inspect.isfunction(value) and inspect.signature(value).return_annotation in kinds
    }


def exported(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def own_functions(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]


def build(call: str) -> Any:
    """Evaluates a call of the page, with the placeholders that its introduction names."""
    names: dict[str, Any] = {"losses": losses, "credit": credit}
    for module in (*PROVIDERS, model_heads):
        names |= vars(module)
    stand_in: Callable[..., Any] = lambda *args: None  # noqa: E731
    names |= dict.fromkeys(("encode", "text", "answer", "values", "returns"), stand_in)
    names |= {"demonstration": stand_in, "params": {"embed": jnp.zeros((2, 2))}}
    return eval(call, names)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"losses": losses, "credit": credit}
    exec(compile(block, "methods.md", "exec"), names)
    return names


def calls_of(block: str) -> dict[str, list[tuple[str, str]]]:
    """``{"rewards": [("credit", "batch_bonus")]}``: what each line of a composition calls.

    A line assigns a call, or a list of calls, of functions of a module.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for line in ast.parse(block).body:
        assert isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
        values = line.value.elts if isinstance(line.value, ast.List) else [line.value]
        calls = []
        for value in values:
            assert isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
            assert isinstance(value.func.value, ast.Name)
            calls.append((value.func.value.id, value.func.attr))
        found[line.targets[0].id] = calls
    return found


def declared(loss_or_credit: Any) -> tuple[frozenset[str], ...]:
    """Scores, outputs and extras."""
    if isinstance(loss_or_credit, losses.Loss):
        return loss_or_credit.scores, loss_or_credit.needs, frozenset()
    assert isinstance(loss_or_credit, credit.Credit)
    return loss_or_credit.scores, frozenset(), loss_or_credit.extras


def provided(thing: Any) -> tuple[frozenset[str], ...]:
    """Scores, extras, teachers with hidden states, and outputs."""
    if isinstance(thing, Pass):
        return thing.scores, thing.extras, thing.hidden, _NONE
    if isinstance(thing, Augment):
        return thing.scores, _NONE, _NONE, _NONE
    assert isinstance(thing, Mapping)
    return _NONE, _NONE, _NONE, frozenset(thing)


def _union(sets: tuple[frozenset[str], ...]) -> frozenset[str]:
    return _NONE.union(*sets)


def items(section: str) -> dict[str, str]:
    """``{"Needs": "...", "Recipe": ...}``, each on one line."""
    joined = re.sub(r"\n  +", " ", section)
    return dict(re.findall(r"^- (\w+(?: \w+)?): (.+)$", joined, re.MULTILINE))


def stated_needs(section: str) -> dict[str, frozenset[str]]:
    found = {"scores": _NONE, "extras": _NONE, "outputs": _NONE}
    for part in items(section)["Needs"].split("; "):
        kind = part.split()[0]
        if kind in found:
            found[kind] = frozenset(CODE.findall(part))
    return found


def test_every_public_name_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", PAGE))
    wanted = {*losses.__all__, *credit.__all__}
    for module in PROVIDERS:
        wanted |= set(own_functions(module))
    assert wanted - words == set()


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_builds_and_needs_what_it_says(title: str) -> None:
    section = SECTIONS[title]
    assert list(items(section))[:1] == ["Needs"] and blocks(section, "text")
    (block,) = blocks(section)
    built = run(block)
    made = [built[name] for name in ("objective", "advantages") if name in built]
    assert made
    scores, extras, outputs = _NONE, _NONE, _NONE
    for thing in made:
        scores |= thing.scores
        if isinstance(thing, losses.Objective):
            outputs |= thing.needs - {"logprobs"}
        else:
            assert isinstance(thing, credit.Credit) and thing.steps[0].stage == "base"
            extras |= thing.extras
    for _, transform in calls_of(block).get("rewards", []):
        (reads,) = [v for call, v in REWARDS.items() if call.startswith(f"credit.{transform}(")]
        scores, extras = scores | reads[0], extras | reads[1]
    assert stated_needs(section) == {"scores": scores, "extras": extras, "outputs": outputs}


@pytest.mark.parametrize("title", SECTIONS)
def test_what_fills_a_section_provides_what_it_needs(title: str) -> None:
    needs = stated_needs(SECTIONS[title])
    calls = CODE.findall(items(SECTIONS[title]).get("Filled by", ""))
    given = [provided(build(call)) for call in calls]
    scores, extras, hidden, outputs = (
        map(_union, zip(*given, strict=True)) if given else [_NONE] * 4
    )
    teachers = {need.split(":")[1] for need in needs["outputs"] if need.startswith("divergence:")}
    assert needs["scores"] <= scores
    assert needs["extras"] <= extras
    assert teachers <= hidden
    of_heads = {n for n in needs["outputs"] if not n.startswith("divergence:")} - MODEL_OUTPUTS
    assert of_heads == outputs
    # Nothing is listed that no one reads.
    for call, (own_scores, own_extras, own_hidden, own_outputs) in zip(calls, given, strict=True):
        used = own_scores & needs["scores"] | own_extras & needs["extras"]
        assert used | own_hidden & teachers | own_outputs & needs["outputs"], call


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_names_its_recipe_and_how_far_to_trust_it(title: str) -> None:
    found = items(SECTIONS[title])
    assert {"Needs", "Recipe", "Source"} <= set(found) <= {"Needs", "Filled by", "Recipe", "Source"}
    assert re.fullmatch(r"`experiments/\w+\.py`|none of its own", found["Recipe"])
    assert re.match(r"(code|text|derived)\. \S", found["Source"])
    (block,) = blocks(SECTIONS[title])
    ours = [
        name
        for module, name in re.findall(r"\b(losses|credit)\.(\w+)", block)
        if re.search(r"\bDerived\b", getattr(FACTORIES[module][0], name).__doc__ or "")
    ]
    # A method one of whose parts is a reading of ours is one as a whole.
    assert not ours or found["Source"].startswith("derived. "), ours


def test_recipes_exist_and_each_is_named() -> None:
    named = set(re.findall(r"experiments/(\w+)\.py", PAGE))
    files = {path.stem: path.read_text() for path in (ROOT / "experiments").glob("*.py")}
    recipes = {name for name, text in files.items() if "\nfrom pipeline import Run" in text}
    assert named - set(files) == set(UPCOMING)
    assert len(recipes) > 20
    assert recipes - named == set()


def test_every_block_of_code_is_in_a_section() -> None:
    assert sum(len(blocks(section)) for section in SECTIONS.values()) == len(blocks(PAGE))
    assert len(SECTIONS) > 40
    # A composition is one call, and all it uses is ``losses`` and ``credit``.
    for block in blocks(PAGE):
        assert {module for calls in calls_of(block).values() for module, _ in calls} <= {
            "losses",
            "credit",
        }


@pytest.mark.parametrize("call", NEEDS)
def test_the_table_says_what_a_factory_declares(call: str) -> None:
    assert NEEDS[call] == declared(build(call))


def test_the_table_has_every_factory() -> None:
    called = {tuple(call.split("(")[0].split(".")) for call in NEEDS}
    for module_name, (module, kind) in FACTORIES.items():
        made = returning(exported(module), kind)
        assert len(made) > 10
        listed = {name for where, name in called if where == module_name}
        assert listed == made - DECLARES_NOTHING


def packed() -> Batch:
    return pack(random_episodes(0, groups=2, group_size=2), buckets=(64,))


def with_reads(batch: Batch, scores: frozenset[str], extras: frozenset[str]) -> Batch:
    sizes = {"outcome_ids": (), "support": ()}
    for name in scores:
        batch = batch.with_score(name, np.full(batch.tokens.shape, -1.0, np.float32))
    for name in extras:
        shape = (batch.num_episodes, *sizes.get(name, (batch.num_turns + 1,)))
        batch = batch.with_extra(name, np.ones(shape, np.int32 if "ids" in name else np.float32))
    return batch


@pytest.mark.parametrize("call", REWARDS)
def test_the_table_says_what_a_reward_transform_reads(call: str) -> None:
    scores, extras = REWARDS[call]
    transform, batch = build(call), packed()
    shaped, _ = transform(with_reads(batch, scores, extras))
    assert np.isfinite(shaped.rewards).all() and np.isfinite(shaped.turn_rewards).all()
    for name in scores | extras:
        with pytest.raises(ValueError, match=name):
            transform(with_reads(batch, scores - {name}, extras - {name}))


def test_the_table_has_every_reward_transform() -> None:
    made = returning(exported(credit), RewardTransform)
    assert len(made) > 5
    assert {re.match(r"credit\.(\w+)", call)[1] for call in REWARDS} == made  # type: ignore[index]


@pytest.mark.parametrize("call", PROVIDED)
def test_the_table_says_what_a_pass_provides(call: str) -> None:
    assert PROVIDED[call] == provided(build(call))


def test_the_table_has_every_pass() -> None:
    own = {name: getattr(m, name) for m in (augment, passes, heads) for name in own_functions(m)}
    made = returning(own, Pass, Augment)
    assert {call.split("(")[0] for call in PROVIDED} == made | {"head_outputs"}


def signatures() -> str:
    """Names, arguments and defaults of what makes losses, corrections, credit and rewards."""
    lines = []
    for where, (module, _) in FACTORIES.items():
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.isfunction(value):
                continue
            parameters = [
                p.replace(annotation=inspect.Parameter.empty)
                for p in inspect.signature(value).parameters.values()
            ]
            lines.append(f"{where}.{name}{inspect.Signature(parameters)}")
    return "\n".join(lines) + "\n"


def test_arguments_and_defaults_are_those_of_the_code() -> None:
    text = PAGE.split("## Arguments and defaults\n")[1]
    assert blocks(text, "text") == [signatures()]
