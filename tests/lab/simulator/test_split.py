"""Memory that moves in simulated searches: never lost, and worth its while."""

import pytest

from beamwright.models.named import NAMED_SHAPES
from beamwright.plan.costs import ModelCosts
from beamwright_lab.simulator.run import simulate
from beamwright_lab.simulator.synthetic import SyntheticSearch, grow
from simulated import CARD, case, longest

MODEL = ModelCosts.of(NAMED_SHAPES["qwen2.5-math-1.5b"], 2)
GENERATE = 256
NAMES = ("qwen2.5-math-1.5b", "math-shepherd-7b")
NEED = 36 * 2**20  # of each model, about
MOVING = ("auto", "roofline", "offload")


pytestmark = pytest.mark.usefixtures("conserved")


@pytest.fixture(scope="module")
def tree():
    return grow(SyntheticSearch(16, 4, 64, GENERATE, 32, step_sigma=0.5, survival="score"))


@pytest.fixture
def run(tree):
    def simulated(total_bytes, split=None, share=0.5, speculation="off"):
        own = int(share * total_bytes)
        given = {"scorer": (MODEL, total_bytes - own, {}), "step": longest(tree), "hardware": CARD}
        given |= {"split": split, "speculation": speculation}
        return simulate(case(budget=own, tree=tree, model=MODEL, **given))

    return simulated


def test_where_everything_fits_nothing_moves(run):
    for split in ("auto", "roofline"):
        found = run(4 * NEED, split)
        assert found.split_moves == found.split_moved_bytes == found.h2d_bytes == 0
    assert run(4 * NEED, "offload").split_moves > 0


@pytest.mark.parametrize("split", MOVING)
@pytest.mark.parametrize("of_need", [0.5, 0.7, 1.0])
def test_moving_memory_takes_no_longer_than_halves(run, conserved, split, of_need):
    total = int(of_need * 2 * NEED)
    found, halves = run(total, split), run(total)
    assert found.verifier_peak_bytes <= total
    assert found.device_peak_bytes <= total
    assert (found.split_moves > 0) == (len(set(conserved)) > 1)
    assert (found.split_moved_bytes > 0) == (found.split_moves > 0)
    if split == "auto":
        assert found.time_s <= 1.01 * halves.time_s


def test_in_turn_is_faster_than_any_share_where_memory_is_short(run):
    total = NEED
    fixed = [run(total, share=share).time_s for share in (0.4, 0.5, 0.6)]
    found = run(total, "auto")
    assert found.time_s < min(fixed)
    assert found.split_moves > 4


@pytest.mark.parametrize("split", MOVING)
@pytest.mark.parametrize("of_need", [0.35, 0.5, 0.7])
def test_what_fits_in_halves_fits_however_memory_moves_with_steps_scored_early(run, split, of_need):
    """Speculation scores steps while others hold the generator's part, and cannot wait for it."""
    total = int(of_need * 2 * NEED)
    run(total, speculation="exact")
    found = run(total, split, speculation="exact")
    assert found.split_moves > 0 or split == "roofline"
    assert found.speculated_tokens >= found.kept_tokens
