"""A schedule that is declared: it goes by its name, with its options; the tree is the same."""

import pytest

from beamwright.errors import InputError
from beamwright.protocols import Plan
from beamwright.registry import option
from beamwright.schedule import Schedule, make_schedule, schedule
from beamwright.sections import ScheduleSettings
from declared import restored
from engines import PROBLEM

SMALL = {"n": 6, "width": 2, "max_rounds": 3, "dtype": "float64"}


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


def test_a_declared_schedule_goes_by_its_name(make_solver, chunks):
    expected = make_solver(**SMALL).solve(PROBLEM)
    for chunk in (2, 5):
        with make_solver(**SMALL, schedule="chunks", chunk=chunk) as solver:
            assert (solver.schedule.name, solver.schedule.chunk) == ("chunks", chunk)
            found = solver.solve(PROBLEM)
        assert (found.schedule, found.tree_hash) == ("chunks", expected.tree_hash)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "locality", "chunk": 3}, "--chunk is not an option of --schedule locality"),
        ({"schedule": "chunks", "chunk": 0}, "--chunk: must be at least 1"),
        ({"schedule": "chunks", "chonk": 1}, "'schedule.chonk'. Did you mean chunk"),
        ({"schedule": "chunk"}, "Did you mean chunks"),
    ],
)
def test_what_does_not_fit_is_one_line(chunks, options, words):
    with pytest.raises(InputError, match=words):
        make_schedule(ScheduleSettings.model_validate(options))
