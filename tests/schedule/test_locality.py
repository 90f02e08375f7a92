from dataclasses import replace

import pytest

from beamwright.errors import InputError
from beamwright.protocols import Plan, ScheduleView
from beamwright.schedule import SCHEDULES, make_schedule
from beamwright.schedule.declare import batched_plan
from beamwright.sections import ScheduleSettings
from beamwright.tree import NodeState
from fakes import new_tree
from schedule.forests import demand_of

SURVIVORS = ["a", "b", "c"]  # each with two children: six beams


@pytest.fixture
def beams():
    tree = new_tree()
    survivors = tree.expand(tree.root, 3)
    found = []
    for node in survivors:
        node.state = NodeState.KEPT
        found += tree.expand(node, 2)
    return tuple(found)


def demand(**options):
    paths = ["p" + name for name in SURVIVORS for _ in range(2)]
    return demand_of(paths, growth=5, **options)


def numbers(plan, beams):
    return [[beams.index(node) for node in group] for group in plan.groups]


def run(beams, kv, **settings):
    plan = make_schedule(ScheduleSettings(**settings)).plan(ScheduleView(beams, kv))
    return numbers(plan, beams), plan.write_back


@pytest.mark.parametrize("name", ["locality", "auto"])
def test_everything_that_fits_is_one_group_in_depth_first_order(beams, name):
    schedule = make_schedule(ScheduleSettings(schedule=name))
    assert schedule.name == "locality"
    assert schedule.plan(ScheduleView(beams, demand())) == Plan((beams,))


def test_without_a_demand_it_is_in_gpu(beams):
    for max_batch in (None, 4):
        view = ScheduleView(beams)
        schedule = make_schedule(ScheduleSettings(max_batch=max_batch))
        assert schedule.plan(view) == batched_plan(view, max_batch)


@pytest.mark.parametrize(
    ("settings", "options", "groups"),
    [
        *(
            ({"planner": planner, "inter_beam": siblings}, {"capacity": 50, "copies": True}, groups)
            for planner in ("ranges", "greedy")
            for siblings, groups in (
                (True, [[0, 1], [2, 3], [4, 5]]),
                (False, [[0, 2], [1, 4], [3, 5]]),
            )
        ),
        ({"planner": "ranges"}, {"capacity": 60}, [[0, 1, 2], [3, 4, 5]]),
        ({"planner": "greedy"}, {"capacity": 60}, [[0, 1], [2, 3], [4, 5]]),
        ({"balance": False}, {"capacity": 100, "copies": True}, [[0, 1, 2, 3], [4, 5]]),
        ({"balance": True}, {"capacity": 100, "copies": True}, [[0, 1, 2], [3, 4, 5]]),
        ({"max_batch": 4}, {}, [[0, 1, 2], [3, 4, 5]]),
        ({"max_batch": 4, "balance": False}, {}, [[0, 1, 2, 3], [4, 5]]),
    ],
    ids=str,
)
def test_groups_follow_the_settings(beams, settings, options, groups):
    """Siblings stay together, but without locality; planners differ where beams share."""
    assert run(beams, demand(**options), **settings) == (groups, bool(options))


def test_write_back_begins_when_the_next_round_is_not_expected_to_fit(beams):
    need = 40 + 30
    assert run(beams, demand(capacity=need))[1] is False
    assert run(beams, demand(capacity=need - 1))[1] is True
    kv = demand(capacity=100)
    for previous, outgrows in ((None, False), (40, False), (39, True), (70, False), (90, False)):
        groups, write_back = run(beams, replace(kv, previous_need_bytes=previous))
        assert (len(groups), write_back) == (1, outgrows)


@pytest.mark.parametrize(
    ("how", "capacity", "eager"),
    [("auto", 47, False), ("auto", 46, True), ("lazy", 20, False), ("eager", 69, True)],
)
def test_new_kv_is_written_back_early_where_most_of_it_has_to_go(beams, how, capacity, eager):
    """The beams need 70."""
    policy = make_schedule(ScheduleSettings(write_back=how, batching="grouped"))
    assert policy.plan(ScheduleView(beams, demand(capacity=capacity))).eager is eager
    copies = demand(capacity=capacity, copies=True)
    assert policy.plan(ScheduleView(beams, copies)).eager is (how != "lazy")


def test_no_beams_are_no_groups():
    for kv in (None, demand_of([])):
        assert make_schedule(ScheduleSettings()).plan(ScheduleView((), kv)) == Plan(())


@pytest.mark.parametrize("name", ["in-gpu", "layerwise"])
def test_one_group_whatever_the_demand_or_ranges_of_at_most_max_batch(beams, name):
    schedule = make_schedule(ScheduleSettings(schedule=name))
    assert schedule.name == name
    assert schedule.plan(ScheduleView(beams, demand(capacity=20))) == Plan((beams,))
    assert schedule.plan(ScheduleView(())) == Plan(())
    capped = make_schedule(ScheduleSettings(schedule=name, max_batch=4))
    assert capped.plan(ScheduleView(beams)) == Plan((beams[:4], beams[4:]))


def test_the_lab_s_baseline_is_refused_by_name_where_the_lab_is_not(monkeypatch):
    monkeypatch.delitem(SCHEDULES, "layerwise")
    message = "^--schedule layerwise: needs the lab. Run pip install -e lab$"
    with pytest.raises(InputError, match=message):
        make_schedule(ScheduleSettings(schedule="layerwise"))
