"""What a request may say, what becomes of it, and the first mistake that is told."""

import json
from threading import Event
from types import SimpleNamespace

import httpx
import pytest
from pydantic import ValidationError

from beamwright.sections import SearchSettings
from beamwright.serve import body as body_room
from beamwright.serve.body import ApiError, ServerLimits, read_json
from beamwright.serve.chat import ChatEndpoint, CompletionsEndpoint
from beamwright.serve.job import RequestReader
from beamwright.serve.responses import ResponsesEndpoint
from beamwright.tree import RawPrompt
from tables import beside

CASES = beside(__file__)

LIMITS = ServerLimits(n=64, tokens=5000, seconds=60.0)
HELLO = [{"role": "user", "content": "Hello"}]
ENDPOINTS = {
    "chat": ChatEndpoint, "completions": CompletionsEndpoint, "responses": ResponsesEndpoint
}  # fmt: skip
LEAST = {"chat": {"messages": HELLO}, "completions": {"prompt": "x"}, "responses": {"input": "x"}}
"""Of each endpoint the smallest body."""


def asked(endpoint, fixed=None, takes_tools=True, **fields):
    """The searches of a request. fixed: the server's seed."""
    reader = RequestReader("m", SearchSettings(), LIMITS, fixed)
    solver = SimpleNamespace(codec=SimpleNamespace(takes_tools=takes_tools), remote=None)
    queue = SimpleNamespace(reader=reader, solver=solver)
    return ENDPOINTS[endpoint](queue).make_jobs({"model": "m", **LEAST[endpoint], **fields})


def chat(**fields):
    (job,) = asked("chat", **fields)
    return job


def refused(call, *given, **fields):
    with pytest.raises(ApiError) as caught:
        call(*given, **fields)
    assert "\n" not in caught.value.message
    return caught.value


# --- JSON ------------------------------------------------------------------------------------


def test_a_body_that_takes_long_to_read_holds_up_nobody(serve, monkeypatch):
    server, come, go_on, read_json = serve(), Event(), Event(), body_room.read_json

    def slow(*args):
        come.set()
        go_on.wait(30)
        return read_json(*args)

    monkeypatch.setattr(body_room, "read_json", slow)
    asked = server.later(seed=1)
    assert come.wait(30)
    assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
    go_on.set()
    assert asked.result(30).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[1]", b"null", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\xff"}', b'{"a"', b'"x"'),
        *(b"[" * 200, b'{"a":' * 200, b'{"a": [[' + b"[" * 80 + b"]" * 82 + b"}"),
        # Quadratic in a megabyte is an hour: strings that never end, and could begin anywhere.
        b"[" * 80 + b'"' + b'\\"' * 10**6,
        b"[" * 80 + b'"' + b"\\" * 10**6 + b'"' + b"[" * 10**6,
        *(b"[" * 2 * 10**6, b'{"a": [' + b"[]," * 10**6, b"[" * 80 + b'"' * 10**6, b'"[' * 10**6),
    ],
    ids=range(17),
)
def test_bodies_that_are_none_are_soon_refused(body):
    assert refused(read_json, body, ServerLimits(body_bytes=2**24)).status == 400


@pytest.mark.parametrize(
    ("text", "depth"),
    [("[[]]", 2), ('{"a": "[[["}', 1), ('{"[": {"\\"[": [1]}}', 3), ('["\\\\", [[]]]', 3)],
)
def test_nesting_is_counted_outside_of_strings(text, depth):
    body = f'{{"a": {text}}}'.encode()
    assert read_json(body, ServerLimits(depth=depth + 1)) == json.loads(body)
    assert "nested more than" in refused(read_json, body, ServerLimits(depth=depth)).message


def test_values_are_counted_outside_of_strings():
    limits = ServerLimits(values=3)
    assert read_json(b'{"a": [1, "[{,,,,"]}', limits) == {"a": [1, "[{,,,,"]}
    for body in (b'{"a": [1, 2, 3]}', b'{"a": [[], []]}', b'{"a": [{}, "\\"", 1]}'):
        assert "more than 3 values" in refused(read_json, body, limits).message


# --- what changes nothing, and what would ----------------------------------------------------


@pytest.mark.parametrize("endpoint", LEAST)
@pytest.mark.parametrize("fields", CASES["nothing"], ids=str)
def test_what_changes_nothing_is_let_through(endpoint, fields):
    (job,), (plain,) = asked(endpoint, 7, **fields), asked(endpoint, 7)
    assert (job.problem, job.options, job.streams) == (plain.problem, plain.options, plain.streams)


@pytest.mark.parametrize("endpoint", LEAST)
@pytest.mark.parametrize(("name", "value"), CASES["changes"])
def test_what_would_change_an_answer_and_is_not_understood_is_named(endpoint, name, value):
    error = refused(asked, endpoint, **{name: value})
    assert (error.status, error.param.partition(".")[0]) == (400, name)
    assert error.body["error"]["type"] == "invalid_request_error"


def num_faults(kind, body):
    try:
        kind.model_validate(body)
    except ValidationError as found:
        return found.error_count()
    except ApiError:
        return 1
    return 0


MANY = 2000
PARTS = [{"role": "user", "content": [{"type": "text"}] * 10_001}]


@pytest.mark.parametrize(
    ("endpoint", "given", "param", "said"),
    [
        # Of many mistakes the first one is told.
        ("chat", {"messages": [1] * MANY}, "messages[0]", ""),
        ("chat", {"messages": [*HELLO, *[{}] * MANY]}, "messages[1].role", ""),
        ("chat", {"messages": [{**HELLO[0], "content": [1] * MANY}]},
         "messages[0].content", ""),
        ("chat", {"stop": [1] * MANY}, "stop", ""),
        ("completions", {"prompt": [1.5] * MANY}, "prompt", ""),
        ("responses", {"input": [1] * MANY}, "input[0]", ""),
        # Of too many things, how many there may be.
        ("chat", {"messages": HELLO * 10_001}, "messages", "at most 10000"),
        ("chat", {"messages": PARTS}, "messages[0].content", "at most 10000"),
        ("chat", {"stop": ["x"] * 17}, "stop", "at most 16"),
        ("completions", {"prompt": ["x"] * 33}, "prompt", "at most 32"),
        *CASES["mistakes"],
    ],
)  # fmt: skip
def test_the_first_mistake_is_told(endpoint, given, param, said):
    error = refused(asked, endpoint, **given)
    if endpoint == "responses":
        assert error.param.startswith(param)
    else:
        assert (error.status, error.param) == (404 if "model" in given else 400, param)
    assert said in error.message
    whole = {"model": "m", **LEAST[endpoint], **given}
    assert num_faults(ENDPOINTS[endpoint].takes, whole) <= 5, "one for each branch of a union"


# --- what becomes of it ----------------------------------------------------------------------


def test_messages_of_a_response_are_those_of_a_chat():
    system = {"role": "system", "content": "Be brief."}
    for given, messages in (("Hello", HELLO), (HELLO, HELLO)):
        (job,) = asked("responses", input=given, instructions="Be brief.")
        assert job.problem.messages == (system, *messages)


@pytest.mark.parametrize(("fields", "options"), CASES["options"], ids=str)
def test_options_of_the_search(fields, options):
    found = chat(**fields).options
    stops = {name: tuple(stops) for name, stops in options.items() if name == "stop_strings"}
    assert {name: found.get(name) for name in options} == {**options, **stops}
    assert "seed" in options or found["seed"] != chat(**fields).options["seed"], "drawn anew"


def test_prompts_of_completions():
    for prompt, problems in (
        ("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1, 2], [3]], [(1, 2), (3,)])
    ):  # fmt: skip
        jobs = asked("completions", prompt=prompt)
        assert [job.problem for job in jobs] == [RawPrompt(each) for each in problems]
