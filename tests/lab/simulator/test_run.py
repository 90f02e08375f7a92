from dataclasses import replace

import pytest

from beamwright.errors import CapacityError
from beamwright.plan.costs import Layout, Roofline
from beamwright.sections import ScheduleSettings, StepSettings
from beamwright_lab.simulator.bench import Simulation
from beamwright_lab.simulator.costs import RooflineCosts
from beamwright_lab.simulator.run import simulate, simulate_if_fits
from beamwright_lab.simulator.synthetic import grow
from beamwright_lab.studies.lbs import LbsCase, layerwise_bytes
from simulated import CARD, GIB, MODEL, SEARCH, TREE

KV = 512 * 1024


def case(schedule="locality", layout=Layout.TREE, budget=2 * GIB, machine=CARD, **options):
    return Simulation(
        tree=options.pop("tree", TREE),
        model=MODEL,
        costs=RooflineCosts.of(MODEL, machine, layout),
        kv_budget_bytes=budget,
        schedule=ScheduleSettings(schedule=schedule, **options),
        step=StepSettings(step_tokens=32, max_tokens=256),
    )


def test_when_everything_fits_locality_is_in_gpu():
    everything = simulate(case(budget=8 * GIB))
    assert everything.h2d_bytes == everything.d2h_bytes == everything.stall_s == 0
    assert everything.groups == 8
    assert everything.time_s == simulate(case("in-gpu", budget=8 * GIB)).time_s


def test_decoding_takes_what_the_roofline_says():
    """Best-of-n: nothing is shared but the prompt, so the tokens read can be written down."""
    tree = grow(replace(SEARCH, search="best-of-n", generate_tokens=64))
    simulated = simulate(case("in-gpu", budget=64 * GIB, tree=tree))
    roofline = Roofline(MODEL, CARD)
    expected = roofline.prefill(128)
    for token in range(1, 64):
        read, seen = 128 + 16 * token, 16 * (128 + token)
        expected += roofline.decode_step(16, read, seen)
    assert simulated.time_s == pytest.approx(expected)


def test_what_does_not_fit():
    with pytest.raises(CapacityError):
        simulate(case("in-gpu", budget=GIB // 2))
    assert simulate_if_fits(case("in-gpu", budget=GIB // 2)) is None
    assert simulate_if_fits(case(budget=GIB // 2)) is not None
    assert simulate_if_fits(case(budget=GIB // 8)) is None
    assert simulate_if_fits(case("layerwise", Layout.DENSE, budget=GIB // 8)) is None


@pytest.mark.parametrize("layout", list(Layout))
def test_the_budget_is_kept_and_the_lower_bound_is_one(layout):
    simulated = simulate(case(layout=layout, budget=GIB // 2))
    assert simulated.device_peak_bytes <= GIB // 2
    assert simulated.h2d_bytes >= simulated.dm_lower_bound_bytes
    assert simulated.groups > 8
    assert simulated.time_s == pytest.approx(simulated.decode_s + simulated.stall_s)
    assert simulated.io_share == pytest.approx(simulated.stall_s / simulated.time_s)


def test_prefetch_hides_transfers():
    options = {"layout": Layout.DENSE, "budget": GIB}
    ahead, behind = simulate(case(**options)), simulate(case(**options, prefetch=False))
    assert ahead.stall_s < behind.stall_s


def test_layer_wise_moves_what_the_equations_say():
    """Eq. 1-3 count all layers that do not fit; two stream buffers displace two layers more."""
    simulated = simulate(case("layerwise", Layout.DENSE, budget=GIB))
    equations = LbsCase(32, KV, 16, 128, 256, 32, GIB)
    buffers = 2 * 256 * 16 * (128 + 128) * KV // 32
    assert simulated.h2d_bytes == pytest.approx(layerwise_bytes(equations) + buffers, rel=0.05)
    assert simulated.io_share > 0.5


def test_recomputing_moves_nothing():
    simulated = simulate(case(budget=GIB // 2, evict="recompute"))
    assert simulated.h2d_bytes == simulated.d2h_bytes == 0
    assert simulated.recomputed_tokens > 0
