"""A cluster on paper, against what can be said without simulating."""

import random
from dataclasses import replace

import pytest

from beamwright.errors import InputError
from beamwright_lab.simulator.cluster import (
    Driver,
    Failures,
    SimulatedReplicas,
    saturating_count,
    simulate_cluster,
)


def drawn(count, seed=0):
    source = random.Random(seed)
    return [source.lognormvariate(0, 1) for _ in range(count)]


@pytest.mark.parametrize("held", [1, 2, 7])
def test_one_replica_does_all_its_work(held):
    work_s = drawn(50)
    run = simulate_cluster(work_s, SimulatedReplicas(1, held))
    assert run.seconds == pytest.approx(sum(work_s))
    assert run.efficiency == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_lists_are_within_twice_of_the_best(seed):
    """Graham: work that is taken ends by its mean load and its longest piece."""
    work_s = drawn(200, seed)
    run = simulate_cluster(work_s, SimulatedReplicas(16, held=1))
    best = max(sum(work_s) / 16, *work_s)
    assert best <= run.seconds <= sum(work_s) / 16 + (1 - 1 / 16) * max(work_s) <= 2 * best


def test_the_driver_is_the_limit():
    driver = Driver(take_s=0.01, judge_s=0.03, write_s=0.01)
    run = simulate_cluster([1.0] * 2000, SimulatedReplicas(40, held=4), driver)
    assert run.seconds == pytest.approx(2000 * 0.05, rel=0.02)
    assert run.driver_share == pytest.approx(1.0, rel=0.02)
    assert saturating_count(1.0, driver.result_s) == pytest.approx(20)
    below = simulate_cluster([1.0] * 2000, SimulatedReplicas(10, held=4), driver)
    assert below.efficiency > 0.97
    assert below.driver_share == pytest.approx(0.5, rel=0.03)


def test_the_idle_take_what_others_have_not_begun():
    work_s = [1.0] * 6 + [9.0] + [1.0] * 9
    kept = simulate_cluster(work_s, SimulatedReplicas(4, held=4, give_back=False))
    back = simulate_cluster(work_s, SimulatedReplicas(4, held=4))
    assert kept.given_back == 0 < back.given_back
    assert back.seconds == pytest.approx(10.0)
    assert kept.seconds == pytest.approx(12.0)


@pytest.mark.parametrize("give_back", [False, True])
def test_every_problem_once_whatever_dies(give_back):
    replicas = SimulatedReplicas(
        8, 4, speeds=(1.0, 0.6, 0.45), start_s=5, message_s=0.01, give_back=give_back
    )
    work_s = drawn(400)
    calm = simulate_cluster(work_s, replicas, Driver(0.01))
    failures = Failures(replica_s=60, node_s=120, node_size=4, again_s=10)
    run = simulate_cluster(work_s, replicas, Driver(0.01), failures, seed=1)
    assert run.problems == 400
    assert run.deaths > 0 < run.again
    assert run.lost_s > 0
    assert run.seconds > calm.seconds
    assert run.most_deaths >= 1
    assert run == simulate_cluster(work_s, replicas, Driver(0.01), failures, seed=1)


def test_what_means_nothing_is_refused():
    for wrong in ({"count": 0}, {"held": 0}, {"speeds": ()}, {"speeds": (0.0,)}):
        with pytest.raises(InputError):
            replace(SimulatedReplicas(1, 1), **wrong)
    for wrong in ([], [0.0]):
        with pytest.raises(InputError):
            simulate_cluster(wrong, SimulatedReplicas(1, 1))
