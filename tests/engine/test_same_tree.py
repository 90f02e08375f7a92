"""No way to run a search changes its tree (docs/concepts/sameness.md): every pair of options.

The first half of a case's options decides the tree. The other half must not: the case is compared
with the same search where all KV is on the device, one row batch after another, alone.
"""

import random
import re
import shutil
from itertools import combinations, product

import pytest
from transformers import AutoConfig

import fakes
from beamwright.errors import CapacityError
from beamwright.schedule import SCHEDULES
from beamwright.search import STRATEGIES
from beamwright.units import parse_size
from checksums import check_transfers
from declared import real_options
from engines import (
    PROBLEM,
    WINDOWS,
    assert_nothing_allocated,
    check_conservation,
    exact_dtype,
    grow,
    tiny_solver,
)
from hybrids import EXPERTS, write_hybrid
from recurring import check_states, load_recurring
from tables import beside

_TABLE = beside(__file__)
DECIDES, FREE = _TABLE["decides"], _TABLE["free"]
DECIDES["search"] = {
    name: {"search": name} for name in STRATEGIES if name not in ("majority", "weighted")
}
DECIDES["dtype"]["float32"] = {"dtype": exact_dtype()}
FREE["schedule"] = [*SCHEDULES]
FACTORS = {**{name: list(values) for name, values in DECIDES.items()}, **FREE}
REFUSED = [
    dict(zip(row, pair, strict=True))
    for row in _TABLE["refused"]
    for pair in product(*row.values())
]
PLAIN = {"schedule": "in-gpu", "executor": "plain", "speculation": "off"}
LAYERS = ["sliding_attention", "full_attention"]
BY_NIGHT = {
    **{"gemma": "windows", "qwen3_moe": "windows", "lfm2": "states"},
    **{"qwen3_5_text": "states", "granitemoehybrid": "states"},
}
"""More models, and the kind whose cases they are put into."""
PROBLEMS = {"a": PROBLEM, "b": "Tom has 4 hats. He finds 2."}


def covering_rows(factors, refused, num_tries=8):
    """Rows in which every two values meet, but for what is refused or both decide the tree.

    Greedy, always the same.
    """
    refused = {frozenset(pair.items()) for pair in refused}
    values = [(name, value) for name, every in factors.items() for value in every]
    allowed = {
        frozenset(pair)
        for pair in combinations(values, 2)
        if pair[0][0] != pair[1][0] and frozenset(pair) not in refused
    }
    rng, rows = random.Random(0), []
    missing = {pair for pair in allowed if not all(name in DECIDES for name, _ in pair)}
    for start in sorted(missing, key=lambda pair: sorted(map(str, pair))):
        if start not in missing:
            continue
        tries = (_drawn_row(factors, allowed, missing, start, rng) for _ in range(num_tries))
        row = max((each for each in tries if each), key=lambda each: _num_new(each, missing))
        missing -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append({name: row[name] for name in factors})
    return rows


def _drawn_row(factors, allowed, missing, start, rng):
    """A row with this pair; None where a later factor has no value left."""
    row = dict(start)
    for name in rng.sample([*factors], len(factors)):
        if name in row:
            continue
        found = [
            value
            for value in factors[name]
            if all(frozenset({(name, value), each}) in allowed for each in row.items())
        ]
        if not found:
            return None
        new = [sum(frozenset({(name, v), each}) in missing for each in row.items()) for v in found]
        row[name] = rng.choice(
            [v for v, count in zip(found, new, strict=True) if count == max(new)]
        )
    return row


def _num_new(row, missing):
    return sum(frozenset(pair) in missing for pair in combinations(row.items(), 2))


ROWS = covering_rows(FACTORS, REFUSED)
NIGHTLY = [
    pytest.param({**row, "model": name}, marks=pytest.mark.nightly)
    for name, kind in BY_NIGHT.items()
    for row in [row for row in ROWS if row["model"] == kind][:4]
]


# --- searches --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, generator_folder):
    """Folders of the models, each written once."""
    written = {"llama": generator_folder, "states": generator_folder}

    def of(kind):
        if kind not in written:
            folder = written[kind] = tmp_path_factory.mktemp(kind)
            write_model(folder, kind)
        return written[kind]

    return of


def write_model(folder, kind):
    """Two layers, one of each kind that the family has."""
    if kind in BY_NIGHT and kind != "gemma":
        write_hybrid(folder, kind, **(EXPERTS if kind == "qwen3_moe" else {}))
        return
    family, options = {
        "windows": ("qwen3", {"layer_types": LAYERS, "use_sliding_window": True}),
        "sinks": ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}),
        "gemma": ("gemma3_text", {}),
    }[kind]
    shape = {**WINDOWS, "num_hidden_layers": 2, "eos_token_id": [2, 30]}
    fakes.write_tokenizer(folder)
    fakes.write_checkpoint(folder, AutoConfig.for_model(family, **shape, **options), noise=0.15)


@pytest.fixture
def make(folder_of, verifier_folder, monkeypatch):
    """Makes the solver of a case, with other options for some."""

    def of(row, **changes):
        options = {"n": 6, "width": 2, "max_rounds": 4, "verifier": str(verifier_folder)}
        for name, values in DECIDES.items():
            options |= values.get(row[name], {})
        options |= real_options(row["search"], 20, **options)
        if row["dtype"] == "float64":  # there trees are equal whatever it says
            monkeypatch.setattr("beamwright.engine.selftest.batches_are_exact", lambda *_: True)
        if row["model"] == "states":
            monkeypatch.setattr("beamwright.solver.machinery.load_model", load_recurring)
        return tiny_solver(folder_of(row["model"]), **options, **changes)

    return of


def free_options(row):
    """What may not change the tree, but for the memory."""
    named = {name: row[name] for name in FREE if name not in ("memory", "asked")}
    if row["verifier"] != "prm":
        del named["split"]
    if named["evict"] == "host" and row["schedule"] != "in-gpu":
        named["host_memory"] = "32MiB"
    return named


def least_bytes(make, row, options):
    """The number that the error of a search with hardly any memory names."""
    options = {**options, "schedule": "locality", "executor": "plain"}
    with make(row, **options, kv_memory=1024) as solver:
        with pytest.raises(CapacityError) as caught:
            solver.solve(PROBLEM)
        assert_nothing_allocated(solver)
    (named,) = re.findall(
        r"--kv-memory to ([0-9.]+[KMG]iB), which holds any path", str(caught.value)
    )
    return parse_size(named)


def numbers_of(tree):
    """Log-probabilities and scores."""
    return [
        [*node.logprobs, *(x for x in (node.score, node.step_score) if x is not None)]
        for node in tree.nodes()
    ]


def plain_solutions(make, row, folder):
    """Each problem alone with all KV on the device, a checkpoint of a round of the first, and the
    models' sizes."""
    file, kept = folder / "now.json", folder / "kept.json"
    attention = {"attention": row["attention"]} if row["dtype"] == "float32" else {}

    def keep(report):
        if report.round <= 2:
            shutil.copy(file, kept)

    with make(row, **PLAIN, **attention) as solver:
        first = solver.solve(PROBLEM, problem_id="a", checkpoint=file, on_round=keep)
        found = {"a": first}
        if row["asked"] in ("together", "submitted"):
            found["b"] = solver.solve(PROBLEMS["b"], problem_id="b")
        assert_nothing_allocated(solver)
        sizes = solver._machinery.sizes
    return found, kept, sizes


def ask(solver, row, saved):
    """The solutions of a case, by problem."""
    if row["asked"] == "alone":
        return {"a": solver.solve(PROBLEM, problem_id="a", on_round=checks_of(solver, row))}
    if row["asked"] == "resumed":
        return {"a": solver.resume(saved)}
    if row["asked"] == "together":
        in_flight = "auto" if row["explore"] == "decoupled" else 2
        return dict(solver.solve_many([*PROBLEMS.items()], in_flight=in_flight))
    handles = {
        name: solver.submit(text, problem_id=name, priority=number)
        for number, (name, text) in enumerate(PROBLEMS.items())
    }
    return {name: handle.result(600) for name, handle in handles.items()}


def checks_of(solver, row):
    """What is looked at after each round; in no tree is what is decoded ahead, or scored beside."""

    def look(report):
        if row["executor"] == "plain" and row["speculation"] == "off":
            check_conservation(solver, [report.tree])
        if row["model"] == "states":
            check_states(solver, report.tree)

    return look


def assert_same(found, expected, *, exact):
    assert found.tree_hash == expected.tree_hash
    assert [n.text for n in found.tree.nodes()] == [n.text for n in expected.tree.nodes()]
    for mine, theirs in zip(numbers_of(found.tree), numbers_of(expected.tree), strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=0 if exact else 1e-4)
    assert found.tokens.generated == expected.tokens.generated
    assert [each.text for each in found.candidates] == [e.text for e in expected.candidates]


@pytest.mark.parametrize("row", [*ROWS, *NIGHTLY], ids=lambda row: "-".join(map(str, row.values())))
def test_the_tree_is_the_same(make, row, tmp_path, monkeypatch):
    expected, saved, sizes = plain_solutions(make, row, tmp_path)
    options, peak = free_options(row), expected["a"].kv.device_peak_bytes
    if row["memory"] != "all":
        least = least_bytes(make, row, options)
        options["kv_memory"] = max(least, peak // 2 if row["memory"] == "half" else 0)
    offloads = row["weights_home"] != "device"
    if offloads:  # one buffer, because two would hold all layers
        for module in ("models.offload", "solver.offload", "solver.model_bytes"):
            monkeypatch.setattr(f"beamwright.{module}.WEIGHT_BUFFERS", 1)
        offloaded = sum(each.with_offloaded(each.shape.layers).weights for each in sizes)
        weights = (offloaded + sum(each.weights for each in sizes)) // 2
        options["memory"] = options.setdefault("kv_memory", 64 * 2**20) + weights
    with make(row, **options) as solver:
        store = solver.generator.store
        compared = check_transfers(store) if row["model"] == "states" and store.host else []
        found = ask(solver, row, saved)
    assert_nothing_allocated(solver)
    for name, solution in found.items():
        exact = row["dtype"] == "float32" and solution.exact and expected[name].exact
        assert_same(solution, expected[name], exact=exact)
    assert all(bool(each.weights) is offloads for each in found.values())
    kv, asked = found["a"].kv, row["asked"]
    free = asked == "resumed" or row["evict"] == "recompute"
    if row["memory"] != "all":
        assert kv.device_peak_bytes <= options["kv_memory"]
        assert free or kv.h2d_bytes + kv.d2h_bytes or options["kv_memory"] >= peak
    # deepconf's second wave begins at the prompt again, of which only a window was kept.
    free = free or (row["model"], row["search"]) == ("windows", "deepconf")
    assert free or row["verifier"] == "prm" or kv.recomputed_tokens == 0
    assert bool(compared) <= (sum(each.kv.h2d_bytes for each in found.values()) > 0)
    if STRATEGIES[row["search"]].fills:
        assert len(found["a"].candidates) == 6


# --- groupings, seeds and siblings -------------------------------------------------------------


@pytest.mark.parametrize("attention", FREE["attention"])
def test_trees_do_not_depend_on_grouping(make_solver, attention):
    options = {"n": 8, "max_rounds": 4}
    solver = make_solver(attention=attention, dtype=exact_dtype(attention), **options)
    solution = grow(solver)[0]
    for schedule in (fakes.Grouping(1), fakes.Grouping(5), fakes.Grouping(3, reverse=True)):
        solver.schedule = schedule
        found = grow(solver)[0]
        assert_same(found, solution, exact=solver.exact)
        assert found.kv.groups >= solution.kv.groups


def test_seeds_and_problem_ids_grow_different_trees(make_solver):
    solver = make_solver(seed=0)
    hashes = [grow(solver, problem_id=i)[0].tree_hash for i in (0, 1, "0")]
    hashes.append(grow(make_solver(seed=1))[0].tree_hash)
    assert len(set(hashes)) == 4
    assert grow(solver)[0].tree_hash == hashes[0]


def test_a_child_draws_the_same_whoever_its_siblings_are(make_solver):
    """n = 1 is the first path of n = 16."""
    many = grow(make_solver(search="best-of-n"))[1]
    one = grow(make_solver(search="best-of-n", n=1))[1]
    chain = [node for node in many.nodes() if node.lineage[1:2] == (0,)]
    assert [n.token_ids for n in one.nodes()][1:] == [n.token_ids for n in chain]
