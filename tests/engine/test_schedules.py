"""Every declared schedule, with every option that it has: the tree is the same."""

import pytest

from beamwright.errors import InputError
from beamwright.protocols import Plan
from beamwright.registry import option
from beamwright.schedule import SCHEDULES, Schedule, make_schedule, schedule
from beamwright.sections import ScheduleSettings
from declared import restored, value_of
from engines import PROBLEM

SMALL = {"n": 6, "width": 2, "max_rounds": 3, "dtype": "float64"}
SETTINGS = ({}, {"max_batch": 2}, {"inter_beam": False, "prefetch": False}, {"planner": "greedy"})


def options_of(name):
    """Options to try one after another: what all schedules are told, and each of its own."""
    own, ignored = SCHEDULES[name].options, SCHEDULES[name].idle
    return [
        *({key: each[key] for key in each if key not in ignored} for each in SETTINGS),
        *({option: value_of(info)} for option, info in own.items()),
    ]


@pytest.fixture
def chunks():
    """A schedule with an option, as a plugin declares one."""
    with restored():

        @schedule("chunks", meaning="so many beams at a time")
        class Chunks(Schedule):
            chunk: int = option(2, ge=1, le=9, help="Beams of a group.")

            def plan(self, view):
                beams = view.beams
                starts = range(0, len(beams), self.chunk)
                return Plan(tuple(beams[start : start + self.chunk] for start in starts))

        yield Chunks


def assert_same_tree(make_solver, name):
    with make_solver(**SMALL) as solver:
        expected = solver.solve(PROBLEM)
    for options in options_of(name):
        with make_solver(**{**SMALL, "schedule": name, **options}) as solver:
            found = solver.solve(PROBLEM)
        assert found.tree_hash == expected.tree_hash, options


def test_a_declared_schedule_goes_by_its_name(make_solver, chunks):
    assert {"chunk": 5} in options_of("chunks")
    assert_same_tree(make_solver, "chunks")
    found = make_solver(**SMALL, schedule="chunks", chunk=4)
    assert (found.schedule.name, found.schedule.chunk) == ("chunks", 4)
    assert found.solve(PROBLEM).schedule == "chunks"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "locality", "chunk": 3}, "--chunk is no option of --schedule locality"),
        ({"schedule": "chunks", "chunk": 0}, "schedule.chunk .--chunk.: "),
        ({"schedule": "chunks", "chonk": 1}, "'schedule.chonk': did you mean chunk"),
        ({"schedule": "chunk"}, "did you mean chunks"),
    ],
)
def test_what_does_not_fit_is_one_line(chunks, options, words):
    with pytest.raises(InputError, match=words):
        make_schedule(ScheduleSettings.model_validate(options))


def test_a_name_and_a_setting_are_taken_once(chunks):
    with pytest.raises(InputError, match="--schedule locality is declared twice"):
        schedule("locality", meaning="another")(chunks)
    with pytest.raises(InputError, match="--prefetch is a setting of its own"):

        @schedule("other", meaning="takes a setting")
        class Other(Schedule):
            prefetch: bool = option(False, help="Taken.")
