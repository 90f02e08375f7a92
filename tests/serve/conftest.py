import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import engines
from served import Served

SEARCH = {"search": "beam", "n": 8, "width": 4, "max_rounds": 4, "max_step_tokens": 12}


@pytest.fixture(scope="module")
def served(generator_folder):
    """A server of the tiny model."""
    with engines.tiny_solver(generator_folder, **SEARCH) as solver, Served(solver) as server:
        yield server


@pytest.fixture
def serve(generator_folder):
    """A server of one's own: settings of the search, and of `Served`."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(search=None, **options):
            settings = {**SEARCH, **(search or {})}
            solver = stack.enter_context(engines.tiny_solver(generator_folder, **settings))
            return stack.enter_context(Served(solver, **options))

        yield start
