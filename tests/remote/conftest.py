import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import engines
from beamwright import Solver
from beamwright.models.tokenizer import TextCodec
from beamwright.remote import generator as client
from scripted_server import answered, question, speaking
from served import Served


@pytest.fixture(scope="session")
def codec(generator_folder):
    return TextCodec.load(generator_folder)


@pytest.fixture
def source_of(codec, monkeypatch):
    """Makes a source of a scripted server, which waits for nothing before it asks again."""
    monkeypatch.setattr(client, "_FIRST_WAIT_S", 0.001)
    made = []

    def make(server, name="", **options):
        made.append(client.RemoteGenerator(server.url, name, codec, **options))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.fixture
def reply_to(codec, source_of, monkeypatch):
    """What becomes of one question, and the server; `streams`: of a text that is read as it is
    written."""

    def ask(then, streams=False, asked=None, tries=2, **options):
        monkeypatch.setattr(client, "MOST_TRIES", tries)
        kind = {"extras": False, "names": False} if streams else {}
        with speaking(codec, then=then, **kind) as server:
            source = source_of(server, **options)
            return answered(source, question(codec, **(asked or {}))), server

    return ask


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
