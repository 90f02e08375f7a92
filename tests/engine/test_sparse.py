"""Whole searches that decode sparsely: everything selected is `tree`, and no schedule matters."""

import pytest

from beamwright.config import Settings
from beamwright.errors import CapacityError, InputError
from beamwright.saved.checkpoint import resumed_settings
from engines import assert_nothing_allocated, exact_dtype
from tables import beside

PROBLEMS = [
    (i, f"Ann has {i + 3} apples. She eats {i % 3} and buys as many again.") for i in range(2)
]
SMALL = {"search": "beam", "n": 6, "width": 3, "max_rounds": 3, "max_step_tokens": 12}
FEW = {"select": 24, "sparse_from": 0}
HOME = {"sparse_home": "host", "kv_memory": "60KiB", "host_memory": "16MiB"}


@pytest.fixture
def trees(make_solver):
    """Hashes of both problems' trees."""

    def find(in_flight=2, **options):
        with make_solver(**SMALL, dtype=exact_dtype(), **options) as solver:
            found = dict(solver.solve_many(PROBLEMS, in_flight=in_flight))
            assert_nothing_allocated(solver)
        return {name: each.tree_hash for name, each in found.items()}

    return find


def test_with_everything_selected_the_tree_is_the_same(trees):
    full = trees()
    assert trees(sparse="ahead", select=10_000, sparse_from=0) == full
    assert trees(sparse="asyncspade", select=24) == full, "no path is that long"
    assert trees(sparse="exact", select="all") == full


TIGHT = {"kv_memory": "160KiB", "schedule": "locality", "host_memory": "16MiB"}
ROWS = {"max_batch": 3, "speculation": "exact", "executor": "overlapped"}
AT_HOME = {**HOME, "kv_memory": "600KiB"}


@pytest.mark.parametrize(
    ("method", "how", "ways"),
    [
        ("exact", {"select": "1/4"}, [TIGHT, AT_HOME]),  # rows that select differently many
        ("exact", {"sparse_layers": 1}, [ROWS]),
        ("pages,share=2,each=query", {}, [ROWS]),
        ("quest", {"select": "1/4", "sparse_from": 30}, [TIGHT]),
        ("ahead-pages,share=2", {}, [AT_HOME]),
        ("asyncspade", {"sparse_correct": 0.5}, [ROWS]),
        ("asyncspade-ridge", {}, [TIGHT]),
        pytest.param(
            *("asyncspade,pack=2,window=path", {}, [ROWS, AT_HOME]), marks=pytest.mark.nightly
        ),
    ],
)
def test_the_tree_does_not_depend_on_the_schedule(trees, method, how, ways):
    """Nor on where KV is at home: on the host a thread finds what is selected."""
    options = {"sparse": method, **FEW, **how}
    expected = trees(in_flight=1, **options)
    for way in ways:
        assert trees(**way, **options) == expected


def test_the_verifiers_kv_leaves_where_the_generators_is_at_home(make_solver):
    """Else a search would end that has room enough if it decodes with all."""
    options = {"sparse": "exact", "sparse_home": "host", **FEW, **SMALL, "n": 15}
    options |= {"verifier": "likelihood:bundled", "dtype": exact_dtype(), "host_memory": "16MiB"}
    with make_solver(**options) as solver:
        expected = solver.solve(PROBLEMS[0][1])
    with make_solver(**options, kv_memory="300KiB") as solver:
        found = solver.solve(PROBLEMS[0][1])
        assert solver.verifier.tree_model.store.counts.evicted_blocks
        with pytest.raises(CapacityError, match=r"--kv-memory to \d+[KM]iB, which holds any path"):
            solver.solve(PROBLEMS[0][1], max_rounds=60, max_tokens=200)
    assert found.tree_hash == expected.tree_hash


def test_a_window_goes_on_where_it_is_asked_to(trees):
    """With it the second step is predicted from the first one's queries."""
    begins, goes_on = (trees(sparse=f"asyncspade,window={how}", **FEW) for how in ("step", "path"))
    assert begins == trees(sparse="asyncspade,pack=3", **FEW), "packs change nothing"
    assert begins != goes_on


def test_a_resumed_tree_is_not_the_one_that_it_would_have_been(make_solver, tmp_path):
    """What its paths hold is computed again, by full attention."""
    file = tmp_path / "search.json"
    with make_solver(**SMALL, sparse="exact", **FEW, dtype=exact_dtype()) as solver:
        assert solver.solve(PROBLEMS[0][1], checkpoint=file).exact
        assert not solver.resume(file).exact
    with make_solver(**SMALL, dtype=exact_dtype()) as solver:
        assert solver.solve(PROBLEMS[0][1], checkpoint=file).exact
        assert solver.resume(file).exact


def test_only_what_is_selected_crosses_the_link(make_solver):
    with make_solver(**SMALL, sparse="ahead", **FEW, **HOME) as solver:
        solution = solver.solve(PROBLEMS[0][1])
        kept = solver.generator.store
        again = solver.solve(PROBLEMS[0][1])
    assert 0 < solution.kv.device_peak_bytes <= 60 * 1024
    assert solution.kv.host_peak_bytes > 0
    assert solution.kv.d2h_bytes > 0
    per_token = kept.pool.layout.bytes_per_token
    selected = solution.sparse.tokens * solution.sparse.selected_mean * per_token
    assert 0 < solution.kv.h2d_bytes < selected, "once for all rows, and what stays does not"
    assert again.tree_hash == solution.tree_hash


def test_a_solution_says_what_was_read(make_solver):
    with make_solver(**SMALL) as solver:
        assert solver.solve(PROBLEMS[0][1]).to_json()["sparse"] is None
    with make_solver(**SMALL, sparse="exact", **FEW) as solver:
        found = solver.solve(PROBLEMS[0][1]).to_json()["sparse"]
        again = solver.solve(PROBLEMS[0][1]).to_json()["sparse"]
    assert found == again, "each problem counts its own"
    assert found["method"] == "exact"
    assert found["selected_mean"] == 24 < found["visible_mean"]
    assert 0 < found["left_out_mean"] < 1
    assert found["corrections"] == 0


MISTAKES = beside(__file__)


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row["words"])
def test_what_cannot_be_meant_is_one_line(make_solver, row):
    with pytest.raises(InputError) as caught:
        make_solver(**row["options"])
    assert row["words"] in str(caught.value)
    assert "\n" not in str(caught.value)


LONGER = {"search": "best-of-n", "n": 2, "max_rounds": 12, "step_tokens": 24, "select": 32}


def test_auto_is_settled_for_good_and_says_why(make_solver, tmp_path):
    """Where a path outgrows the device it selects; nobody who goes on needs that budget."""
    tight = {"kv_memory": "20KiB", "host_memory": "16MiB", "link_bandwidth": "4MiB/s"}
    options, file = {**LONGER, "dtype": exact_dtype()}, tmp_path / "search.json"
    with make_solver(sparse="auto", **tight, **options) as solver:
        assert solver.settings.sparse.sparse == "exact", solver._machinery.why_sparse
        assert solver.settings.sparse.sparse_home == "host"
        found = solver.solve(PROBLEMS[0][1], checkpoint=file)
        assert_nothing_allocated(solver)
    assert (found.sparse.method, found.to_json()["sparse"]["why"]) == ("exact", found.sparse.why)
    assert "fit" in found.sparse.why or "s with all" in found.sparse.why
    assert 0 < found.sparse.left_out_mean < 1
    assert "of attention not read (" in found.sparse.line()
    kept = found.receipt["settings"]
    assert (kept["sparse"], kept["select"], kept["sparse_from"]) == ("exact", 32, 0)
    named = {name: kept[name] for name in ("sparse", "select", "sparse_from")}
    with make_solver(**{**options, **named}) as solver:
        assert solver.solve(PROBLEMS[0][1]).tree_hash == found.tree_hash
    assert resumed_settings(file, Settings.build(sparse="auto")).sparse.sparse == "exact"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "s with all tokens (in-gpu)"),
        ({"select": "all"}, "--select"),
        ({"schedule": "locality"}, "--schedule locality"),
        ({"evict": "recompute"}, "--evict recompute"),
        ({"kv_dtype": "int8"}, "--kv-dtype int8"),
        ({"attention": "dense"}, "needs --attention tree"),
    ],
    ids=lambda each: each if isinstance(each, str) else "-".join(each) or "fits",
)
def test_auto_is_off_for_a_reason_and_then_changes_nothing(make_solver, options, why):
    small = {**SMALL, "select": 32, "dtype": exact_dtype(), **options}
    with make_solver(sparse="auto", **small) as solver:
        found = solver.solve(PROBLEMS[0][1])
    assert found.sparse.method == "off"
    assert why in found.sparse.why
    assert found.sparse.left_out_mean is None
    small = {name: value for name, value in small.items() if name != "select"}
    with make_solver(**small) as solver:
        plain = solver.solve(PROBLEMS[0][1])
    assert plain.tree_hash == found.tree_hash
    assert plain.sparse is None
