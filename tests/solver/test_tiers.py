"""The tree does not depend on tiers, budgets or schedules (docs/concepts/sameness.md)."""

import re
from functools import cache, partial
from itertools import combinations

import pytest
from transformers import LlamaConfig

import engines
import fakes
from beamwright.errors import CapacityError
from beamwright.kv.link import StreamLink
from beamwright.schedule import SCHEDULES
from beamwright.solver import machinery
from beamwright_lab.baselines.layerwise.store import LayeredStore
from beamwright_lab.checks.covering import covering_array, pairs
from engines import assert_nothing_allocated, exact_dtype, grow
from streams import LateStreams

LAYERS = 8  # so that layer-wise's two stream buffers are a quarter of the layers
FEW_LAYERS = 2  # elsewhere a block moves with all its layers, and two show if they are mixed up
FACTORS = {
    "schedule": sorted(
        {name for name, row in SCHEDULES.items() if not row.resident} - {"auto"}, reverse=True
    ),
    "budget": ["all", "half", "quarter", "minimum"],
    "prefetch": [True, False],
    "balance": [True, False],
    "inter_beam": [True, False],
    "planner": ["ranges", "greedy"],
    "attention": ["tree", "dense"],
    "evict": ["host", "recompute"],
    "batching": ["continuous", "grouped"],
    "write_back": ["eager", "lazy"],
    "max_batch": [None, 1, 8],
}
SHARES = {"all": 1.0, "half": 0.5, "quarter": 0.25, "minimum": 0.0}
STEP, ROUNDS = 20, 3
LONG_STEPS = {"delimiter": "Zq", "max_step_tokens": 75, "max_tokens": 160, "ignore_eos": True}
SCORED = {
    "n": 8,
    "max_rounds": 4,
    "max_step_tokens": 40,
    "max_tokens": 70,
    "host_memory": "8MiB",
}


ARRAY = covering_array(FACTORS)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A checkpoint's folder by its number of layers."""

    @cache
    def of(layers):
        folder = tmp_path_factory.mktemp("layers")
        fakes.write_tokenizer(folder)
        shape = {**fakes.SMALL, "num_hidden_layers": layers, "eos_token_id": [2, 30]}
        config = LlamaConfig(**shape, num_key_value_heads=2)
        fakes.write_checkpoint(folder, config, seed=3, noise=0.15)
        return folder

    return of


@pytest.fixture(scope="module")
def solver_of(folder_of):
    """Solvers of one small search: steps of up to three blocks, most of them shorter.

    like: the schedule that it is compared with, whose model it has.
    """
    options = {"n": 12, "width": 3, "max_rounds": 3, "max_step_tokens": 40, "max_tokens": 70}

    def make(schedule, like=None, **changes):
        folder = folder_of(LAYERS if (like or schedule) == "layerwise" else FEW_LAYERS)
        named = {**options, "host_memory": "8MiB", "schedule": schedule, **changes}
        return engines.tiny_solver(folder, **named)

    return make


@pytest.fixture(scope="module")
def in_gpu(solver_of):
    """Tree hash, peak bytes and least locality budget without tiers, of a schedule's model."""

    @cache
    def of(attention, dtype, like="locality"):
        solver = solver_of("in-gpu", like, attention=attention, dtype=dtype)
        solution, tree = grow(solver)
        ledger = solver.generator.store.device
        limit = solver.settings.step.max_step_tokens
        least = max(
            sum(ledger.blocks_for(len(above.token_ids)) for above in node.path()[:-1])
            + ledger.blocks_for(limit)
            for node in tree.nodes()
            if node.parent
        )
        return (
            solution.tree_hash,
            solution.kv.device_peak_bytes,
            (least + 1) * ledger.bytes_per_block,
        )

    return of


@pytest.fixture(scope="module")
def layerwise_peak(solver_of):
    """Device bytes of layer-wise offloading when every layer stays resident."""

    @cache
    def of(attention, dtype):
        solution, _ = grow(solver_of(attention=attention, dtype=dtype, schedule="layerwise"))
        return solution.kv.device_peak_bytes

    return of


# --- the covering array ----------------------------------------------------------------------


def test_the_array_covers_every_pair():
    seen = set().union(*map(pairs, ARRAY))
    for (a, some), (b, others) in combinations(sorted(FACTORS.items()), 2):
        assert {((a, x), (b, y)) for x in some for y in others} <= seen
    assert len(ARRAY) <= 20


@pytest.mark.parametrize("row", ARRAY, ids=lambda row: "-".join(map(str, row.values())))
def test_the_tree_is_the_same_in_every_configuration(solver_of, in_gpu, layerwise_peak, row):
    dtype = "float64" if row["evict"] == "recompute" else exact_dtype(row["attention"])
    expected, peak, least = in_gpu(row["attention"], dtype, row["schedule"])
    if row["schedule"] == "layerwise":
        peak = layerwise_peak(row["attention"], dtype)
        least = -(-peak * 2 // LAYERS)
    options = {name: value for name, value in row.items() if name != "budget"}
    if row["schedule"] == "layerwise":
        options["max_batch"] = None  # its peak is of all beams at a time
    budget = max(least, int(peak * SHARES[row["budget"]]))
    with solver_of(**options, dtype=dtype, kv_memory=budget) as solver:
        solution, _ = grow(solver)
        assert solution.tree_hash == expected
        assert solution.kv.device_peak_bytes <= budget
    whole = options["max_batch"] is None
    if whole and row["budget"] != "all" and row["evict"] == "host" and least < peak:
        assert solution.kv.h2d_bytes + solution.kv.d2h_bytes > 0


# --- parking ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "evict", "blocks"),
    [("tree", "recompute", 37), ("dense", "host", 37)],
)
def test_beams_are_parked_and_the_tree_is_the_same(make_solver, parked, attention, evict, blocks):
    """Steps are longer than the planner's first guess, so groups are too large for them."""
    build = partial(
        make_solver,
        attention=attention,
        dtype="float64" if evict == "recompute" else "float32",
        n=8,
        max_rounds=3,
        host_memory="8MiB",
        batching="continuous",
        **LONG_STEPS,
    )
    base = build(schedule="in-gpu")
    expected, tree = grow(base)
    assert parked == []
    assert max(len(node.token_ids) for node in tree.nodes()) > 40
    block = base.generator.store.device.bytes_per_block
    with build(schedule="locality", evict=evict, kv_memory=blocks * block) as solver:
        solution, _ = grow(solver)
    assert parked, "nothing was parked: the test does not test"
    assert solution.tree_hash == expected.tree_hash
    assert solution.kv.device_peak_bytes <= blocks * block


# --- the two ends: everything fits, and the least that does ----------------------------------


@pytest.mark.parametrize("schedule", ["locality", "layerwise", "auto"])
@pytest.mark.parametrize("attention", ["tree", "dense"])
def test_a_tree_that_fits_never_touches_the_link(solver_of, in_gpu, schedule, attention):
    with solver_of(schedule=schedule, attention=attention) as solver:
        solution, _ = grow(solver)
        assert (solution.kv.h2d_bytes, solution.kv.d2h_bytes) == (0, 0)
        assert dict(solver._machinery.tier.generator.link.bytes_moved) == {}
    assert solution.tree_hash == in_gpu(attention, "float32", schedule)[0]


@pytest.mark.parametrize("attention", ["tree", "dense"])
def test_the_least_budget_works_and_less_is_an_error(make_solver, attention):
    """The path with its step; the block beside it is the margin of the promise."""
    fixed = {"step_tokens": STEP, "max_rounds": ROUNDS, "ignore_eos": True, "max_tokens": 200}
    build = partial(make_solver, attention=attention, n=8, host_memory="8MiB", **fixed)
    base = build(schedule="in-gpu")
    solution, tree = grow(base)
    ledger = base.generator.store.device
    prompt = ledger.blocks_for(len(tree.root.token_ids))
    least = (prompt + ROUNDS * ledger.blocks_for(STEP) + 1) * ledger.bytes_per_block
    with build(schedule="locality", kv_memory=least) as solver:
        found, _ = grow(solver)
        assert found.tree_hash == solution.tree_hash
        assert found.kv.device_peak_bytes <= least
    too_little = least - 2 * ledger.bytes_per_block
    with build(schedule="locality", kv_memory=too_little) as solver:
        with pytest.raises(CapacityError):
            solver.solve(engines.PROBLEM)
        assert_nothing_allocated(solver)


NAMED = re.compile(r"--kv-memory ([0-9.]+[KMG]iB) holds any path")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"verifier": True},
        {"verifier": True, "attention": "dense", "evict": "recompute", "dtype": "float64"},
        {"verifier": True, "step_tokens": 3, "max_rounds": 12, "ignore_eos": True},
        {"search": "lookahead", "lookahead": 2, "verifier": True},
        {"search": "best-of-n", "max_tokens": None, "max_rounds": 30},
    ],
    ids=str,
)
def test_the_number_that_an_error_names_works(make_solver, verifier_folder, options):
    options = {"n": 8, "host_memory": "16MiB", "schedule": "locality", **options}
    if options.pop("verifier", False):
        options["verifier"] = str(verifier_folder)
    block = make_solver().generator.store.device.bytes_per_block
    expected = make_solver(**{**options, "schedule": "in-gpu"}).solve(engines.PROBLEM)
    for num_blocks in (2, 8):
        with make_solver(**options, kv_memory=num_blocks * block) as solver:
            try:
                assert solver.solve(engines.PROBLEM).tree_hash == expected.tree_hash
                continue
            except CapacityError as error:
                message = str(error)
        assert "--schedule locality" not in message
        (named,) = NAMED.findall(message)
        with make_solver(**options, kv_memory=named) as solver:
            assert solver.solve(engines.PROBLEM).tree_hash == expected.tree_hash


def test_advice_is_never_what_is_in_use_already(make_solver):
    for schedule in ("in-gpu", "layerwise"):
        with make_solver(schedule=schedule, kv_memory=3 * 4096, host_memory="1MiB") as solver:
            with pytest.raises(CapacityError, match="use --schedule locality, raise") as caught:
                solver.solve(engines.PROBLEM)
            assert not re.search("[0-9] bytes", str(caught.value))


# --- a verifier's KV is tiered too -----------------------------------------------------------


@pytest.mark.parametrize("evict", ["host", "recompute"])
def test_the_tree_is_the_same_with_a_verifier(make_solver, verifier_folder, evict):
    dtype = "float64" if evict == "recompute" else "float32"
    build = partial(make_solver, verifier=str(verifier_folder), dtype=dtype, **SCORED)
    base = build(schedule="in-gpu")
    expected, tree = grow(base)
    budget = expected.kv.device_peak_bytes * 3 // 4
    equal = base._machinery.plan.tokens_part
    with build(schedule="locality", evict=evict, kv_memory=budget, split=equal) as s:
        found, other = grow(s)
        verifier = s._machinery.tree_models[1].store
    assert found.tree_hash == expected.tree_hash
    if evict == "host":
        assert verifier.host.ledger.budget.peak_bytes > 0, "the verifier's KV has been written back"
    else:
        assert verifier.counts.recomputed_tokens > 0
    for one, two in zip(tree.nodes(), other.nodes(), strict=True):
        assert one.score == pytest.approx(two.score, abs=1e-6)


# --- the link of a GPU, by streams that stand in for a card's ---------------------------------


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("attention", ["tree", "dense"])
def test_layerwise_over_streams_grows_the_same_tree(
    solver_of, in_gpu, layerwise_peak, monkeypatch, attention, share
):
    budget = int(share * layerwise_peak(attention, "float32"))
    options = {"attention": attention, "schedule": "layerwise", "kv_memory": budget}
    with solver_of(**options) as solver:
        copied, _ = grow(solver)
    monkeypatch.setattr(machinery, "StreamLink", lambda *_, **__: StreamLink(LateStreams()))
    with solver_of(**options) as solver:
        assert isinstance(solver.generator.store, LayeredStore)
        streamed, _ = grow(solver)
        assert solver.generator.store.scratch.used_bytes == 0
    assert streamed.tree_hash == copied.tree_hash == in_gpu(attention, "float32", "layerwise")[0]
    assert (copied.kv.h2d_bytes > 0) is (share < 1.0)
    assert copied.kv.h2d_bytes == streamed.kv.h2d_bytes
    assert copied.kv.d2h_bytes == streamed.kv.d2h_bytes
    assert streamed.kv.device_peak_bytes == copied.kv.device_peak_bytes <= budget
