"""A server of the tiny model."""

from contextlib import ExitStack

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import engines
from served import Served

SEARCH = {"search": "beam", "n": 8, "width": 4, "max_rounds": 4, "max_step_tokens": 12}


@pytest.fixture(scope="session")
def engine(generator_folder):
    """Makes an engine with these settings of the search."""
    return lambda **search: engines.tiny_solver(generator_folder, **search)


@pytest.fixture(scope="module")
def served(engine):
    """A server of the tiny model."""
    with engine(**SEARCH) as solver, Served(solver) as server:
        yield server


@pytest.fixture
def serve(engine):
    """A server of one's own: settings of the search, and of `Served`."""
    with ExitStack() as stack:

        def start(search=None, **options):
            solver = stack.enter_context(engine(**{**SEARCH, **(search or {})}))
            return stack.enter_context(Served(solver, **options))

        yield start
