"""The JSON of a request: who reads a large one holds up nobody, and the first mistake is told."""

import json
from threading import Event

import httpx
import pytest
from pydantic import ValidationError

from beamwright.serve import body as body_room
from beamwright.serve.body import ApiError, ServerLimits, parsed, read_json
from beamwright.serve.chat import ChatFields, CompletionFields
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


# --- fields that change nothing --------------------------------------------------------------

BODIES = {
    ChatFields: {"messages": SAID},
    CompletionFields: {"prompt": "x"},
    ResponseFields: {"input": "x"},
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("nothing_known", "web_search_options", "max_tool_calls", "text",
                                    "prompt_cache_key", "response_format", "reasoning", "tools")),
        *(("text", value) for value in ({}, {"verbosity": "medium"}, {"verbosity": None},
                                        {"format": {"type": "text"}, "verbosity": "medium"},
                                        {"format": None})),
        *(("include", value) for value in ([], ["reasoning.encrypted_content"],
                                           ["web_search_call.action.sources"])),
        *(("truncation", value) for value in ("auto", "disabled")),
        *(("reasoning", value) for value in ({}, {"effort": None, "generate_summary": None})),
        *(("top_logprobs", value) for value in (0, None)),
        *(("ignore_eos", False), ("skip_special_tokens", True), ("stop_token_ids", [])),
        *(("logit_bias", {}), ("logit_bias", {"5": 0}), ("metadata", {"a": "b"}), ("stop", [])),
        *(("seed", 1.0), ("n", 1.0), ("max_tokens", 8.0)),
    ],
)  # fmt: skip
def test_a_field_that_changes_nothing_is_taken(kind, name, value):
    parsed(kind, {"model": "tiny", **BODIES[kind], name: value})


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("text", value) for value in ({"verbosity": "low"}, {"format": {"type": "json_object"}},
                                        {"odd": 1}, "x", [])),
        *(("include", value) for value in (["message.output_text.logprobs"], "x", [5])),
        *(("nothing_known", value) for value in (0, False, "", [])),
        *(("truncation", "middle"), ("ignore_eos", True), ("min_tokens", 5)),
        *(("logit_bias", {"5": 1}), ("reasoning", {"odd": 1})),
    ],
)  # fmt: skip
def test_one_that_would_change_an_answer_is_named(kind, name, value):
    with pytest.raises(ApiError) as refused:
        parsed(kind, {"model": "tiny", **BODIES[kind], name: value})
    assert refused.value.param.partition(".")[0] == name
