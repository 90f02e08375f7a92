"""A server of the tiny model: over one Solver or, with `--replicas N`, over so many replicas."""

from contextlib import ExitStack

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import engines
from served import Served

SEARCH = {"search": "beam", "n": 8, "width": 4, "max_rounds": 4, "max_step_tokens": 12}
OF_ONE_PROCESS = {
    "test_a_thread_that_dies_leaves_nobody_waiting_and_another_takes_over",
    "test_what_went_wrong_is_logged_with_the_request_s_id",
    "test_a_thread_that_cannot_start_fails_that_request_alone",
    "test_who_waits_when_the_server_ends_may_ask_again",
}
"""They break or hold the one thread that searches; with replicas there is no such thread here."""


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--replicas"):
        return
    for item in items:
        if item.originalname in OF_ONE_PROCESS:
            item.add_marker(pytest.mark.skip(reason="of one process"))
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # Ray has its own


@pytest.fixture(scope="session")
def engine(request, generator_folder):
    """Makes an engine with these settings of the search; replicas are kept for whoever is next."""
    replicas = request.config.getoption("--replicas")
    if not replicas:
        yield lambda **search: engines.tiny_solver(generator_folder, **search)
        return
    from beamwright import Settings
    from clusters import kept_replicas

    with ExitStack() as stack:
        keep = stack.enter_context(kept_replicas(replicas))
        yield lambda **search: keep(
            Settings.build(**engines.tiny_options(generator_folder, **search))
        )


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
