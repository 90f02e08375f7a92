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

LIMITS = ServerLimits(n=64, tokens=5000, seconds=60.0)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LEAST = {
    ChatEndpoint: {"messages": HELLO},
    CompletionsEndpoint: {"prompt": "x"},
    ResponsesEndpoint: {"input": "x"},
}
"""Of each endpoint the smallest body."""


def asked(endpoint, fixed=None, takes_tools=True, **fields):
    """The searches of a request. fixed: the server's seed."""
    reader = RequestReader("m", SearchSettings(), LIMITS, fixed)
    solver = SimpleNamespace(codec=SimpleNamespace(takes_tools=takes_tools), remote=None)
    queue = SimpleNamespace(reader=reader, solver=solver)
    return endpoint(queue).read({"model": "m", **LEAST[endpoint], **fields})


def chat(**fields):
    (job,) = asked(ChatEndpoint, **fields)
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
@pytest.mark.parametrize(
    "fields",
    [
        *({name: None} for name in ("nothing_known", "web_search_options", "max_tool_calls",
                                    "text", "prompt_cache_key", "response_format", "reasoning")),
        *({"text": value} for value in ({}, {"verbosity": "medium"}, {"verbosity": None},
                                        {"format": {"type": "text"}, "verbosity": "medium"},
                                        {"format": None})),
        *({"include": value} for value in ([], ["reasoning.encrypted_content"],
                                           ["web_search_call.action.sources"])),
        *({"truncation": value} for value in ("auto", "disabled")),
        *({"reasoning": value} for value in ({}, {"effort": None, "generate_summary": None})),
        {"ignore_eos": False, "skip_special_tokens": True, "stop_token_ids": [], "stop": []},
        {"logit_bias": {"5": 0}, "metadata": {"a": "b"}, "top_logprobs": 0, "n": 1.0},
        {"user": "me", "service_tier": "flex", "verbosity": "medium", "logit_bias": {}},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"response_format": {"type": "text"}, "modalities": ["text"], "tools": []},
        {"tool_choice": "auto", "reasoning_effort": "medium", "chat_template_kwargs": {}},
        {"store": False, "parallel_tool_calls": True, "stream_options": None, "seed": 7.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_nothing_is_let_through(endpoint, fields):
    (job,), (plain,) = asked(endpoint, 7, **fields), asked(endpoint, 7)
    assert (job.problem, job.options, job.streams) == (plain.problem, plain.options, plain.streams)


@pytest.mark.parametrize("endpoint", LEAST)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("text", value) for value in ({"verbosity": "low"}, {"format": {"type": "json_object"}},
                                        {"odd": 1}, "x", [])),
        *(("include", value) for value in (["message.output_text.logprobs"], "x", [5])),
        *(("nothing_known", value) for value in (0, False, "", [])),
        *(("truncation", "middle"), ("ignore_eos", True), ("min_tokens", 5), ("store", True)),
        *(("logit_bias", {"5": 1}), ("reasoning", {"odd": 1}), ("frequency_penalty", 0.5)),
        *(("temperature", value) for value in (3, "hot", True)),
        *(("n", value) for value in (0, 1.5)),
        *(("top_p", 0), ("seed", "one"), ("model", 5), ("stream", "yes"), ("stop", "")),
        *(("chat_template_kwargs", "{}"), ("chat_template_kwargs", [1])),
        ("reasoning_effort", "enormous"),
        *(("search", value) for value in ({"n": "many"}, {"deadline": "soon"}, {"stop": "x"})),
    ],
)  # fmt: skip
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
        (ChatEndpoint, {"messages": [1] * MANY}, "messages[0]", ""),
        (ChatEndpoint, {"messages": [*HELLO, *[{}] * MANY]}, "messages[1].role", ""),
        (ChatEndpoint, {"messages": [{**HELLO[0], "content": [1] * MANY}]},
         "messages[0].content", ""),
        (ChatEndpoint, {"stop": [1] * MANY}, "stop", ""),
        (CompletionsEndpoint, {"prompt": [1.5] * MANY}, "prompt", ""),
        (ResponsesEndpoint, {"input": [1] * MANY}, "input[0]", ""),
        # Of too many things, how many there may be.
        (ChatEndpoint, {"messages": HELLO * 10_001}, "messages", "at most 10000"),
        (ChatEndpoint, {"messages": PARTS}, "messages[0].content", "at most 10000"),
        (ChatEndpoint, {"stop": ["x"] * 17}, "stop", "at most 16"),
        (CompletionsEndpoint, {"prompt": ["x"] * 33}, "prompt", "at most 32"),
        (ChatEndpoint, {"n": 65}, "n", "at most 64 here"),
        (ChatEndpoint, {"search": {"n": 65}}, "n", "at most 64 here"),
        *((ChatEndpoint, {"model": name}, "model", "") for name in ("other", "m:nothing", "m:")),
        # Of one endpoint alone.
        (ChatEndpoint, {"messages": []}, "messages", ""),
        (ChatEndpoint, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", ""),
        (ChatEndpoint, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]", "image_url is not supported"),
        (ChatEndpoint, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
         "messages[0].tool_calls[0].function.name", "is missing"),
        (ChatEndpoint, {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (ChatEndpoint, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ""),
        (ChatEndpoint, {"response_format": {"type": "json_object"}}, "response_format", ""),
        (ChatEndpoint, {"max_completion_tokens": 0}, "max_completion_tokens", ""),
        (ChatEndpoint, {"tools": [TOOL, {"type": "function", "function": {}}]},
         "tools[1].function.name", ""),
        (ChatEndpoint, {"tools": [TOOL], "takes_tools": False}, "tools", "template shows none"),
        *((ChatEndpoint, {"tools": [TOOL], "tool_choice": choice}, "tool_choice", "")
          for choice in ("required", {"type": "function"})),
        *((ChatEndpoint, {"chat_template_kwargs": {name: 0}}, "chat_template_kwargs", "")
          for name in ("add_generation_prompt", "chat_template")),
        (CompletionsEndpoint, {"prompt": []}, "prompt", ""),
        *((ResponsesEndpoint, {"input": bad}, "input", "")
          for bad in ([], [{"type": "image"}], [{"role": "user"}], [{"content": "x"}])),
    ],
)  # fmt: skip
def test_the_first_mistake_is_told(endpoint, given, param, said):
    error = refused(asked, endpoint, **given)
    if endpoint is ResponsesEndpoint:
        assert error.param.startswith(param)
    else:
        assert (error.status, error.param) == (404 if "model" in given else 400, param)
    assert said in error.message
    whole = {"model": "m", **LEAST[endpoint], **given}
    assert num_faults(endpoint.takes, whole) <= 5, "one for each branch of a union"


# --- what becomes of it ----------------------------------------------------------------------


def test_messages_of_a_response_are_those_of_a_chat():
    system = {"role": "system", "content": "Be brief."}
    for given, messages in (("Hello", HELLO), (HELLO, HELLO)):
        (job,) = asked(ResponsesEndpoint, input=given, instructions="Be brief.")
        assert job.problem.messages == (system, *messages)


@pytest.mark.parametrize(
    ("fields", "streams"),
    [
        ({"tools": [TOOL]}, False),  # a call is one when it is whole
        ({"tools": [TOOL], "tool_choice": "none"}, True),
        ({"logprobs": True}, False),
        ({}, True),
    ],
)
def test_calls_and_log_probabilities_come_with_the_end(fields, streams):
    assert chat(**fields).streams == streams


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 7, "stop": ["END"],
          "max_tokens": 9, "max_completion_tokens": 5,
          "search": {"method": "dvts", "n": 8, "width": 2, "rounds": 3, "deadline": "30s"}},
         {"search": "dvts", "n": 8, "width": 2, "max_rounds": 3, "temperature": 0.5, "top_p": 0.9,
          "top_k": 20, "seed": 7, "max_tokens": 5, "stop_strings": ("END",), "deadline": 30.0,
          "token_budget": 5000}),
        ({"search": {"deadline": "2h", "token_budget": 10**9}},
         {"deadline": 60.0, "token_budget": 5000}),
        ({"seed": -3}, {"seed": 2**63 - 3}),
        ({"search": {"seed": 5}}, {"seed": 5}),
        ({"logprobs": True}, {"top_logprobs": None}),
        ({"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 3}),
        ({"fixed": 11}, {"seed": 11}),
        # As many candidates as are returned.
        ({"n": 3}, {"n": None, "search": None}),  # 16 by default
        ({"n": 3, "model": "m:plain"}, {"n": 3}),
        ({"n": 9, "search": {"n": 8, "width": 4}}, {"n": 12}),
        ({"search": {"n": -5}}, {"n": -5}),  # the solver refuses it
        # Names, and efforts: as many as this server allows.
        ({"model": "m:mcts"}, {"search": "mcts"}),
        ({"model": "m:plain"}, {"search": "best-of-n", "n": 1}),
        *(({"reasoning_effort": effort}, {"n": n}) for effort, n in (
            ("none", 1), ("minimal", 1), ("low", 4), ("medium", None), ("high", 64), ("xhigh", 64)
        )),
        ({"model": "m:plain", "reasoning_effort": "high"}, {"n": 1}),
        ({"reasoning_effort": "low", "search": {"n": 6}}, {"n": 6}),
    ],
    ids=str,
)  # fmt: skip
def test_options_of_the_search(fields, options):
    found = chat(**fields).options
    assert {name: found.get(name) for name in options} == options
    assert "seed" in options or found["seed"] != chat(**fields).options["seed"], "drawn anew"


def test_prompts_of_completions():
    for prompt, problems in (
        ("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1, 2], [3]], [(1, 2), (3,)])
    ):  # fmt: skip
        jobs = asked(CompletionsEndpoint, prompt=prompt)
        assert [job.problem for job in jobs] == [RawPrompt(each) for each in problems]
