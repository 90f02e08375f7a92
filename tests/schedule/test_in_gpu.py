import pytest

from beamwright.protocols import Plan, ScheduleView
from beamwright.schedule import make_schedule
from beamwright.sections import ScheduleSettings
from fakes import new_tree


@pytest.fixture
def view():
    tree = new_tree()
    return ScheduleView(tuple(tree.expand(tree.root, 7)))


def test_everything_is_one_group(view):
    schedule = make_schedule(ScheduleSettings(schedule="in-gpu"))
    assert schedule.plan(view) == Plan((view.beams,))
    assert schedule.name == "in-gpu"


def test_groups_are_contiguous_ranges_of_at_most_max_batch(view):
    plan = make_schedule(ScheduleSettings(schedule="in-gpu", max_batch=3)).plan(view)
    assert [len(group) for group in plan.groups] == [3, 3, 1]
    assert tuple(node for group in plan.groups for node in group) == view.beams


def test_no_beams_are_no_groups():
    assert make_schedule(ScheduleSettings(schedule="in-gpu")).plan(ScheduleView(())) == Plan(())
