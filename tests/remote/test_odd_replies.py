"""A server that answers oddly, or without end: a failed step at most, and in bounded time."""

import itertools
import json
import time
from functools import partial
from types import SimpleNamespace

import pytest

from beamwright import Solver
from beamwright.errors import InputError, UnavailableError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import load_problems
from beamwright.evaluate.run import run
from beamwright.remote import generator as client
from beamwright.solver import scheduler
from scripted_server import (
    Scripted,
    answered,
    choice,
    piece,
    question,
    refuses,
    said,
    sent,
    speaking,
)
from served import Served
from tables import beside

TABLES = beside(__file__)
KEY = "sk-very-secret"


def raw(text):
    return lambda: iter([text.encode()])


def drip():
    while True:
        yield b" "
        time.sleep(0.02)


DEEP = "[" * 20_000


NO_COMPLETION = [
    *((raw(body) if isinstance(body, str) else (200, body), words)
      for body, words in TABLES["no_completion"]),
    (raw('{"choices":' + DEEP), "RecursionError"),
    (said(choice("x", logprobs={"token_logprobs": [10**400]})), "OverflowError"),
    (refuses("too long"), "too long"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "tries", "error", "words"),
    [
        *((answer, 1, InputError, words) for answer, words in NO_COMPLETION),
        (refuses("busy", 503), 3, UnavailableError, "busy"),
        (None, 3, UnavailableError, "RemoteProtocolError"),
        (said(choice("x", finish_reason="abort")), 3, UnavailableError, "'abort'"),
        # What is answered to others, and never to this, is of the question; the rest of the server.
        (refuses("it broke", 500), 3, InputError, "HTTP 500"),
        (refuses("who are you?", 401), 1, UnavailableError, "HTTP 401"),
        (refuses("no such model", 404), 1, UnavailableError, "HTTP 404"),
    ],
)
def test_what_is_no_completion_is_the_problems_error(reply_to, answer, tries, error, words):
    reply, server = reply_to(lambda body: answer, tries=3)
    assert isinstance(reply.error, error)
    assert words in str(reply.error)
    assert server.url in str(reply.error)
    assert (reply.tries, len(server.asked)) == (tries, tries)


@pytest.mark.parametrize(
    ("event", "what"), [*TABLES["no_event"], ('{"choices":' + DEEP, "RecursionError")]
)
def test_so_is_an_event_of_a_stream(reply_to, event, what):
    text = event if isinstance(event, str) else json.dumps(event)
    reply, _ = reply_to(lambda body: raw(f"data: {text}\n\n"), streams=True)
    assert isinstance(reply.error, InputError)
    assert what in str(reply.error)


@pytest.mark.parametrize(
    "usage", [*TABLES["no_counts"], {"prompt_tokens": 10**400}], ids=lambda usage: str(usage)[:40]
)
def test_counts_that_are_none_are_not_said(reply_to, usage):
    reply, _ = reply_to(lambda body: (200, {"choices": [choice("x")], "usage": usage}))
    assert (reply.error, reply.prompt_tokens, reply.cached_tokens) == (None, None, None)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("error", "tries"), TABLES["errors_inside"])
def test_an_error_inside_a_reply_is_told_in_its_words(reply_to, error, tries, streams):
    reply, _ = reply_to(lambda body: iter([error]) if streams else (200, error), streams, tries=3)
    assert str(reply.error).count("the model is gone") == 1
    assert "KeyError" not in str(reply.error)
    assert reply.tries == tries


@pytest.mark.parametrize("value", [{"error": "it is gone"}, said(choice("one"))[1]])
def test_a_server_that_does_not_stream_is_read_all_the_same(reply_to, value):
    reply, _ = reply_to(lambda body: (200, value), streams=True)
    told = reply.error or reply.written[0].text
    assert "it is gone" in str(told) or told == "one"


@pytest.mark.parametrize("status", [400, 422])
def test_one_that_refuses_several_texts_is_asked_for_one(reply_to, status):
    def answer(body):
        return refuses("n > 1 is not supported", status) if "n" in body else said(choice("x"))

    reply, _ = reply_to(answer, asked={"count": 3})
    assert [each.text for each in reply.written] == ["x"]
    many, one = "n > 1 is not supported", "too long"
    reply, _ = reply_to(lambda body: refuses(many if "n" in body else one), asked={"count": 3})
    assert many in str(reply.error)
    assert one in str(reply.error)


# --- replies without end ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "streams"),
    [
        (b" " * 4096, False),
        (b'{"choices":[{"text":"' + b"x" * 4096, False),
        (b"data: " + b"x" * 4096, True),
        (b": a remark\n\n" * 100, True),
        (f"data: {json.dumps(piece('more '))}\n\n".encode() * 20, True),
    ],
    ids=["blanks", "text", "line", "remarks", "events"],
)
def test_a_reply_is_read_as_far_as_it_may_go(reply_to, chunk, streams):
    reply, server = reply_to(lambda body: lambda: itertools.repeat(chunk), streams)
    assert isinstance(reply.error, InputError)
    assert "the reply has more than" in str(reply.error)
    assert server.gone.wait(10)


@pytest.mark.parametrize("streams", [False, True])
def test_a_drip_ends_with_the_time_of_the_whole_reply(reply_to, monkeypatch, streams):
    start = {4: client._REPLY_S}  # of requests for four tokens, which answer
    monkeypatch.setattr(client, "_reply_s", lambda asked: start.get(asked.max_tokens, 0.3))
    reply, server = reply_to(lambda body: drip, streams)
    assert isinstance(reply.error, UnavailableError)
    assert "no complete reply in 0.3 s (2 tries)" in str(reply.error)
    assert len(server.asked) == 2


# --- at the start ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("models", "words"),
    [
        *TABLES["no_start"],
        (sent(b"x", content_encoding="zstd"), "the reply is in zstd, which was not requested"),
        (drip, "the server did not finish its reply"),
        (lambda: itertools.repeat(b" " * 65536), "does not speak OpenAI's protocol"),
        *((raw(text), "does not speak OpenAI's protocol")
          for text in (*TABLES["no_models"], '{"data":' + DEEP)),
    ],
)  # fmt: skip
def test_the_start_ends_in_one_line(source_of, monkeypatch, models, words):
    monkeypatch.setattr(client, "_MODELS_S", 0.2 if models is drip else 30.0)
    if isinstance(models, list) and models and isinstance(models[0], int):
        models = tuple(models)
    with Scripted(lambda body: said(choice("x")), models) as server:
        ended_start(source_of, server, words, "c" if "b, d" in words else "")


def ended_start(source_of, server, words, name=""):
    """A start that fails ends in one line with these words, and without the key."""
    with pytest.raises(InputError) as error:
        source_of(server, name, key=KEY)
    line = str(error.value)
    assert line.startswith(f"--model openai:{server.url}")
    assert line.isprintable()
    assert KEY not in line
    for word in words.split("; "):
        assert line.count(word) == 1


def forms(body):
    """A server that refuses whatever form a prompt has."""
    ids = isinstance(body["prompt"], list)
    return refuses("a string is expected" if ids else "completions are switched off")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (forms, "a string is expected; completions are switched off"),
        (lambda body: said(choice(" 2 and", token_ids=[40, 41, 42])), "--tokenizer"),
        (lambda body: said(choice(KEY, token_ids=[10**6])), "--tokenizer; (the key)"),
        (lambda body: (401, {"error": KEY}), "(the key)"),
    ],
)
def test_so_does_one_whose_first_texts_are_refused(source_of, answer, words):
    with Scripted(answer) as server:
        ended_start(source_of, server, words)


def test_nobody_answers(source_of):
    ended_start(source_of, SimpleNamespace(url="http://127.0.0.1:9/v1"), "attempts failed")


@pytest.mark.parametrize("asked", ["m", "", "m:latest"])
def test_ollamas_names_have_a_tag(codec, source_of, asked):
    with speaking(codec, models=[{"id": "m:latest", "max_model_len": 512}]) as server:
        assert source_of(server, asked).name == "m:latest"


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_loads_is_waited_for_but_not_without_end(source_of, codec, status):
    with speaking(codec) as server:
        loads = [refuses("Loading model", status)] * 3
        server.models = itertools.chain(loads, itertools.repeat((200, {"data": [{"id": "m"}]})))
        assert source_of(server).name == "m"
        server.models = itertools.repeat(refuses("Loading model", status))
        with pytest.raises(InputError, match="Loading model"):
            source_of(server)


@pytest.mark.parametrize("names", [("logprobs",), ("seed",), ("logprobs", "seed")])
def test_a_field_that_a_server_refuses_is_left_out(codec, source_of, names):
    with speaking(codec, ids=False, then=lambda body: said(choice("x"))) as server:
        usual = server.answer

        def answer(body):
            refused = next((name for name in names if name in body), None)
            return refuses(f"{refused} is not supported") if refused else usual(body)

        server.answer = answer
        assert answered(source_of(server), question(codec)).error is None
    (asked,) = server.asked
    assert not set(names) & set(asked)


# --- the key ---------------------------------------------------------------------------------


def test_the_key_is_in_no_error_whatever_a_server_repeats(reply_to, codec):
    def echo(status):
        return lambda body: (status, {"error": {"message": f"'Bearer {KEY}' \x1b[2J\nis wrong"}})

    reply, server = reply_to(echo(401), key=KEY)
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert KEY not in str(reply.error)
    assert "Bearer (the key)" in str(reply.error)
    assert str(reply.error).isprintable()

    event = {"error": {"message": f"{KEY} {'x' * 500}"}}
    reply, _ = reply_to(lambda body: iter([event]), streams=True, key=KEY)
    assert "(the key)" in str(reply.error)
    assert KEY[:8] not in str(reply.error)


# --- what a server says of itself ------------------------------------------------------------


@pytest.mark.parametrize(("read", "warns"), [(0.2, True), (0.8, True), (0.95, False), (1, False)])
def test_a_server_that_cuts_prompts_is_told_of(codec, solver_of, read, warns):
    def then(body):
        num = len(body["prompt"])
        return said(choice("1"), choice("2"), prompt_tokens=int(num * read))

    with speaking(codec, then=then) as server, solver_of(server) as solver:
        warnings = solver.solve("many words " * 10).warnings
    assert any("the server of --model read only" in each for each in warnings) is warns


@pytest.mark.parametrize("verifier", ["logprob", "min-logprob"])
def test_one_without_log_probabilities_is_told_of(codec, solver_of, verifier):
    def then(body):
        return said(*(choice(f"{i}\n\n", stop_reason="\n\n") for i in range(body.get("n", 1))))

    options = {"verifier": verifier, "search": "beam", "n": 2, "width": 2, "max_rounds": 2}
    with speaking(codec, then=then) as server, solver_of(server, **options) as solver:
        warnings = solver.solve("a").warnings
    assert any("returns no log-probabilities" in each for each in warnings)


def test_health_knows_a_generator_that_is_gone(codec, solver_of):
    with speaking(codec) as server, solver_of(server) as solver, Served(solver) as served:
        assert served.http.get("/health").json()["status"] == "ok"
        assert served.http.get("/ready").status_code == 200
        server.models = sent(b"gone for good", 502)
        found = served.http.get("/health").json()
        assert (found["status"], "gone for good" in found["generator"]) == ("degraded", True)
        assert served.http.get("/ready").status_code == 503


# --- whole searches --------------------------------------------------------------------------


@pytest.fixture
def solver_of(generator_folder):
    def make(server, **options):
        given = {"verifier": "none", "search": "majority", "n": 2, "max_tokens": 8, **options}
        return Solver(
            model=f"openai:{server.url}#m", tokenizer=str(generator_folder), system_prompt="",
            delimiter="\n\n", **given,
        )  # fmt: skip

    return make


@pytest.mark.parametrize(
    "odd",
    [
        lambda: raw('{"choices":' + DEEP),
        lambda: said(choice("x" * 5000), choice("y")),
        lambda: said(choice("x", token_ids=[5] * 5000), choice("y")),
        lambda: said(choice("x", logprobs={"token_logprobs": [-0.1] * 500}), choice("y")),
    ],
    ids=["deep", "text", "tokens", "logprobs"],
)
def test_an_odd_reply_fails_its_problem_and_no_run(codec, solver_of, tmp_path, odd):
    """In the last place, too, where nothing that comes later shows that the server is there."""

    def then(body):
        return odd() if "odd" in codec.decode(body["prompt"]) else said(choice("1"), choice("2"))

    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"problem": p}) + "\n" for p in ("a", "b", "an odd one")))
    with (
        speaking(codec, then=then) as server,
        solver_of(server) as solver,
        AnswerChecker() as checker,
    ):
        solve_many = partial(solver.solve_many, in_flight="auto")
        report = run(load_problems(str(file)), solve_many, solver.settings, checker)
    assert (report["problems"], report["errors"]) == (3, 1)


def test_a_deadline_is_heard_while_a_server_drips(codec, solver_of, monkeypatch):
    """It fails: there is nothing to return."""
    monkeypatch.setattr(scheduler, "PATIENCE_S", 0.1)

    with (
        speaking(codec, then=lambda body: drip) as server,
        solver_of(server, deadline=0.1) as solver,
        pytest.raises(UnavailableError, match=r"--deadline 0\.1s had passed before the first step"),
    ):
        solver.solve("a")
    assert server.gone.wait(10)


def test_what_was_written_by_the_deadline_stands(codec, solver_of, monkeypatch):
    monkeypatch.setattr(scheduler, "PATIENCE_S", 60.0)

    replies = [said(choice("a\n\n"), choice("b\n\n"))]
    with (
        speaking(codec, then=lambda body: replies.pop() if replies else drip) as server,
        solver_of(server, deadline=0.1) as solver,
    ):
        found = solver.solve("a")
    assert [each.text for each in found.candidates]
    assert "--deadline 0.1s had passed" in found.reason_fewer
