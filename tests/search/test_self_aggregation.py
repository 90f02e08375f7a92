"""Answers written from other answers: `--search aggregate` and `--choose synthesis`."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from beamwright import Solver
from beamwright.errors import InputError
from beamwright.models.hub import BUNDLED
from beamwright.protocols import Ask, EndSearch, Extend, FinishPath, Prune
from beamwright.search import make_strategy, round_rng
from beamwright.search.self_aggregation import expected_prefills, last_generation, order_alike
from beamwright.search.synthesis import Synthesis, is_synthesis, solutions_prompt
from beamwright.sections import SearchSettings
from beamwright.tree import StopReason, Turn
from fakes import add_step, new_tree
from played import actions_of, obey

PROBLEM = (
    "Jack has 70 eggs. In April Jack gets 9 eggs. In May Jack sells 19 eggs. "
    "How many eggs does Jack have now?"
)
SMALL = {"n": 4, "max_tokens": 60, "temperature": 0.6}
AGGREGATE = {"search": "aggregate", "aggregate_size": 2, "aggregate_rounds": 1, **SMALL}


def reply_to_all(tree, texts, scores=None, stop=StopReason.EOS):
    for i, (node, text) in enumerate(zip(tree.open_nodes(), texts, strict=True)):
        add_step(tree, node, text, stop=stop)
        node.score = scores[i] if scores else None
    tree.rounds += 1


def asked(actions):
    return [action.turn for action in actions if isinstance(action, Ask)]


def test_each_new_answer_is_asked_from_some_answers_of_the_last_generation():
    tree = new_tree(text="What is it?")
    strategy = make_strategy(
        SearchSettings(search="aggregate", n=3, aggregate_size=2, aggregate_rounds=2)
    )
    obey(tree, actions_of(strategy, tree))
    reply_to_all(tree, ["red", "green", "blue"])
    actions = actions_of(strategy, tree)
    assert sum(isinstance(action, FinishPath) for action in actions) == 3
    for turn in asked(actions):
        assert turn.alone
        assert turn.text.startswith("What is it?")
        assert sum(word in turn.text for word in ("red", "green", "blue")) == 2
    obey(tree, actions)
    reply_to_all(tree, ["cyan", "pink", "teal"])
    second = actions_of(strategy, tree)
    assert not any("red" in turn.text for turn in asked(second)), "only the last generation is read"
    obey(tree, second)
    reply_to_all(tree, ["x", "y", "z"])
    obey(tree, actions_of(strategy, tree))
    assert tree.done
    assert [node.text for node in last_generation(tree.finished(), 3)] == ["x", "y", "z"]


def test_a_generation_that_is_not_whole_does_not_replace_the_one_before():
    tree = new_tree(text="What is it?")
    strategy = make_strategy(SearchSettings(search="aggregate", n=2, aggregate_rounds=1))
    obey(tree, actions_of(strategy, tree))
    reply_to_all(tree, ["a", "b"])
    obey(tree, actions_of(strategy, tree))
    first, second = tree.open_nodes()
    add_step(tree, first, "c", stop=StopReason.EOS)
    add_step(tree, second, "d", stop=StopReason.DELIMITER)
    tree.rounds += 1
    obey(tree, actions_of(strategy, tree))
    assert [node.text for node in last_generation(tree.finished(), 2)] == ["a", "b"]


def guided(tree, scores, **options):
    """A guided search after a first generation a, b, ... with these scores."""
    options = {"aggregate_size": 1, "aggregate_rounds": 2, **options}
    strategy = make_strategy(
        SearchSettings(search="aggregate", n=len(scores), guide=True, **options)
    )
    obey(tree, actions_of(strategy, tree))
    reply_to_all(tree, "abcdef"[: len(scores)], scores)
    return strategy


def test_with_a_guide_answers_are_drawn_by_their_scores():
    tree = new_tree(text="What is it?")
    strategy = guided(tree, [0.0, 0.9, 0.0, 0.1])
    turns = asked(actions_of(strategy, tree))
    assert len(turns) == 4
    assert sum("Solution 1:\nb" in turn.text for turn in turns) >= 3
    tree = new_tree(text="What is it?")
    strategy = guided(tree, [0.5, 0.6, 0.5, 0.6])
    turns = asked(actions_of(strategy, tree))
    assert sorted(turn.sources for turn in turns) == [((i,),) for i in range(4)], "all weigh much"


def test_with_a_guide_a_worse_answer_does_not_replace_the_best_that_it_was_written_from():
    tree = new_tree(text="What is it?")
    strategy = guided(tree, [0.5, 0.4], aggregate_size=2)
    obey(tree, actions_of(strategy, tree))
    reply_to_all(tree, ["worse", "better"], [0.0, 0.9])
    actions = actions_of(strategy, tree)
    assert {a.node.text for a in actions if isinstance(a, Prune)} == {"b", "worse"}
    obey(tree, actions)
    assert len(tree.open_nodes()) == 2, "as many new answers as before"
    reply_to_all(tree, ["worst", "worst"], [0.0, 0.0])
    obey(tree, actions_of(strategy, tree))
    assert tree.done
    lasting = {node.text for node in last_generation(tree.finished(), 2)}
    assert "better" in lasting
    assert not lasting & {"worst", "worse", "b"}


def test_a_guide_needs_scores():
    with pytest.raises(InputError, match="needs scores"):
        Solver(**{**AGGREGATE, "guide": True}, verifier="none")


def test_solutions_are_ordered_so_that_prompts_begin_alike():
    rng = random.Random(0)
    draws = [rng.sample(range(16), 4) for _ in range(16)]
    ordered = order_alike(draws)
    assert [sorted(each) for each in ordered] == [sorted(each) for each in draws]

    def prefixes(orders):
        return len({tuple(each[:size]) for each in orders for size in range(1, 5)})

    assert prefixes(ordered) < prefixes(map(sorted, draws)) < prefixes(draws)
    assert order_alike([[1, 2], [3, 2], [2]]) == [[2, 1], [2, 3], [2]]
    assert expected_prefills(4, 4) == 4
    assert expected_prefills(16, 1) < 16


def test_a_prompt_needs_a_place_for_the_solutions():
    with pytest.raises(InputError, match="aggregate-prompt"):
        make_strategy(SearchSettings(search="aggregate", aggregate_prompt="Once more."))
    with pytest.raises(InputError, match="synthesis-prompt"):
        Synthesis(None, SearchSettings(synthesis_prompt="Once more."))


def test_answers_that_a_limit_cut_off_are_written_again_too():
    with Solver(**{**AGGREGATE, "max_rounds": 1}) as solver:
        assert len(solver.solve(PROBLEM).candidates) == AGGREGATE["n"]


def test_paths_that_did_not_end_stay_candidates_beside_the_written_answer():
    options = {**SMALL, "search": "majority", "max_rounds": 2, "temperature": 1.0}
    with Solver(**options, choose="synthesis") as solver:
        found = solver.solve(PROBLEM)
    assert found.reason_fewer == "2 of 4 paths did not end"
    assert [is_synthesis(found.tree.node(each.lineage)) for each in found.candidates] == [
        *[False] * 4,
        True,
    ]


def test_prompts_that_begin_alike_share_their_first_tokens():
    tree, same = new_tree(), tuple(range(40))
    turns = [Turn(text, answers=True, alone=True) for text in "abca"]
    ends = [(1,) * 40, (2, 2), (), (1,) * 40]
    tree.ask_alone([(turn, same + end) for turn, end in zip(turns, ends, strict=True)])
    (shared,) = tree.root.children
    assert shared.token_ids == same
    assert (shared.start, shared.above, shared.parent) == (0, None, tree.root)
    opened = tree.open_nodes()
    assert len(opened) == 4
    paths = sorted(node.path_token_ids() for node in opened)
    assert paths == sorted(list(same + end) for end in ends)
    assert len({node.parent for node in opened}) == 3, "equal prompts are one node"


def test_a_shared_beginning_is_written_from_no_answer():
    tree, turn = new_tree(), Turn("?", answers=True, alone=True, sources=((0,), (1,)))
    tree.ask_alone([(turn, (*range(40), end)) for end in (1, 2)])
    (shared,) = tree.root.children
    assert shared.turn == Turn("", answers=True, alone=True)
    assert [child.turn for child in shared.children] == [turn, turn]


def test_few_equal_tokens_are_not_worth_a_node():
    tree = new_tree()
    turn = Turn("?", answers=True, alone=True)
    tree.ask_alone([(turn, (1, 2, 3)), (turn, (1, 2, 4))])
    assert [node.token_ids for node in tree.root.children] == [(1, 2, 3), (1, 2, 4)]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "guided"])
def guide(request):
    return request.param


@pytest.fixture(scope="module")
def grown(guide):
    """The tree of a search with plenty of memory."""
    with Solver(**AGGREGATE, guide=guide) as solver:
        return solver.solve(PROBLEM)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_memory": "1MiB"},
        {"max_batch": 1},
        {"speculation": "exact"},
        {"drafts": 4},
        {"batching": "grouped"},
    ],
)
def test_the_tree_does_not_depend_on_memory_or_batches(grown, guide, options):
    with Solver(**AGGREGATE, **options, guide=guide) as solver:
        found = solver.solve(PROBLEM)
    assert found.tree_hash == grown.tree_hash
    assert (found.kv.d2h_bytes > 0) == ("kv_memory" in options)


def test_a_killed_search_goes_on_with_the_same_tree(grown, guide, tmp_path):
    file = tmp_path / "search.ckpt"

    def stop(report):
        if any(node.turn for node in report.tree.root.children):
            raise KeyboardInterrupt

    with Solver(**AGGREGATE, guide=guide) as solver:
        with pytest.raises(KeyboardInterrupt):
            solver.solve(PROBLEM, checkpoint=file, on_round=stop)
        assert solver.resume(file).tree_hash == grown.tree_hash


def test_prompts_and_replies_are_those_of_the_papers_loop_over_transformers():
    """The loop draws answers, renders their prompts, and reads every reply as one text."""
    with Solver(**AGGREGATE) as solver:
        tree, search = solver.solve(PROBLEM).tree, solver.settings.search
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "generator")
    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "generator", dtype=torch.float32)
    replies = {}
    for node in filter(lambda node: node.ended, tree.nodes()):
        replies.setdefault(node.reply()[0].round, []).append(node)
    (_, answers), (began, later) = sorted(replies.items())
    rng = round_rng(search, SimpleNamespace(root=tree.root, rounds=began - 1))
    prompts = set()
    for drawn in order_alike([rng.sample(range(4), 2) for _ in later]):
        text = solutions_prompt(search.aggregate_prompt, PROBLEM, [answers[i] for i in drawn])
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        prompts.add(tuple(rendered["input_ids"]))
    read = set()
    for node in later:
        ids, logprobs = node.path_token_ids(), [x for step in node.reply() for x in step.logprobs]
        read.add(tuple(ids[: -len(logprobs)]))
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0, -len(logprobs) - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(ids[-len(logprobs) :])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-3)
    assert read == prompts


def test_a_prompt_of_its_own_is_answered_like_a_fresh_problem():
    with Solver(**{**AGGREGATE, "temperature": 0.0}, dtype="float64") as solver:
        found = solver.solve(PROBLEM)
        turns = [node for node in found.tree.nodes() if node.turn is not None and node.turn.text]
        assert turns
        for turn in turns:
            alone = solver.solve(turn.turn.text, search="majority", n=1)
            reply = [child.path_token_ids() for child in turn.children]
            whole = alone.tree.node(alone.lineage)
            assert all(whole.path_token_ids()[: len(each)] == each for each in reply)


@pytest.mark.parametrize("search", ["beam", "majority", "aggregate", "revise"])
def test_synthesis_writes_the_answer_from_the_candidates_of_any_search(search):
    options = {**SMALL, "search": search, "choose": "synthesis"}
    trees = set()
    for max_batch in (None, 1):
        with Solver(**options, max_batch=max_batch) as solver:
            found = solver.solve(PROBLEM)
        trees.add(found.tree_hash)
        *others, written = found.candidates
        assert len(others) == 4
        node = found.tree.node(written.lineage)
        assert is_synthesis(node)
        assert sum(other.said in node.replies_to.turn.text for other in others) == 4
        assert (found.lineage == written.lineage) == (written.stop == "eos")
    assert len(trees) == 1


def test_a_search_that_a_stop_ends_early_is_decided_by_a_vote():
    with Solver(**SMALL, search="majority", choose="synthesis", first_k=1) as solver:
        found = solver.solve(PROBLEM)
    assert not any(is_synthesis(node) for node in found.tree.nodes() if node.turn is None)
    assert found.lineage in [each.lineage for each in found.candidates]


def test_synthesis_reads_the_best_scored_candidates():
    tree = new_tree(text="What is it?")
    search = SearchSettings(search="best-of-n", n=3, choose="synthesis", synthesis_size=2)
    strategy = Synthesis(make_strategy(search), search)
    assert actions_of(strategy, tree) == [Extend(tree.root, 3)]
    obey(tree, actions_of(strategy, tree))
    reply_to_all(tree, ["red", "green", "blue"])
    for node, score in zip(tree.candidates(), (0.9, 0.1, 0.5), strict=True):
        node.score = score
    actions = actions_of(strategy, tree)
    (turn,) = asked(actions)
    assert turn.final
    assert turn.sources == ((0,), (2,))
    assert "red" in turn.text
    assert "green" not in turn.text
    assert turn.text.index("red") < turn.text.index("blue"), "in the order of the tree"
    obey(tree, actions)
    reply_to_all(tree, ["violet"])
    assert isinstance(actions_of(strategy, tree)[-1], EndSearch)
