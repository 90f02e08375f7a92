"""What a request may say, and what becomes of it."""

from types import SimpleNamespace

import pytest

from beamwright.sections import SearchSettings
from beamwright.serve.body import ApiError, ServerLimits
from beamwright.serve.chat import _THOUGHTS, ChatEndpoint, CompletionsEndpoint
from beamwright.serve.job import RequestReader
from beamwright.serve.responses import ResponsesEndpoint
from beamwright.tree import RawPrompt

LIMITS = ServerLimits(n=64, tokens=5000, seconds=60.0)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def asked(endpoint, fixed=None, takes_tools=True, **fields):
    """The searches of a request."""
    reader = RequestReader("m", SearchSettings(), LIMITS, fixed)
    solver = SimpleNamespace(codec=SimpleNamespace(takes_tools=takes_tools))
    queue = SimpleNamespace(reader=reader, solver=solver)
    return endpoint(queue).read({"model": "m", **fields})


def chat(**fields):
    (job,) = asked(ChatEndpoint, **{"messages": HELLO, **fields})
    return job


def refused(call, *given, **fields):
    with pytest.raises(ApiError) as caught:
        call(*given, **fields)
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "flex", "verbosity": "medium"},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"logit_bias": {}, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"tools": [], "tool_choice": "auto", "logprobs": False, "reasoning_effort": "medium"},
        {"tools": [TOOL], "tool_choice": "none"},
        {"chat_template_kwargs": {}},
        {"n": 1, "store": False, "parallel_tool_calls": True, "stream_options": None},
    ],
)
def test_what_changes_nothing_is_let_through(fields):
    assert chat(**fields).problem == chat().problem


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"store": True}, "store"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": "one"}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]"),
        ({"messages": "Hello"}, "messages"),
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [TOOL], "takes_tools": False}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": "{}"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
         "messages[0].tool_calls[0].function.name"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"search": {"n": "many"}}, "search.n"),
        ({"search": {"deadline": "soon"}}, "search.deadline"),
        ({"search": {"stop": "settled"}}, "search.stop"),
        ({"search": {"n": 65}}, "n"),
        ({"n": 65}, "n"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_and_is_not_understood_is_named(fields, param):
    error = refused(chat, **fields)
    assert (error.status, error.param) == (400, param)
    assert error.body["error"]["type"] == "invalid_request_error"
    assert "\n" not in error.message


def test_messages_are_as_a_chat_template_takes_them():
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("one", "two")]},
        {"role": "assistant", "content": "three", "reasoning_content": "hm"},
    ]
    expected = (
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three", **dict.fromkeys(_THOUGHTS, "hm")},
    )
    assert chat(messages=said).problem.messages == expected
    (job,) = asked(ResponsesEndpoint, input=said[1:], instructions="Be brief.")
    assert job.problem.messages == ({"role": "system", "content": "Be brief."}, *expected[1:])
    (job,) = asked(ResponsesEndpoint, input="Hello")
    assert job.problem.messages == tuple(HELLO)
    for bad in ([], [{"type": "image"}], [{"role": "user"}], [{"content": "x"}]):
        assert refused(asked, ResponsesEndpoint, input=bad).param.startswith("input")


def test_calls_and_what_came_of_them_are_as_a_chat_template_takes_them():
    function = {"name": "add", "arguments": '{"a": 1, "b": null}'}
    call = {"id": "c1", "type": "function", "function": function}
    job = chat(
        messages=[
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        tools=[TOOL],
    )
    _, assistant, tool = job.problem.messages
    assert assistant["content"] == ""
    assert assistant["tool_calls"] == [
        {**call, "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    ]
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert job.problem.tools == (TOOL,)
    assert not job.streams, "a call is one when it is whole"
    assert chat().streams


def test_log_probabilities_come_with_the_end():
    assert "top_logprobs" not in chat(logprobs=True).options
    assert not chat(logprobs=True).streams
    assert chat(logprobs=True, top_logprobs=3).options["top_logprobs"] == 3


def test_options_of_the_search():
    options = chat(
        temperature=0.5, top_p=0.9, top_k=20, seed=7, stop=["END"], max_tokens=9,
        max_completion_tokens=5,
        search={"method": "dvts", "n": 8, "width": 2, "rounds": 3, "deadline": "30s"},
    ).options  # fmt: skip
    assert options == {
        "search": "dvts", "n": 8, "width": 2, "max_rounds": 3, "temperature": 0.5, "top_p": 0.9,
        "top_k": 20, "seed": 7, "max_tokens": 5, "stop_strings": ("END",), "deadline": 30.0,
        "token_budget": 5000,
    }  # fmt: skip


def test_limits_of_the_server_hold_whatever_is_asked_for():
    options = chat(search={"deadline": "2h", "token_budget": 10**9}).options
    assert (options["deadline"], options["token_budget"]) == (60.0, 5000)


def test_seeds():
    def seed(fixed=None, **fields):
        (job,) = asked(ChatEndpoint, fixed, messages=HELLO, **fields)
        return job.options["seed"]

    assert chat(seed=-3).options["seed"] == 2**63 - 3
    assert seed() != seed(), "drawn anew"
    assert seed(search={"seed": 5}) == 5
    assert seed(11) == 11


def test_as_many_candidates_as_are_returned():
    assert chat(n=3).options.get("n") is None, "16 by default"
    assert chat(n=3, model="m:plain").options["n"] == 3
    assert chat(n=9, search={"n": 8, "width": 4}).options["n"] == 12
    assert chat(search={"n": -5}).options["n"] == -5, "the solver refuses it"


def test_names():
    assert "search" not in chat().options
    assert chat(model="m:mcts").options["search"] == "mcts"
    options = chat(model="m:plain").options
    assert (options["search"], options["n"]) == ("best-of-n", 1)
    for name in ("other", "m:nothing", "m:", ""):
        error = refused(chat, model=name)
        assert error.status in (400, 404)
        assert error.param == "model"
    efforts = {"none": 1, "minimal": 1, "low": 4, "medium": None, "high": 64, "xhigh": 64}
    for effort, n in efforts.items():  # as many as this server allows
        assert chat(reasoning_effort=effort).options.get("n") == n
    assert chat(model="m:plain", reasoning_effort="high").options["n"] == 1
    assert chat(model="m:mcts", reasoning_effort="low").options["search"] == "mcts"
    assert chat(reasoning_effort="low", search={"n": 6}).options["n"] == 6
    models = RequestReader("m", SearchSettings(), LIMITS).models()
    assert models[:2] == ["m", "m:plain"]
    assert "m:beam" in models


def test_prompts_of_completions():
    def problems(prompt):
        return [job.problem for job in asked(CompletionsEndpoint, prompt=prompt)]

    assert problems("a") == [RawPrompt("a")]
    assert problems(["a", "b"]) == [RawPrompt("a"), RawPrompt("b")]
    assert problems([1, 2]) == [RawPrompt((1, 2))]
    assert problems([[1, 2], [3]]) == [RawPrompt((1, 2)), RawPrompt((3,))]
    for bad in ([], {"a": 1}, ["a"] * 33):
        assert refused(problems, bad).param == "prompt"
