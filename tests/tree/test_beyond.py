"""Which nodes no window of a row to come reaches."""

import fakes


def steps(tree, parent, *lengths):
    """Children with steps of so many tokens; they are kept."""
    children = tree.expand(parent, len(lengths))
    for child, count in zip(children, lengths, strict=True):
        fakes.add_step(tree, child, "x", tokens=range(count))
        tree.keep(child)
    return children


def test_a_short_branch_keeps_what_a_long_one_has_left_behind():
    tree = fakes.new_tree(num_prompt_tokens=10)
    assert tree.outside_window(2) == []  # the prompt itself is to be followed
    long, short = steps(tree, tree.root, 6, 6)
    (below,) = steps(tree, long, 5)
    (deepest,) = steps(tree, below, 3)
    # A leaf's step may be computed again: `short` follows the prompt, `deepest` what ends at 21.
    assert tree.outside_window(7) == []
    assert tree.outside_window(6) == [long]
    tree.expand(short, 2)  # behind 16 tokens
    assert tree.outside_window(6) == [long, tree.root]
    assert tree.outside_window(7) == [tree.root]
    assert tree.outside_window(8) == []
    assert tree.outside_window(8, begins=lambda leaf: 100) == tree.outside_window(
        2, begins=lambda leaf: 100
    )
    held = {tree.root, long, short, below, deepest, *short.children}
    assert held == tree.held


def test_nothing_of_a_tree_that_is_over_is_seen():
    tree = fakes.new_tree()
    steps(tree, tree.root, 6)
    tree.done = True
    assert set(tree.outside_window(100)) == tree.held
