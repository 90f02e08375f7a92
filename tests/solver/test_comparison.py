"""`--choose pairwise` and `listwise`: the generator compares its own candidates."""

import pytest

from beamwright import Solver
from beamwright.errors import Cancelled, CapacityError, InputError
from beamwright.tree import Conversation
from beamwright.verify import compare

PROBLEM = (
    "Tom has 12 apples. Then in May Tom buys 5 apples. Later in June Tom gives away 3 apples. "
    "In July Tom buys 2 bags of 7 apples each. How many apples does Tom have now?"
)
SHAPE = "layers=1,hidden=32,heads=2,kv_heads=2,intermediate=64,vocab=64,context=64"
PATHS = {"search": "best-of-n", "n": 8, "width": 1, "temperature": 1.3, "verifier": "none"}


def solver(how="pairwise", **options):
    return Solver(**{"model": "bundled", **PATHS, "choose": how, **options})


@pytest.fixture(scope="module")
def majority():
    with solver("majority") as made:
        return made.solve(PROBLEM)


@pytest.fixture(scope="module")
def compared():
    return {how: solver(how).solve(PROBLEM) for how in ("pairwise", "listwise")}


@pytest.fixture
def scripted(monkeypatch):
    """What is asked, as text; the generator is made to prefer an answer, and the first place."""
    asked, wanted = [], []

    def shares(model, questions):
        codec = made.codec
        for question in questions:
            path = [t for part in question.path for t in part.segment.source.token_ids]
            head = path[: question.start]
            asked.append(codec.decode_raw([*head, *question.token_ids]))
        return [
            prefer(text, len(q.choices))
            for text, q in zip(asked[-len(questions) :], questions, strict=True)
        ]

    def prefer(text, num):
        attempts = text.split("\nAttempt ")[1:]
        weights = [
            1 + 9 * any(f"boxed{{{each}}}" in attempt for each in wanted) + (place == 0)
            for place, attempt in enumerate(attempts)
        ]
        assert len(attempts) == num
        return [weight / sum(weights) for weight in weights]

    with solver() as made:
        monkeypatch.setattr(compare, "shares", shares)
        yield made, asked, wanted


def test_the_answer_is_the_one_that_the_generator_holds_to_be_right(scripted, majority):
    made, asked, wanted = scripted
    answers = {each.answer for each in majority.candidates if each.vote is not None}
    for answer in answers - {majority.answer}:
        wanted[:] = [answer]
        solution = made.solve(PROBLEM)
        if answer in {each.answer for each in solution.candidates if each.preferred}:
            assert solution.answer == answer
    assert majority.answer in answers
    assert len(answers) > 2
    assert all(text.count(PROBLEM) == 1 for text in asked)


@pytest.mark.parametrize("how", ["pairwise", "listwise"])
def test_a_comparison_changes_the_choice_and_no_tree(how, compared, majority):
    found = compared[how]
    assert found.tree_hash == majority.tree_hash
    assert found.tokens.compared > 0
    assert found.tokens.generated == majority.tokens.generated
    assert majority.tokens.compared == 0
    shown = [each for each in found.candidates if each.preferred is not None]
    assert len({each.vote for each in shown}) == len(shown) > 1
    assert found.lineage in [each.lineage for each in shown]
    written = found.to_json()["candidates"]
    assert sum("preferred" in each for each in written) == len(shown)


def test_the_prompt_is_read_from_the_tree(compared):
    tokens = compared["pairwise"].tokens
    assert tokens.compared_reused > 0


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("pairwise", {"kv_memory": "1600KiB"}),
        ("listwise", {"kv_memory": "1600KiB"}),
        ("pairwise", {"kv_memory": "2MiB", "evict": "recompute", "batching": "grouped"}),
        ("listwise", {"schedule": "in-gpu", "attention": "dense"}),
        ("pairwise", {"schedule": "layerwise", "attention": "tree"}),
    ],
)
def test_shares_are_equal_to_the_bit_whatever_the_memory_and_the_schedule(how, options, compared):
    with solver(how, **options) as made:
        found = made.solve(PROBLEM)
    same = made.settings.model.attention in ("auto", "tree")
    pairs = zip(found.candidates, compared[how].candidates, strict=True)
    for ours, theirs in pairs:
        assert ours.preferred == (
            theirs.preferred if same else pytest.approx(theirs.preferred, abs=1e-5)
        )
    assert found.answer == compared[how].answer
    assert found.tree_hash == compared[how].tree_hash
    assert made._machinery.generator.store.held_bytes == 0


def test_searches_beside_each_other_choose_as_alone(compared):
    with solver() as made:
        found = made.solve_many([(0, PROBLEM), (0, PROBLEM, {"choose": "listwise"}), (1, PROBLEM)])
        alone = made.solve(PROBLEM, problem_id=1)
        assert made.usage().levels["generator", "device"].used_bytes == 0
    for ours, theirs in zip(found, [*compared.values(), alone], strict=True):
        shares = [[each.preferred for each in one.candidates] for one in (ours, theirs)]
        assert shares[0] == shares[1]
        assert ours.lineage == theirs.lineage


def test_a_verifier_scores_beside_it_in_turns_of_one_memory():
    options = {"search": "beam", "width": 2, "verifier": "bundled", "choose": "pairwise"}
    answers = set()
    for kv_memory in ("8MiB", "2MiB"):
        with solver(None, **options, kv_memory=kv_memory) as made:
            found = made.solve(PROBLEM)
            answers.add((found.answer, found.tree_hash, tuple(found.warnings)))
    assert len(answers) == 1


def test_one_answer_needs_no_comparison():
    with solver(temperature=0.01, n=2) as made:
        found = made.solve("Tom has 2 apples. How many apples does Tom have now?")
    assert found.tokens.compared == 0
    assert found.candidates[0].preferred is None


def test_a_deadline_leaves_the_majority_and_says_so(majority, monkeypatch):
    with solver() as made:
        found = made.solve(PROBLEM, deadline="1h")
        assert found.tokens.compared
        monkeypatch.setattr("beamwright.engine.tree_run.TreeRun.out_of_time", lambda *_: True)
        found = made.solve(PROBLEM, deadline="1h")
    assert found.tokens.compared == 0
    assert "--deadline 3600s had passed before candidates were compared" in found.warnings[-1]


def test_a_conversation_is_asked_about_in_its_last_turn(scripted):
    made, asked, _ = scripted
    said = ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"})
    made.solve(Conversation((*said, {"role": "user", "content": PROBLEM})))
    assert asked
    assert all(text.find("Hello.") < text.find(PROBLEM) for text in asked)


def test_a_budget_bounds_the_comparisons(scripted):
    made, asked, _ = scripted
    made.solve(PROBLEM, compare_budget=1)
    assert len(asked) == 2


def test_what_cannot_compare_is_refused():
    with pytest.raises(InputError, match="has no tokenizer: it compares no candidates"):
        Solver(model=f"random:llama,{SHAPE}", choose="pairwise")
    with pytest.raises(InputError, match="not pairwise"):
        solver(stop_votes=True)


def test_thoughts_are_left_out_and_none_is_begun(monkeypatch):
    asked, shares = [], compare.shares

    def heard(model, questions):
        asked.extend(made.codec.decode_raw(question.token_ids) for question in questions)
        return shares(model, questions)

    monkeypatch.setattr(compare, "shares", heard)
    with solver(model="bundled:thinking", n=6) as made:
        found = made.solve(PROBLEM)
    said = [each.said.strip() for each in found.candidates if each.preferred is not None]
    assert found.tokens.thought
    assert asked
    for text in asked:
        shown = text.partition("Attempt A:\n")[2].partition("\n\nAttempt B:\n")
        assert shown[0] in said
        assert shown[2].partition("\n\nWhich attempt")[0] in said
        assert text.endswith("<think>\n\n</think>\n\nAnswer:\n")


def test_a_resumed_search_compares_as_well(tmp_path, compared):
    file = tmp_path / "saved.json"
    with solver(dtype="float64") as made:
        whole = made.solve(PROBLEM, checkpoint=file)
        again = made.resume(file, choose="pairwise")
    assert again.answer == whole.answer
    assert again.tree_hash == whole.tree_hash
    for ours, theirs in zip(again.candidates, whole.candidates, strict=True):
        assert ours.preferred == pytest.approx(theirs.preferred, abs=1e-9)


def test_a_cancelled_comparison_holds_nothing(monkeypatch):
    with solver() as made:
        monkeypatch.setattr("beamwright.solver.comparison._PIECE_TOKENS", 1)
        asked = compare.Comparer.ask
        monkeypatch.setattr(
            compare.Comparer, "ask", lambda *given: (handle.cancel(), asked(*given))[1]
        )
        handle = made.submit(PROBLEM)
        with pytest.raises(Cancelled):
            handle.result()
        assert made.usage().levels["generator", "device"].used_bytes == 0


def test_memory_that_holds_no_comparison_leaves_the_majority(monkeypatch, majority):
    def none(model, questions):
        raise CapacityError("a segment", 2, 1, 1, "device KV budget", "")

    monkeypatch.setattr(compare, "shares", none)
    with solver() as made:
        found = made.solve(PROBLEM)
    assert found.answer == majority.answer
    assert "the generator's KV budget does not hold" in found.warnings[-1]
    assert "the answer is the majority's" in found.warnings[-1]
