"""The JSON of a request: who reads a large one holds up nobody, and the first mistake is told."""

import json
from threading import Event

import httpx
import pytest
from pydantic import ValidationError

from beamwright.serve import body as body_room
from beamwright.serve.body import ServerLimits, parsed, read_json
from beamwright.serve.chat import ChatFields, CompletionFields
from beamwright.serve.errors import ApiError
from beamwright.serve.responses import ResponseFields

SAID = [{"role": "user", "content": "x"}]


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


MANY = 2000


@pytest.mark.parametrize(
    ("kind", "given", "param"),
    [
        (ChatFields, {"messages": [1] * MANY}, "messages[0]"),
        (ChatFields, {"messages": [*SAID, *[{}] * MANY]}, "messages[1].role"),
        (ChatFields, {"messages": [{**SAID[0], "content": [1] * MANY}]}, "messages[0].content"),
        (ChatFields, {"messages": SAID, "stop": [1] * MANY}, "stop"),
        (CompletionFields, {"prompt": [1.5] * MANY}, "prompt"),
        (CompletionFields, {"prompt": [[1.5] * MANY]}, "prompt"),
        (CompletionFields, {"prompt": [[1]] * MANY}, "prompt"),
        (ResponseFields, {"input": [1] * MANY}, "input[0]"),
    ],
)  # fmt: skip
def test_a_body_with_many_mistakes_is_judged_by_the_first(kind, given, param):
    whole = {"model": "tiny", **given}
    with pytest.raises(ValidationError) as found:
        kind.model_validate(whole)
    assert found.value.error_count() <= 5, "one for each branch of a union"
    with pytest.raises(ApiError) as refused:
        parsed(kind, whole)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("kind", "given", "param", "most"),
    [
        (ChatFields, {"messages": SAID * 10_001}, "messages", "10000"),
        (ChatFields, {"messages": [{"role": "user", "content": [{"type": "text"}] * 10_001}]},
         "messages[0].content", "10000"),
        (ChatFields, {"messages": SAID, "stop": ["x"] * 17}, "stop", "16"),
        (CompletionFields, {"prompt": ["x"] * 33}, "prompt", "32"),
        (CompletionFields, {"prompt": [[1]] * 33}, "prompt", "32"),
    ],
)  # fmt: skip
def test_how_many_there_may_be_is_said(kind, given, param, most):
    with pytest.raises(ApiError, match=f"at most {most}") as refused:
        parsed(kind, {"model": "tiny", **given})
    assert refused.value.param == param


# --- what is no JSON, or too much of it -----------------------------------------------------

LIMITS = ServerLimits()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 80 + b'"' + b'\\"' * 10**6,  # a string that never ends, and could begin anywhere
        b"[" * 80 + b'"' + b"\\" * 10**6 + b'"' + b"[" * 10**6,
        b"[" * 2 * 10**6,
        b'{"a": [' + b"[]," * 10**6,
        b"[" * 80 + b'"' * 10**6,
        b'"[' * 10**6,
    ],
    ids=range(6),
)
def test_no_body_takes_long_to_read(body):
    # Quadratic in a megabyte is an hour.
    with pytest.raises(ApiError):
        read_json(body, LIMITS)


@pytest.mark.parametrize(
    ("text", "depth"),
    [("[[]]", 2), ('{"a": "[[["}', 1), ('{"[": {"\\"[": [1]}}', 3), ('["\\\\", [[]]]', 3)],
)
def test_nesting_is_counted_outside_of_strings(text, depth):
    body = f'{{"a": {text}}}'.encode()
    assert read_json(body, ServerLimits(depth=depth + 1)) == json.loads(body)
    with pytest.raises(ApiError, match="nested more than"):
        read_json(body, ServerLimits(depth=depth))


def test_values_are_counted_outside_of_strings():
    limits = ServerLimits(values=3)
    assert read_json(b'{"a": [1, "[{,,,,"]}', limits) == {"a": [1, "[{,,,,"]}
    for body in (b'{"a": [1, 2, 3]}', b'{"a": [[], []]}', b'{"a": [{}, "\\"", 1]}'):
        with pytest.raises(ApiError, match="more than 3 values"):
            read_json(body, limits)


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b"null", b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\xff"}', b'{"a"', b'"x"',
     b"[" * 200, b'{"a":' * 200, b'{"a": [[' + b"[" * 80 + b"]" * 82 + b"}"],
)  # fmt: skip
def test_bodies_that_are_none(body):
    with pytest.raises(ApiError) as refused:
        read_json(body, LIMITS)
    assert refused.value.status == 400
    assert "\n" not in refused.value.message
