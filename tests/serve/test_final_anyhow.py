"""Final text under options drawn at random: whatever is asked for, nothing is taken back."""

import random
from itertools import pairwise

import pytest

import engines
from beamwright.errors import Cancelled
from beamwright.search import STRATEGIES
from beamwright.serve.final import final_text
from served import text_of

COMMITS = [name for name, row in STRATEGIES.items() if row.commits]
LETTERS = "EQ[ Wsot.`\n0Oe"  # of which the tiny model says much


def drawn(rng):
    """Options of one search: what it is, and what may end it."""
    width, method = rng.choice([1, 2, 4]), rng.choice(COMMITS)
    options = {
        "search": method,
        "width": width,
        "n": width * rng.choice([1, 2, 3, 4]),
        "max_rounds": rng.choice([1, 2, 4, 8, 20]),
        "max_tokens": rng.choice([1, 5, 20, 40, 80]),
        "max_step_tokens": rng.choice([1, 2, 5, 12, 30]),
        "temperature": rng.choice([0.01, 0.05, 0.1, 0.2, 0.5, 1.0]),
        "seed": rng.randrange(10**6),
        "choose": rng.choice([None, "best", "majority", "weighted"]),
    }
    some = {
        "step_tokens": (0.2, [1, 3, 7]),
        "filter_duplicates": (0.3, [True]),
        "token_budget": (0.3, [1, 10, 50, 200]),
        "deadline": (0.3, [0.001, 0.01, 0.05]),
        "stop_votes": (0.4 * (options["choose"] in ("majority", "weighted")), [True]),
        "stop_score": (0.2, [-5.0, 0.01, 0.5]),
        "delimiter": (0.2, [" ", "Q", "s"]),
    }
    options |= {k: rng.choice(of) for k, (share, of) in some.items() if rng.random() < share}
    if rng.random() < 0.5:
        stops = ("".join(rng.choices(LETTERS, k=rng.choice([1, 2, 3]))) for _ in range(3))
        options["stop_strings"] = tuple(stops)
    return options


@pytest.mark.parametrize("speculation", ["off", "truncate"])
def test_it_only_grows_and_the_answer_begins_with_it(generator_folder, speculation):
    rng, early = random.Random(speculation), 0
    with engines.tiny_solver(generator_folder, speculation=speculation) as solver:
        for _ in range(25):
            going = []
            for _ in range(5):
                options, said = drawn(rng), [""]
                stops = options.get("stop_strings", ())

                def hear(report, said=said, stops=stops):
                    said.append(final_text(report.tree, stops))

                problem = f"Ann has {rng.randrange(9)} apples."
                handle = solver.submit(problem, on_round=hear, **options)
                going.append((options, said, handle))
                if rng.random() < 0.1:
                    handle.cancel()
            for options, said, handle in going:
                try:
                    solution = handle.result(60)
                except Cancelled as error:
                    solution = error.partial
                texts = [*said, *([] if solution is None else [solution.text])]
                assert all(b.startswith(a) for a, b in pairwise(texts)), options
                early += bool(said[-1])
    assert early > 10, "or nothing was tried"


def test_a_stream_says_what_the_whole_answer_does_whatever_is_asked_for(served):
    rng = random.Random(16)
    for _ in range(40):
        search = drawn(rng)
        search.pop("deadline", None)
        stops = search.pop("stop_strings", None)
        fields = {"search": search, "n": rng.choice([1, 1, 3]), "seed": search.pop("seed")}
        fields |= {"stop": stops} if stops else {}
        fields |= {"logprobs": True} if rng.random() < 0.2 else {}
        whole, events = served.chat(**fields), served.stream(**fields)
        assert whole.status_code == 200, (fields, whole.text)
        choices = whole.json()["choices"]
        for choice in choices:
            assert text_of(events, choice["index"]) == choice["message"]["content"], fields
        ends = {c["index"]: c["finish_reason"] for e in events for c in e["choices"]}
        assert ends == {choice["index"]: choice["finish_reason"] for choice in choices}, fields
