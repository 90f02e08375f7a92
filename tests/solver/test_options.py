import ast
import inspect
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from beamwright import Solver, config
from beamwright.config import (
    MemorySettings,
    ModelSettings,
    ScheduleSettings,
    Settings,
    SparseSettings,
)
from beamwright.protocols import SchedulePolicy, Verifier
from beamwright.registry import declared_options, declared_rows
from beamwright.runtime.limits import StopFunction
from beamwright.schedule import SCHEDULES
from beamwright.solver import options as solver_options
from beamwright.solver.options import RequestOptions, SolverOptions
from beamwright.verify import ScoreFunction

SECTIONS = [info.annotation for info in Settings.model_fields.values()]

# What the parsers of the settings take.
WIDER = {
    config.Size: int | str | None,
    config.Rate: int | str | None,
    config.Duration: float | str | None,
    config.StepLimits: Sequence[int] | str | None,
    config.StopStrings: Sequence[str] | str,
    config.Split: Literal["auto", "roofline", "offload"] | float,
    config.Select: int | float | str,
    config.Names: Sequence[str | StopFunction] | str | None,
    config.Text: str | PathLike[str],
    config.TextOrNone: str | PathLike[str] | None,
}


def parts(kind):
    """The members of a union, whichever way it was written."""
    if get_origin(kind) in (Union, UnionType):
        return {each for member in get_args(kind) for each in parts(member)}
    return {kind}


def settings_types():
    found = {}
    for section in SECTIONS:
        hints = get_type_hints(section, include_extras=True)
        for name in section.model_fields:
            found[name] = parts(WIDER.get(hints[name], hints[name]))
    found["verifier"] |= {ScoreFunction, Verifier}  # objects of the user's own
    found["schedule"] |= {SchedulePolicy}
    found["stop"] |= {StopFunction}
    return found


def declared_types():
    found = {}
    for name in set(declared_options()) - set(settings_types()):
        kinds = [parts(get_type_hints(row.make)[name]) for row in declared_rows(name)]
        found[name] = set.union(*kinds, {NoneType})
    return found


def test_the_options_are_those_of_the_settings_and_of_the_strategies():
    found = {name: parts(kind) for name, kind in get_type_hints(SolverOptions).items()}
    assert found == {**settings_types(), **declared_types()}


def test_every_option_is_explained():
    tables = [
        each
        for each in ast.parse(Path(solver_options.__file__).read_text()).body
        if isinstance(each, ast.ClassDef)
    ]
    assert len(tables) == 3
    for table in tables:
        for option, words in zip(table.body[1::2], table.body[2::2], strict=True):
            assert isinstance(option, ast.AnnAssign), ast.dump(option)
            assert isinstance(words.value.value, str), option.target.id


def test_what_a_request_may_have_of_its_own_is_not_of_models_memory_or_schedule():
    own = get_type_hints(RequestOptions)
    shared = {
        name
        for section in (ModelSettings, MemorySettings, ScheduleSettings, SparseSettings)
        for name in section.model_fields
    }
    shared |= {name for row in SCHEDULES.values() for name in row.options}
    assert not shared & set(own)
    assert shared | set(own) == set(get_type_hints(SolverOptions))


def test_the_signature_shows_every_option_with_its_default():
    parameters = inspect.signature(Solver).parameters
    for section in SECTIONS:
        for name, field in section.model_fields.items():
            assert parameters[name].default == field.default
    assert [*parameters][:3] == ["settings", "timeline", "progress"]
    assert [*parameters][-1] == "options"
    assert set(get_type_hints(SolverOptions)) < set(parameters)
