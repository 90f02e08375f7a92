import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import engines
from beamwright import Solver
from served import Served


@pytest.fixture(scope="module")
def far(generator_folder):
    """A server of the tiny model; searches go to `model`."""
    with engines.tiny_solver(generator_folder, verifier="none") as solver, Served(solver) as server:
        server.model = f"openai:{server.url}/v1#tiny:plain"
        yield server


@pytest.fixture
def far_solver(far, generator_folder):
    """A solver whose generator is that server; options of `Solver`."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def make(model=None, **options):
            given = {"n": 8, "width": 4, "max_rounds": 4, "max_step_tokens": 12, **options}
            return stack.enter_context(
                Solver(
                    model=model or far.model,
                    tokenizer=str(generator_folder),
                    system_prompt="",
                    **{"verifier": "logprob", "delimiter": "e", "max_tokens": 40, **given},
                )
            )

        yield make
