"""What tests compare of trees that were replayed."""

from beamwright.tree.recorded import record_tree


def steps_of(tree):
    """Of a tree that has grown."""
    found = record_tree(tree)
    return [(tuple(node["lineage"]), node["tokens"], node["state"]) for node in found["nodes"]]


def replayed(tree):
    """Of the tree that it follows."""
    return [(node.lineage, node.tokens, str(node.state)) for node in tree.nodes]
