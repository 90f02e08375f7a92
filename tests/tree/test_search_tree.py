import random

import pytest

from beamwright.tree import NodeState, StopReason, repeated_tokens
from fakes import add_step, grow, new_tree


@pytest.fixture
def tree():
    return new_tree()


def test_children_continue_the_path_of_their_parent(tree):
    first, second = tree.expand(tree.root, 2)
    assert [node.lineage for node in (first, second)] == [(0, 0), (0, 1)]
    assert first.start == tree.root.end == 3
    add_step(tree, first, "one ", tokens=(5, 6))
    tree.keep(first)
    (grandchild,) = tree.expand(first, 1)
    add_step(tree, grandchild, "two", tokens=(7,))
    assert grandchild.path() == [tree.root, first, grandchild]
    assert grandchild.path_token_ids() == [10, 11, 12, 5, 6, 7]
    assert (grandchild.start, grandchild.end, grandchild.num_path_tokens) == (5, 6, 3)
    assert (grandchild.depth, grandchild.root, grandchild.problem_id) == (2, tree.root, 0)
    assert (grandchild.text, grandchild.step_text) == ("one two", "two")


def test_only_a_kept_node_can_be_extended(tree):
    (node,) = tree.expand(tree.root, 1)
    with pytest.raises(ValueError, match="cannot be extended"):
        tree.expand(node, 1)
    add_step(tree, node, "a")
    with pytest.raises(ValueError, match="cannot be extended"):
        tree.expand(node, 1)
    tree.keep(node)
    assert len(tree.expand(node, 2)) == 2


@pytest.mark.parametrize("verb", ["keep", "prune", "finish"])
def test_only_a_candidate_is_judged_and_only_once(tree, verb):
    (node,) = tree.expand(tree.root, 1)
    with pytest.raises(ValueError, match="is not a candidate"):
        getattr(tree, verb)(node)
    add_step(tree, node, "a")
    getattr(tree, verb)(node)
    for other in ("keep", "prune", "finish"):
        if (verb, other) == ("finish", "prune"):
            continue  # a final candidate may lose its place
        with pytest.raises(ValueError, match="is not a candidate"):
            getattr(tree, other)(node)


def test_nodes_are_listed_by_state_in_lineage_order(tree):
    nodes = grow(tree, tree.root, list("abcdefghijkl"))
    for node in nodes[:2]:
        tree.keep(node)
    tree.finish(nodes[11])
    tree.finish(nodes[2])
    tree.prune(nodes[3])
    late = tree.expand(nodes[1], 1) + tree.expand(nodes[0], 2)
    assert tree.finished() == [nodes[2], nodes[11]]
    assert tree.candidates() == nodes[4:11]
    # Depth-first: the children of the first survivor come before those of the second.
    assert tree.open_nodes() == [late[1], late[2], late[0]]
    assert [node.lineage for node in tree.nodes()] == sorted(n.lineage for n in tree.nodes())


def test_which_stops_end_the_whole_path():
    ending = {stop for stop in StopReason if stop.ends_path}
    assert ending == {*["eos", "stop_string", "path_limit", "context_limit"]}


# --- whose KV is dead ------------------------------------------------------------------------


def needed_by_definition(tree):
    """Nodes with an open, waiting or extendable node at or below them, by full search."""
    live = (NodeState.OPEN, NodeState.CANDIDATE)

    def is_needed(node):
        own = node.state in live or (node.state is NodeState.KEPT and not node.children)
        return own or any(is_needed(child) for child in node.children)

    return {node for node in tree.nodes() if is_needed(node)}


@pytest.mark.parametrize("seed", range(12))
def test_random_walk_releases_every_node_exactly_once(seed):
    rng = random.Random(seed)
    tree = new_tree()
    released = []
    tree.expand(tree.root, rng.randint(1, 5))
    for _ in range(60):
        every = list(tree.nodes())
        for node in [n for n in every if n.state is NodeState.OPEN and rng.random() < 0.6]:
            add_step(tree, node, rng.choice("abc"))
        waiting = [n for n in tree.nodes() if n.state is NodeState.CANDIDATE]
        for node in waiting:
            getattr(tree, rng.choice(["keep", "keep", "prune", "prune", "finish"]))(node)
            if node.state is NodeState.KEPT and rng.random() < 0.8:
                tree.expand(node, rng.randint(1, 3))
        before = set(tree.held)
        dead = tree.pop_dead()
        assert set(dead) == before - needed_by_definition(tree)
        assert tree.held == needed_by_definition(tree)
        released += dead
        open_before = [node for node in tree.nodes() if node.state is NodeState.OPEN]
        assert tree.open_nodes() == open_before
        if len(every) > 150:
            break
    tree.done = True
    released += tree.pop_dead()
    assert len(released) == len(set(released))
    assert set(released) == set(tree.nodes())


def test_a_final_candidate_can_lose_its_place(tree):
    one, two = grow(tree, tree.root, ["a", "b"], stop=StopReason.EOS)
    tree.finish(one)
    tree.finish(two)
    assert tree.pop_dead() == [two, one, tree.root]
    tree.prune(one)
    assert (one.state, tree.finished()) == (NodeState.PRUNED, [two])
    assert tree.pop_dead() == [], "its KV was released when it was finished"
    with pytest.raises(ValueError, match="is not a candidate"):
        tree.prune(one)


def test_a_kept_node_of_which_nothing_is_left_can_be_pruned():
    tree = new_tree()
    (node,) = grow(tree, tree.root, ["a"])
    tree.keep(node)
    one, two = grow(tree, node, ["b", "c"])
    tree.prune(one)
    with pytest.raises(ValueError, match="is not a candidate"):
        tree.prune(node)
    tree.prune(two)
    tree.prune(node)
    assert node.state is NodeState.PRUNED
    assert tree.pop_dead() == [two, one, node, tree.root]


def test_a_node_is_found_by_its_lineage(tree):
    first, second = tree.expand(tree.root, 2)
    add_step(tree, second, "a")
    tree.keep(second)
    (third,) = tree.expand(second, 1)
    for node in (tree.root, first, second, third):
        assert tree.node(node.lineage) is node
    for unknown in [(0, 2), (0, 0, 0), ("other", 0)]:
        with pytest.raises(KeyError):
            tree.node(unknown)


def test_a_path_that_ended_in_this_round_is_among_the_ended_before_it_is_decided():
    tree = new_tree()
    going, ended, rolled = tree.expand(tree.root, 3)
    rolled.greedy = True
    add_step(tree, going, "a")
    add_step(tree, ended, "b", stop=StopReason.EOS)
    add_step(tree, rolled, "c", stop=StopReason.EOS)
    assert (tree.finished(), tree.ended()) == ([], [ended])
    tree.finish(ended)
    assert (tree.finished(), tree.ended()) == ([ended], [ended])


def test_tokens_repeat_where_all_before_them_does_in_the_same_round(tree):
    """However the paths are cut into steps."""
    steps = ((5, 6, 7), (5, 6, 8), (5,), (9, 6))
    first = [
        add_step(tree, node, "a", tokens)
        for node, tokens in zip(tree.expand(tree.root, 4), steps, strict=True)
    ]
    assert repeated_tokens(tree) == 2 + 1
    for node in first:
        tree.keep(node)
    tree.rounds = 1
    add_step(tree, tree.expand(first[0], 1)[0], "b", (1, 2))
    add_step(tree, tree.expand(first[2], 1)[0], "b", (6, 7, 1, 3))
    add_step(tree, tree.expand(first[1], 1)[0], "b", (1, 2))
    tree.expand(first[3], 1)
    assert repeated_tokens(tree) == 3 + 1
