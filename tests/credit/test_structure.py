"""Credit from structure: TRIAGE, TreePS-RAG, WIRL, WM-PPO."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxagent import credit
from tests.credit.cases import (
    batch_of_turns,
    by_turn,
    constant_base,
    lay_turns,
    random_batch,
    run,
    shape_rewards,
    turns_of,
    zscore,
)

pytestmark = pytest.mark.usefixtures("x64")

NAN = float("nan")


def pad_turns(batch: Any, rows: list[list[Any]], fill: Any = -1) -> np.ndarray:
    out = np.full((batch.num_episodes, batch.num_turns, *np.shape(rows[0][0])), fill)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


def test_roles_shift_turns() -> None:
    batch = batch_of_turns([[1, 2, 1, 1, 1]], [0.0])
    roles = [credit.Role.DECISIVE, credit.Role.EXPLORATION, credit.Role.NO_PROGRESS, 3, -1]
    batch = batch.with_extra("roles", pad_turns(batch, [roles], 0))
    for base, wanted in (
        (0.5, [1.0, 0.7, 0.4, 0.0, 0.5]),
        (-0.5, [0.0, -0.3, -0.6, -1.0, -0.5]),
    ):
        start = constant_base(lay_turns(batch, lambda e, k, a=base: a))
        found = run(credit.chain(start, credit.role_shift()), batch)
        np.testing.assert_allclose(by_turn(batch, found), [wanted], atol=1e-12)
    unknown = batch.with_extra("roles", pad_turns(batch, [[4, 255, -2, 9, -1]]))
    start = constant_base(lay_turns(batch, lambda e, k: 0.5))
    found = run(credit.chain(start, credit.role_shift()), unknown)
    np.testing.assert_allclose(by_turn(batch, found), [[0.5] * 5])


def test_printed_numbers_of_the_tree() -> None:
    # The first turn is node 0 (shared by the first two) or 1; the second turn is the leaf.
    batch = batch_of_turns([[1, 1]] * 4, [1.0, 1.0, 1.0, 0.0])
    nodes = [[0, 2], [0, 3], [1, 4], [1, 5]]
    parents = [[-1, 0], [-1, 0], [9, 1], [9, 1]]  # the node of no turn is the root too
    batch = batch.with_extra("node_ids", pad_turns(batch, nodes))
    batch = batch.with_extra("parent_ids", pad_turns(batch, parents))
    found = by_turn(batch, run(credit.tree_advantage(), batch))
    # Nodes 0 and 1 are in the batch twice: their copies add up to A(n), the second turns to
    # V(leaf) - V(node).
    for node, copies in ((0.25, found[:2]), (-0.25, found[2:])):
        np.testing.assert_allclose([turns[0] for turns in copies], node / 2)
    np.testing.assert_allclose([turns[1] for turns in found], [0, 0, 0.5, -0.5], atol=1e-12)
    # The same leaf in two rows is one leaf: a now has one, and V(root) = (1 + 1 + 0) / 3.
    same = batch.with_extra("node_ids", pad_turns(batch, [[0, 2], [0, 2], [1, 4], [1, 5]]))
    found = by_turn(batch, run(credit.tree_advantage(), same))
    np.testing.assert_allclose([turns[0] for turns in found], np.divide([1, 1, -0.5, -0.5], 6))


@pytest.mark.parametrize("seed", range(4))
def test_tree_matches_a_loop(seed: int) -> None:
    batch = random_batch(seed)
    nodes, parents = batch.extras["node_ids"], batch.extras["parent_ids"]
    turns = turns_of(batch)
    paths = {e: [nodes[e, k] for k in own] for e, own in turns.items()}

    def value(group: int, node: int | None) -> float | None:
        """The mean outcome of the distinct leaves below a node; of the group for None."""
        leaves: dict[Any, list[float]] = {}
        for e in np.flatnonzero(batch.valid):
            path = paths.get(int(e), [])
            if batch.group_ids[e] == group and (node is None or node in path):
                end = path[-1] if path and path[-1] >= 0 else f"episode {e}"
                leaves.setdefault(end, []).append(batch.rewards[e])
        return float(np.mean([np.mean(own) for own in leaves.values()])) if leaves else None

    copies = Counter((batch.group_ids[e], n) for e, path in paths.items() for n in set(path))

    def wanted(e: int, k: int) -> float:
        group, node = batch.group_ids[e], nodes[e, k]
        if node < 0:
            return 0.0
        above = value(group, parents[e, k]) if parents[e, k] >= 0 else None
        above = value(group, None) if above is None else above
        return (value(group, node) - above) / copies[group, node]  # type: ignore[operator]

    assert max(copies.values()) > 1
    found = run(credit.tree_advantage(), batch)
    np.testing.assert_allclose(found, lay_turns(batch, wanted), atol=1e-10)
    assert np.abs(found).max() > 0.01


def test_a_leaf_that_several_episodes_end_in_counts_once() -> None:
    batch = batch_of_turns([[1, 1]] * 3 + [[1]], [1.0, 1.0, 0.0, 0.0])
    batch = batch.with_extra("node_ids", pad_turns(batch, [[0, 2], [0, 2], [0, 3], [1]]))
    batch = batch.with_extra("parent_ids", pad_turns(batch, [[-1, 0]] * 3 + [[-1]]))
    found = by_turn(batch, run(credit.tree_advantage(), batch))
    # V(0) = 1/2 and V(root) = 1/3: leaves 2, 3 and 1.
    np.testing.assert_allclose([turns[0] for turns in found[:3]], [1 / 18] * 3)
    np.testing.assert_allclose([turns[1] for turns in found[:3]], [1 / 4, 1 / 4, -1 / 2])
    np.testing.assert_allclose(found[3], [-1 / 3])


def test_a_node_of_several_turns_counts_once() -> None:
    batch = batch_of_turns([[1, 1, 1], [1, 1]], [1.0, 0.0])
    batch = batch.with_extra("node_ids", pad_turns(batch, [[0, 0, 1], [0, 2]]))
    batch = batch.with_extra("parent_ids", pad_turns(batch, [[-1, -1, 0], [-1, 0]]))
    found = by_turn(batch, run(credit.tree_advantage(), batch))
    np.testing.assert_allclose(found[0], [0, 0, 0.5], atol=1e-12)
    np.testing.assert_allclose(found[1], [0, -0.5], atol=1e-12)


def test_the_turns_of_a_node_share_its_advantage() -> None:
    batch = batch_of_turns([[1, 1, 1], [1]], [1.0, 0.0])
    batch = batch.with_extra("node_ids", pad_turns(batch, [[0, 1, 1], [0]]))
    batch = batch.with_extra("parent_ids", pad_turns(batch, [[-1, 0, 0], [-1]]))
    found = by_turn(batch, run(credit.tree_advantage(), batch))
    np.testing.assert_allclose(found[0], [0, 0.5, 0.5])
    np.testing.assert_allclose(found[1], [0])


def test_printed_numbers_of_windows() -> None:
    batch = batch_of_turns([[1, 2, 1]], [0.6], None, [[0.0, 0.4, 0.6]])
    shaped = shape_rewards(credit.best_so_far(), batch)
    np.testing.assert_allclose(shaped.turn_rewards[0], [0, 0.4, 0.2], atol=1e-12)
    shaped = shaped.with_extra("window_ids", pad_turns(batch, [[0, 0, 1]]))
    found = by_turn(batch, run(credit.window_advantage("none"), shaped))
    np.testing.assert_allclose(found, [[0.4, 0.4, 0.2]], atol=1e-12)
    found = by_turn(batch, run(credit.window_advantage(), shaped))
    half = np.sqrt(0.5)
    np.testing.assert_allclose(found, [[half, half, -half]], atol=1e-5)


def test_best_so_far_gains_nothing_below_the_best() -> None:
    scores = [[0.5, 0.3, 0.0, 0.9, 0.9]]
    batch = batch_of_turns([[1] * 5], [0.0], None, scores)
    for start, wanted in ((0.0, [0.5, 0, 0, 0.4, 0]), (0.6, [0, 0, 0, 0.3, 0])):
        shaped = shape_rewards(credit.best_so_far(start), batch)
        np.testing.assert_allclose(shaped.turn_rewards[0, :5], wanted, atol=1e-12)
        assert not shaped.turn_rewards[1:].any() and not shaped.turn_rewards[:, 5:].any()


@pytest.mark.parametrize("normalise", ["group", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_windows_match_a_loop(seed: int, normalise: Any) -> None:
    batch = random_batch(seed)
    ids = batch.extras["window_ids"]
    sums: dict[tuple[int, int], float] = {}
    for e, turns in turns_of(batch).items():
        for k in turns:
            if ids[e, k] >= 0:
                key = (e, int(ids[e, k]))
                sums[key] = sums.get(key, 0.0) + batch.turn_rewards[e, k]

    def wanted(e: int, k: int) -> float:
        if ids[e, k] < 0:
            return 0.0
        own = sums[e, int(ids[e, k])]
        pool = [x for (f, _), x in sums.items() if batch.group_ids[f] == batch.group_ids[e]]
        mean, std = zscore(pool)
        return own if normalise == "none" else (own - mean) / std

    found = run(credit.window_advantage(normalise), batch)
    np.testing.assert_allclose(found, lay_turns(batch, wanted), atol=1e-10)
    assert np.abs(found).max() > 0.1


def test_printed_numbers_of_imagined_actions() -> None:
    batch = batch_of_turns([[1, 2, 1]], [0.0])
    values = [[0.7, 0.3], [0.3, 0.7], [NAN, NAN]]
    batch = batch.with_extra("imagined_values", pad_turns(batch, [values], NAN))
    batch = batch.with_extra("imagined_gates", pad_turns(batch, [[0.5, 0.5, 0.0]], NAN))
    start = constant_base(lay_turns(batch, lambda e, k: 1.0))
    found = run(credit.chain(start, credit.imagined_advantage()), batch)
    np.testing.assert_allclose(by_turn(batch, found), [[1.1, 0.9, 1.0]], atol=1e-12)
    targets, weights = credit.imagined_targets(batch)
    np.testing.assert_allclose(targets[0], [0.5, 0.5, 0.0], atol=1e-12)
    np.testing.assert_allclose(weights[0], [0.5, 0.5, 0.0])
    assert not np.asarray(weights)[1:].any() and not np.asarray(targets)[1:].any()


@pytest.mark.parametrize("seed", range(2))
def test_roles_and_imagined_actions_match_a_loop(seed: int) -> None:
    batch = random_batch(seed)
    base = lay_turns(batch, lambda e, k: 0.25 * e - 1)
    values, gates = batch.extras["imagined_values"], batch.extras["imagined_gates"]
    roles = batch.extras["roles"]
    table = {0: 1.0, 1: -2.0, 2: 3.0, 3: 4.0}
    for transform, formula in (
        (
            credit.role_shift(*table.values()),
            lambda e, k: table.get(roles[e, k], 0),
        ),
        (
            credit.imagined_advantage(0.5),
            lambda e, k: 0.5 * gates[e, k] * (values[e, k, 0] - values[e, k].sum() / 3),
        ),
    ):
        found = run(credit.chain(constant_base(base), transform), batch)
        wanted = lay_turns(batch, lambda e, k, f=formula: 0.25 * e - 1 + f(e, k))
        np.testing.assert_allclose(found, wanted, atol=1e-12)
        assert np.abs(found - base).max() > 0.1


def test_comparisons_are_trusted_as_far_as_they_were_right() -> None:
    record = credit.ComparisonRecord(edges=(0.1, 0.5))
    assert record.gates([0.05, 0.3, 2.0]).tolist() == [0, 0, 0]
    more = record.add([0.2] * 4 + [0.05] * 2, [True, True, True, False, False, True])
    more = more.add([-0.7], [True])
    assert more.seen == (2, 4, 1) and more.right == (1, 3, 1)
    np.testing.assert_allclose(more.gates([[0.0, 0.1], [0.5, 9.0]]), [[0, 0.5], [1, 1]])
    assert record.seen == (0, 0, 0)  # a value: adding made another
    with pytest.raises(ValueError, match="edges must rise"):
        credit.ComparisonRecord(edges=(0.5, 0.1))
    with pytest.raises(ValueError, match="seen needs one count for each of 2 bins"):
        credit.ComparisonRecord(edges=(0.5,), seen=(1, 2, 3))


def test_misuse_fails_at_construction() -> None:
    for make, message in (
        (lambda: credit.role_shift(decisive=NAN), "must be finite"),
        (lambda: credit.window_advantage("mean"), "normalise must be"),  # type: ignore[arg-type]
        (lambda: credit.window_advantage(eps=0.0), "eps must"),
        (lambda: credit.best_so_far(NAN), "start must be finite"),
        (lambda: credit.imagined_advantage(0.0), "weight must"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
