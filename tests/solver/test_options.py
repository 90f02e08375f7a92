import runpy
from pathlib import Path
from typing import get_type_hints

from beamwright.config import Settings
from beamwright.registry import declared_options
from beamwright.solver import options
from beamwright.solver.options import ProblemOptions, RequestOptions, SolverOptions

SECTIONS = {name: info.annotation for name, info in Settings.model_fields.items()}
MAKE_STUBS = Path(__file__).parents[2] / ".ci" / "make_stubs"


def names_of(*sections):
    fields = {name for each in sections for name in SECTIONS[each].model_fields}
    return fields | {name for name, owner in declared_options().items() if owner in sections}


def test_type_checkers_read_what_the_settings_say():
    """`make stubs` writes it again."""
    stub = runpy.run_path(str(MAKE_STUBS))["stub"]()
    assert Path(options.__file__).with_suffix(".pyi").read_text() == stub


def test_the_options_are_the_settings_and_what_built_in_parts_declare():
    assert set(SolverOptions.__annotations__) == {*names_of(*SECTIONS), "stop"}
    assert set(ProblemOptions.__annotations__) == set(RequestOptions.__annotations__) | {"priority"}


def test_what_a_request_may_have_of_its_own_is_not_of_models_memory_or_schedule():
    own = {*names_of("sampling", "step", "search", "stop"), "stop"}
    assert set(RequestOptions.__annotations__) == own
    assert not own & names_of("model", "memory", "schedule", "sparse")


def test_parsed_options_have_the_types_that_their_parsers_take():
    types = {name: kind for name, (kind, _) in options.option_fields([*SECTIONS]).items()}
    assert types["kv_memory"] == int | str | None
    assert types["deadline"] == float | str | None
    assert options.ScoreFunction in get_type_hints(SolverOptions)["verifier"].__args__
