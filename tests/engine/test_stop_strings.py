"""Searches whose paths end at strings: where, what is left, and that no schedule matters."""

from engines import CHAT, exact_dtype, grow

STOPS = ["M", "a", " 7", *(f"e{letter}" for letter in "tTgGkKpP#$%&")]
LIMITS = {"delimiter": "e", "max_step_tokens": 12, "max_tokens": 60, "max_rounds": 8}
LONG = {"delimiter": "Zq", "max_step_tokens": 300, "max_tokens": 320, "ignore_eos": True}
BEAM = {"search": "beam", "n": 8, "width": 2, "stop_strings": STOPS, **LIMITS}


def written(tree):
    return [node for node in tree.nodes() if node.parent and not node.turn]


def texts_of(codec, node):
    """The text of a node's reply after each token of its own, as it would be without stops."""
    before = node.parent.path_token_ids()[node.replies_to.end :]
    return [codec.decode([*before, *node.token_ids[: n + 1]]) for n in range(len(node.token_ids))]


def check_ends(tree, codec, strings):
    """By a search of the whole text after every token; returns the nodes that strings ended."""
    ended = []
    for node in written(tree):
        texts = texts_of(codec, node)
        found = [any(string in text for string in strings) for text in texts]
        assert not any(found[:-1]), "no token behind the one that completes it"
        assert found[-1] == (node.stop == "stop_string")
        if not found[-1]:
            assert node.text == texts[-1]
            continue
        starts = [texts[-1].find(string) for string in strings]
        assert node.text == texts[-1][: min(start for start in starts if start >= 0)]
        assert node.ended
        assert all(child.turn is not None for child in node.children)
        ended.append(node)
    return ended


def test_paths_end_with_the_token_that_completes_a_string(make_solver):
    solver = make_solver(**BEAM)
    solution, tree = grow(solver)
    ended = check_ends(tree, solver._machinery.reader.codec, STOPS)
    assert len(ended) > 3
    assert any(node.depth > 1 for node in ended)
    straddling = [node for node in ended if len(node.text) < len(node.parent.text)]
    assert straddling, "a string began in the step before"
    assert all(node.step_text == "" for node in straddling)
    for candidate in solution.candidates:
        assert not any(string in candidate.text for string in STOPS)
    assert {"stop_string"} <= {candidate.stop for candidate in solution.candidates}


def test_a_path_is_the_beginning_of_what_it_is_without(make_solver):
    options = {**LIMITS, "search": "best-of-n", "n": 12, "dtype": "float64"}
    _, whole = grow(make_solver(**options))
    _, tree = grow(make_solver(**options, stop_strings=STOPS))
    by_lineage = {node.lineage: node for node in whole.nodes()}
    for node in written(tree):
        other = by_lineage[node.lineage]
        assert node.token_ids == other.token_ids[: len(node.token_ids)]
        assert node.logprobs == other.logprobs[: len(node.logprobs)]
    assert len(written(tree)) < len(written(whole))


def test_a_long_step_ends_soon_and_a_preempted_one_at_the_same_token(make_solver):
    options = {**BEAM, **LONG, "n": 6, "stop_strings": ["q", "}}"]}
    base = make_solver(**options, schedule="in-gpu", dtype=exact_dtype())
    expected, tree = grow(base)
    assert len(check_ends(tree, base._machinery.reader.codec, options["stop_strings"])) > 2
    assert max(len(node.token_ids) for node in written(tree)) > 64
    assert all(node.usage["overrun"] < 16 for node in written(tree))
    block = base.generator.store.device.bytes_per_block
    tight = {"schedule": "locality", "kv_memory": 54 * block, "host_memory": "8MiB"}
    with make_solver(**options, **tight, dtype=exact_dtype()) as solver:
        assert grow(solver)[0].tree_hash == expected.tree_hash
        assert solver._machinery.batch.counts.preempted


def test_each_reply_is_searched_for_itself(make_solver):
    talk = {"search": "revise", "chat_template": CHAT, "n": 4, "max_rounds": 60, "seed": 1}
    talk |= {"critique_prompt": "be a cab", "revision_prompt": "dab"}
    solver = make_solver(**{**BEAM, **talk, "max_tokens": 200})
    _, tree = grow(solver)
    ended = check_ends(tree, solver._machinery.reader.codec, STOPS)
    assert any(node.replies_to.turn is not None for node in ended)
