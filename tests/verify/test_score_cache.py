"""Scores that were computed before are found, bit for bit, whatever is scored below them."""

import shutil

import pytest

from beamwright.errors import InputError
from beamwright.verify.score_cache import ScoreCache, digest
from engines import PROBLEM, exact_dtype, grow

OPTIONS = {"n": 8, "width": 2, "max_rounds": 3}
ZEROS = b"\0" * 16


def keys(count):
    return [digest(bytes([number])) for number in range(count)]


def scores_of(tree):
    return [(node.lineage, node.step_score) for node in tree.nodes()]


@pytest.fixture
def with_prm(make_solver, verifier_folder):
    if exact_dtype() != "float32":
        pytest.skip("no scores are kept on this CPU")

    def make(**changes):
        return make_solver(verifier=str(verifier_folder), **{**OPTIONS, **changes})

    return make


# --- the cache -------------------------------------------------------------------------------


def test_what_was_asked_for_longest_ago_goes_first():
    cache = ScoreCache(ZEROS, most_entries=2)
    a, b, c = keys(3)
    cache.put(a, 0.25)
    cache.put(b, 0.5)
    assert cache.get(a) == 0.25
    cache.put(c, 0.75)
    assert (cache.get(a), cache.get(b), cache.get(c), len(cache)) == (0.25, None, 0.75, 2)
    cache.put(b, float("nan"))
    assert cache.get(b) is None


def test_a_file_holds_what_two_have_written(tmp_path):
    file = tmp_path / "scores"
    a, b, c = keys(3)
    one, two = ScoreCache(ZEROS, file), ScoreCache(ZEROS, file)
    one.put(a, 1 / 3)
    one.save()
    two.put(b, -0.0)
    two.save()
    both = ScoreCache(ZEROS, file)
    assert (both.get(a), str(both.get(b)), both.get(c)) == (1 / 3, "-0.0", None)
    before = file.stat().st_mtime_ns
    both.save()
    assert file.stat().st_mtime_ns == before, "nothing is new"


@pytest.mark.parametrize("harm", ["flip", "cut", "longer", "other", "folder", "nowhere"])
def test_a_damaged_file_is_one_line(tmp_path, harm):
    file = tmp_path / "scores"
    cache = ScoreCache(ZEROS, file)
    for key in keys(4):
        cache.put(key, 0.5)
    cache.save()
    content = bytearray(file.read_bytes())
    if harm == "flip":
        content[-1] ^= 1
    file.write_bytes(
        {"cut": content[:-24], "longer": content + b"\0" * 24, "other": b"{}"}.get(harm, content)
    )
    place = {"folder": tmp_path, "nowhere": tmp_path / "no" / "scores"}.get(harm, file)
    with pytest.raises(InputError) as caught:
        ScoreCache(ZEROS, place)
    assert str(caught.value).startswith(f"--score-cache {place}: ")
    assert "\n" not in str(caught.value)


# --- searches --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_repeated_run_prefills_nothing(with_prm, tmp_path, where):
    plain, tree = grow(with_prm())
    named = "memory" if where == "memory" else tmp_path / "scores"
    with with_prm(score_cache=named) as solver:
        first, _ = grow(solver)
        repeated, _ = grow(solver)
    if where == "file":
        with with_prm(score_cache=named) as solver:
            repeated, _ = grow(solver)
            solver.verifier.tree_model.store.check()
    assert first.tree_hash == repeated.tree_hash == plain.tree_hash
    assert scores_of(first.tree) == scores_of(repeated.tree) == scores_of(tree)
    assert first.tokens.verifier_prefilled == plain.tokens.verifier_prefilled
    assert (first.cache.scores.found, repeated.cache.scores.computed) == (0, 0)
    assert repeated.cache.scores.found == first.cache.scores.computed > 0
    assert repeated.tokens.verifier_prefilled == repeated.cache.verifier.needed_tokens == 0
    assert plain.cache.scores is None
    assert not repeated.warnings or not any("--score-cache" in w for w in repeated.warnings)


@pytest.mark.parametrize("executor", ["plain", "overlapped"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.9])
def test_what_is_scored_below_a_known_step_is_the_same_bits(with_prm, kept, executor):
    """Some scores are forgotten: KV of known steps above them is computed when it is read."""
    plain, tree = grow(with_prm())
    with with_prm(score_cache="memory", executor=executor) as solver:
        solver.solve(PROBLEM)
        known = solver._scores._scores
        for place, key in enumerate(list(known)):
            if place % 10 >= 10 * kept:
                del known[key]
        again = solver.solve(PROBLEM)
        assert again.tree_hash == plain.tree_hash
        assert scores_of(again.tree) == scores_of(tree)
        assert (again.cache.scores.found > 0) == (kept > 0)
        assert again.tokens.verifier_prefilled <= plain.tokens.verifier_prefilled
        solver.verifier.tree_model.store.check()
        assert solver.verifier.tree_model.store.num_segments == 0


def test_with_little_memory(with_prm):
    plain, tree = grow(with_prm())
    tight = {"kv_memory": plain.kv.device_peak_bytes // 2, "host_memory": "8MiB"}
    with with_prm(score_cache="memory", **tight) as solver:
        grow(solver)
        for key in list(solver._scores._scores)[::3]:
            del solver._scores._scores[key]
        again, _ = grow(solver)
    assert again.cache.verifier.evicted_blocks + again.cache.generator.evicted_blocks > 0
    assert (again.tree_hash, scores_of(again.tree)) == (plain.tree_hash, scores_of(tree))


def test_another_verifier_or_problem_finds_nothing(make_solver, verifier_folder, tmp_path):
    file, folder = tmp_path / "scores", tmp_path / "verifier"
    shutil.copytree(verifier_folder, folder)
    options = {**OPTIONS, "verifier": str(folder), "score_cache": file}
    with make_solver(**options) as solver:
        solver.solve(PROBLEM)
        assert solver.solve(PROBLEM + " Why?").cache.scores.found == 0
    with make_solver(**options) as solver:
        assert solver.solve(PROBLEM).cache.scores.computed == 0
    (folder / "note.txt").write_text("trained further")
    with make_solver(**options) as solver:
        assert solver.solve(PROBLEM).cache.scores.found == 0


def test_a_search_that_is_resumed_finds_its_scores(with_prm, tmp_path):
    file = tmp_path / "search.json"
    with with_prm(score_cache="memory") as solver:
        whole = solver.solve(PROBLEM, checkpoint=file)
        reports = []

        def keep(report):
            if len(reports) == 1:
                shutil.copy(file, tmp_path / "early.json")
            reports.append(report)

        solver.solve(PROBLEM, checkpoint=file, on_round=keep)
        again = solver.resume(tmp_path / "early.json")
    assert again.tree_hash == whole.tree_hash
    assert again.cache.scores.computed == 0 < again.cache.scores.found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_where_scores_depend_on_the_batch_none_are_kept(with_prm, monkeypatch, dtype):
    """Products of float64 do, though no small batch may show it."""
    if dtype == "float32":
        monkeypatch.setattr("beamwright.solver.solver.batches_are_exact", lambda *kind: False)
    solution, _ = grow(with_prm(score_cache="memory", dtype=dtype))
    assert solution.cache.scores is None
    assert [line for line in solution.warnings if line.startswith("--score-cache: not used")]


def test_only_reward_models_have_scores_to_keep(make_solver, with_prm, tmp_path):
    with pytest.raises(InputError, match="--score-cache memory: needs a process reward model"):
        make_solver(verifier="logprob", score_cache="memory")
    file = tmp_path / "scores"
    file.write_text("{}")
    with pytest.raises(InputError, match="is no score cache"):
        with_prm(score_cache=file)
