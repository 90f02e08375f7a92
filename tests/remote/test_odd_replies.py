"""A server that answers oddly, or without end: a failed step at most, and in bounded time."""

import itertools
import json
import time
from functools import partial

import pytest

from beamwright import Solver
from beamwright.errors import InputError, UnavailableError
from beamwright.evaluate.equivalence import AnswerChecker
from beamwright.evaluate.problems import load_problems
from beamwright.evaluate.run import run
from beamwright.remote import openai as client
from beamwright.solver import scheduler
from scripted_server import Scripted, choice, piece, refuses, said, speaking

KEY = "sk-very-secret"


def raw(text):
    return lambda: iter([text.encode()])


def drip():
    while True:
        yield b" "
        time.sleep(0.02)


DEEP = "[" * 20_000
HUGE = "1" + "0" * 400


NO_COMPLETION = [
    (raw('{"choices":' + DEEP), "RecursionError"),
    (raw('{"choices":[{"index":Infinity,"text":"x"}]}'), "OverflowError"),
    (said(choice("x", logprobs={"token_logprobs": [int(HUGE)]})), "OverflowError"),
    (said(choice("x", logprobs={"token_logprobs": [float("nan")]})), "no numbers"),
    (said(choice("x", logprobs={"token_logprobs": ["-1"]})), "no numbers"),
    (said(choice("x", logprobs=[1])), "AttributeError"),
    (said(choice(None)), "a text that is NoneType"),
    (said(choice("half \ud83d")), "surrogates not allowed"),
    (said(choice("x", stop_reason="\ud83d")), "surrogates not allowed"),
    (said(choice("x", token_ids=[1.5, "3"])), "token ids that are no integers"),
    (said(choice("x", token_ids=[True])), "token ids that are no integers"),
    (said(choice("x", token_ids=5)), "TypeError"),
    (said(), "it has no choices"),
    ((200, ["what"]), "no completion"),
    ((200, {}), "no completion (KeyError"),
    (refuses("too long"), "too long"),
]
LATER = [
    (refuses("busy", 503), "busy"),
    (None, "RemoteProtocolError"),
    (said(choice("x", finish_reason="abort")), "'abort'"),
    (said(choice("x", finish_reason="content_filter")), "'content_filter'"),
]


@pytest.mark.parametrize(
    ("answer", "tries", "error", "words"),
    [
        *((answer, 1, InputError, words) for answer, words in NO_COMPLETION),
        *((answer, 3, UnavailableError, words) for answer, words in LATER),
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
    ("event", "what"),
    [
        ('{"choices":' + DEEP, "RecursionError"),
        (f'{{"choices":[{{"text":"x","logprobs":{{"token_logprobs":[{HUGE}]}}}}]}}', "Overflow"),
        ('{"choices":[{"text":5}]}', "a text that is int"),
        ('{"choices":[{"text":"\\ud83d"}]}', "surrogates not allowed"),
        ("[]", "AttributeError"),
    ],
)
def test_so_is_an_event_of_a_stream(reply_to, event, what):
    reply, _ = reply_to(lambda body: raw(f"data: {event}\n\n"), streams=True)
    assert isinstance(reply.error, InputError)
    assert what in str(reply.error)


@pytest.mark.parametrize(
    "usage",
    [
        *([1], "x", {"prompt_tokens_details": [1]}, {"prompt_tokens": "abc"}),
        *({"prompt_tokens": value} for value in (True, -1, 10**400, [1], 1.5)),
    ],
    ids=lambda usage: str(usage)[:40],
)
def test_counts_that_are_none_are_not_said(reply_to, usage):
    reply, _ = reply_to(lambda body: (200, {"choices": [choice("x")], "usage": usage}))
    assert (reply.error, reply.prompt_tokens, reply.cached_tokens) == (None, None, None)


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
    assert "bytes, for what was asked" in str(reply.error)
    assert server.gone.wait(10)


def test_what_nobody_unpacks_is_no_bomb(reply_to):
    def packed():
        return iter([b"\x1f\x8b"])

    packed.headers = {"content-encoding": "gzip"}
    reply, server = reply_to(lambda body: packed)
    assert "it is in gzip, which was not asked for" in str(reply.error)
    assert set(server.accepts) == {"identity"}


@pytest.mark.parametrize("streams", [False, True])
def test_a_drip_ends_with_the_time_of_the_whole_reply(reply_to, monkeypatch, streams):
    start = {4: client._REPLY_S}  # of requests for four tokens, which answer
    monkeypatch.setattr(client, "_reply_s", lambda asked: start.get(asked.max_tokens, 0.3))
    reply, server = reply_to(lambda body: drip, streams)
    assert isinstance(reply.error, UnavailableError)
    assert "no whole reply in 0.3 s (2 tries)" in str(reply.error)
    assert len(server.asked) == 2


# --- at the start ----------------------------------------------------------------------------


NO_MODELS = ['{"data":' + DEEP, '{"data":[{"id":5}]}', '{"data":[{"id":"\\ud83d"}]}', "[1]",
             '{"data":[{"id":"m","x":1e', '{"data":"no list"}']  # fmt: skip


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([{"id": "a"}, {"id": "b"}], "say which model, as #NAME; it has a, b"),
        ([{"id": "a"}, {"id": "b"}, {"id": "d"}], "say which model, as #NAME; it has a, b, d"),
        ([], "say which"),
        (lambda: itertools.repeat(b" " * 65536), "does not speak OpenAI's protocol"),
        *((raw(text), "does not speak OpenAI's protocol") for text in NO_MODELS),
    ],
)
def test_the_start_ends_in_one_line(source_of, models, words):
    answer = said(choice("x"))
    with Scripted(lambda body: answer, models) as server, pytest.raises(InputError) as error:
        source_of(server, "c" if isinstance(models, list) and len(models) == 3 else "")
    assert str(error.value).startswith("--model openai:")
    assert words in str(error.value)


def test_a_start_that_drips_ends(source_of, monkeypatch):
    monkeypatch.setattr(client, "_MODELS_S", 0.2)

    with (
        Scripted(lambda body: None, drip) as server,
        pytest.raises(InputError, match="what answers there does not end"),
    ):
        source_of(server)


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


def test_nor_in_those_of_the_start(source_of):
    for models, answer in (
        ([{"id": f"{KEY}-a"}, {"id": "b"}], None),
        ([{"id": "m"}], lambda body: (401, {"error": KEY})),
        ([{"id": "m"}], lambda body: said(choice(KEY, token_ids=[5]))),
    ):
        with Scripted(answer, models) as server, pytest.raises(InputError) as error:
            source_of(server, key=KEY)
        assert KEY not in str(error.value)
        assert "(the key)" in str(error.value)


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
        lambda: said(choice("x\ud83d"), choice("y")),
        lambda: said(choice("x", logprobs={"token_logprobs": [-0.1] * 500}), choice("y")),
    ],
    ids=["deep", "text", "tokens", "surrogate", "logprobs"],
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
        pytest.raises(UnavailableError, match=r"--deadline 0\.1s had passed, and nothing"),
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
