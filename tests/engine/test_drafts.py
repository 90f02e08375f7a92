"""Drafts: any guesses change the passes and nothing else; what is guessed is what the text says."""

import random
from collections import Counter

import pytest

import fakes
from beamwright import Solver
from beamwright.engine.draft_passes import DraftPasses
from beamwright.engine.drafts import SUFFIXES, DraftLengths, DraftProposer, DraftTrials, TextIndex
from beamwright.errors import InputError
from engines import WAYS, exact_dtype, facts, grow

SMALL = {"n": 8, "width": 2, "max_rounds": 5, "max_step_tokens": 24, "max_tokens": 60}


class Knowing(DraftProposer):
    """Drafts what rows will write, as far as a coin says so, and something wrong behind that."""

    def __init__(self, tree, most, seed=0):
        super().__init__(most)
        self.rng, self.drafted, self.accepted = random.Random(seed), 0, Counter()
        self.known = {node.lineage: node.token_ids for node in tree.nodes()}

    def record_pass(self, drafts, used, rows, seconds):
        """Nothing is decided by it."""

    def propose_drafts(self, rooms, least_rows=8):
        return {row: self.guess(row, min(room, self.most)) for row, room in rooms.items()}

    def guess(self, row, room):
        known = self.known.get(row.node.lineage, ())
        right = list(known[len(row.tokens) :][: self.rng.randint(0, room)])
        wrong = [self.rng.randrange(fakes.VOCAB) for _ in range(room - len(right))]
        return right + wrong[: self.rng.randint(0, room)]


@pytest.fixture
def draft_from(monkeypatch):
    """Let all engines draft from a tree that is known."""

    def start(tree, most, seed=0):
        knowing = Knowing(tree, most, seed)
        run = DraftPasses.run

        def with_knowing(passes, *parts):
            *others, _ = parts
            return run(passes, *others, knowing)

        monkeypatch.setattr(DraftPasses, "run", with_knowing)
        return knowing

    return start


@pytest.mark.parametrize(
    ("most", "options"),
    [
        *((most, {"attention": "tree"}) for most in (1, 3, 8)),
        (8, {"attention": "dense"}),
        (5, {"attention": "reference"}),
        *((5, way) for way in WAYS),
        (5, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}),
        (5, {"max_step_tokens": 2}),
        (5, {"n": 2, "width": 1}),
        (5, {"kv_dtype": "int8", "attention": "tree"}),
        (5, {"dtype": "float64", "kv_dtype": "fp8", "attention": "dense"}),
    ],
    ids=str,
)
def test_good_and_bad_drafts_change_no_bit_of_a_tree(make_solver, draft_from, most, options):
    """However its rows are drawn, and end."""
    dtype = exact_dtype(options.get("attention", "tree"))
    options = {**SMALL, "dtype": dtype, **options}
    plain, tree = grow(make_solver(**options))
    assert plain.tokens.drafted == 0
    draft_from(tree, most, most)
    found, drafted = grow(make_solver(**options, drafts=most))
    assert facts(drafted) == facts(tree)
    assert found.tree_hash == plain.tree_hash
    assert 0 < found.tokens.draft_accepted < found.tokens.drafted


def test_where_a_view_cannot_none_are_drafted(make_solver):
    """Unless they are asked for (`test_sparse.yaml`)."""
    make_solver(schedule="layerwise", drafts="auto").close()


@pytest.mark.parametrize("given", [0, 16, "none", True, 1.5])
def test_what_is_no_number_of_drafts(given):
    with pytest.raises(InputError, match="drafts"):
        Solver(model="bundled", drafts=given)


# --- the text ------------------------------------------------------------------------------------


def longest_suffix(texts, behind):
    """What followed the longest suffix, by going through all texts: (token, length)."""
    for length in SUFFIXES:
        suffix, followers = tuple(behind[-length:]), []
        if len(suffix) < length:
            continue
        for text in texts:
            ends = range(length, len(text))
            followers += [text[end] for end in ends if tuple(text[end - length : end]) == suffix]
        if followers:
            counts = Counter(followers)
            most = max(counts.values())
            best = max(counts, key=lambda t: (counts[t] == most, _last(followers, t)))
            return best, length
    return None


def _last(followers, token):
    return len(followers) - 1 - followers[::-1].index(token)


@pytest.mark.parametrize("seed", range(20))
def test_the_index_finds_what_going_through_all_texts_finds(seed):
    rng, index, texts = random.Random(seed), TextIndex(), []
    for _ in range(12):
        text = [rng.randrange(2 + seed % 4) for _ in range(rng.randint(1, 40))]
        texts.append(text)
        at = rng.randint(0, len(text))
        behind = index.add((), text[:at])
        index.add(behind, text[at:])
        for _ in range(20):
            asked = [rng.randrange(2 + seed % 4) for _ in range(rng.randint(0, 12))]
            assert index.find_follower(asked) == longest_suffix(texts, asked)


# --- what pays -----------------------------------------------------------------------------------


def told(worth, seconds_of, rows):
    for _ in range(20):
        for count in rows:
            worth.seconds.record_pass(count, seconds_of(count))


def test_drafts_are_as_many_as_pay():
    """All where rows cost nothing, none where arithmetic is the limit, the likeliest between."""
    drafts = [[8, 8, 8], [2, 2, 2]] + [[4]] * 6
    costs = {"free": lambda rows: 1.0, "dear": lambda rows: rows, "fair": lambda rows: 10 + rows}
    taken = {}
    for name, cost in costs.items():
        worth = DraftLengths()
        for length, accepted in ((8, 9), (4, 6), (2, 1)):
            for number in range(10):
                worth.record_draft([length], int(number < accepted), stopped=False)
        told(worth, cost, (8, 16))
        taken[name] = worth.choose_lengths(drafts)
    assert taken["free"] == [3, 3, 1, 1, 1, 1, 1, 1]
    assert taken["dear"] == [0] * 8
    assert taken["fair"] == [2, 0, 1, 1, 1, 1, 1, 1]
    assert worth.choose_lengths([[2, 2]]) == [2], "rows that would only pad the batch cost nothing"
    assert worth.choose_lengths([[2, 2]], 2) == [1]


@pytest.mark.parametrize("faster", [True, False])
def test_iterations_go_the_way_that_is_faster(faster):
    trials, taken = DraftTrials(), []
    for number in range(100):
        drafted = trials.uses_drafts(16)
        slow = drafted != faster and number > 3
        trials.record_iteration(16, 16, 2.0 if slow or drafted != faster else 1.0, drafted=drafted)
        taken.append(drafted)
    assert taken[:4] == [True, True, False, False]
    assert sum(each == faster for each in taken) >= 92
    assert any(each != faster for each in taken[4:]), "what is slower is tried again"
