"""What a request may say, and what becomes of it."""

import pytest

from beamwright.sections import SearchSettings
from beamwright.serve.body import ServerLimits, parsed
from beamwright.serve.chat import ChatFields, chat_job
from beamwright.serve.completions import CompletionFields, completion_jobs
from beamwright.serve.errors import ApiError
from beamwright.serve.options import ModelNames, RequestReader
from beamwright.serve.responses import ResponseFields, response_job
from beamwright.tree import Conversation, RawPrompt

LIMITS = ServerLimits(n=64, tokens=5000, seconds=60.0)
READER = RequestReader(ModelNames("m", SearchSettings()), LIMITS, takes_tools=True)
HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(reader=READER, **fields):
    return chat_job(reader, parsed(ChatFields, {**HELLO, **fields}))


def refused(call):
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "flex", "verbosity": "medium"},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"logit_bias": {}, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"tools": [TOOL], "tool_choice": "none", "function_call": "none", "functions": [{}]},
        {"n": 1, "store": False, "parallel_tool_calls": True, "stream_options": None},
        {"logit_bias": {"50256": 0}, "safety_identifier": "x", "prompt_cache_key": "y"},
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
        ({"verbosity": "high"}, "verbosity"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
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
        ({"messages": "Hello"}, "messages"),
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
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
    error = refused(lambda: chat(**fields))
    assert (error.status, error.param) == (400, param)
    assert error.body["error"]["type"] == "invalid_request_error"
    assert "\n" not in error.message


def test_images_are_no_text():
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    error = refused(lambda: chat(messages=[{"role": "user", "content": [part]}]))
    assert error.param == "messages[0].content[0]"


def test_messages_are_as_a_chat_template_takes_them():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ask = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        tools=[TOOL],
    )  # fmt: skip
    assert isinstance(ask.problem, Conversation)
    developer, user, assistant, tool = ask.problem.messages
    assert developer == {"role": "developer", "content": "Be brief."}
    assert user["content"] == "one\ntwo"
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert "reasoning_content" not in assistant
    assert (tool["role"], tool["content"]) == ("tool", "2")
    assert ask.tools
    assert ask.problem.tools == (TOOL,)


def test_tools_need_a_template_that_shows_them():
    plain = RequestReader(ModelNames("m", SearchSettings()), LIMITS, takes_tools=False)
    assert refused(lambda: chat(plain, tools=[TOOL])).param == "tools"
    assert not chat(plain, tools=[TOOL], tool_choice="none").tools
    assert not chat(plain, tools=[]).tools


def test_options_of_the_search():
    ask = chat(
        temperature=0.5, top_p=0.9, top_k=20, seed=7, stop=["END"], max_tokens=9,
        max_completion_tokens=5,
        search={"method": "dvts", "n": 8, "width": 2, "rounds": 3, "deadline": "30s"},
    ).options  # fmt: skip
    assert (ask["search"], ask["n"], ask["width"], ask["max_rounds"]) == ("dvts", 8, 2, 3)
    assert (ask["temperature"], ask["top_p"], ask["top_k"], ask["seed"]) == (0.5, 0.9, 20, 7)
    assert (ask["max_tokens"], ask["stop_strings"], ask["deadline"]) == (5, ("END",), 30.0)
    assert ask["token_budget"] == 5000


def test_limits_of_the_server_hold_whatever_is_asked_for():
    ask = chat(search={"deadline": "2h", "token_budget": 10**9}).options
    assert (ask["deadline"], ask["token_budget"]) == (60.0, 5000)


def test_seeds():
    assert chat(seed=-3).seed == 2**63 - 3
    assert chat(seed=-9007199254740991).seed > 0
    assert chat().seed != chat().seed, "drawn anew"
    assert chat(search={"seed": 5}).seed == 5
    fixed = RequestReader(ModelNames("m", SearchSettings()), LIMITS, takes_tools=False, seed=11)
    assert chat(fixed).seed == 11


def test_as_many_candidates_as_are_returned():
    assert chat(n=3).options.get("n") is None, "16 by default"
    assert chat(n=3, model="m:plain").options["n"] == 3
    assert chat(n=9, search={"n": 8, "width": 4}).options["n"] == 12
    assert chat(search={"n": -5}).options["n"] == -5, "the solver refuses it"


def test_names_and_efforts():
    assert "search" not in chat().options
    assert chat(model="m:mcts").options["search"] == "mcts"
    plain = chat(model="m:plain")
    assert (plain.options["search"], plain.options["n"]) == ("best-of-n", 1)
    assert plain.is_plain
    assert chat(reasoning_effort="low").options["n"] == 4
    assert chat(reasoning_effort="high").options["n"] == 64
    assert chat(reasoning_effort="none").is_plain
    assert chat(reasoning_effort="low", search={"n": 6}).options["n"] == 6
    for name in ("other", "m:nothing", "m:", ""):
        error = refused(lambda name=name: chat(model=name))
        assert error.status in (400, 404)
        assert error.param == "model"
    ids = ModelNames("m", SearchSettings()).ids()
    assert ids[:2] == ["m", "m:plain"]
    assert "m:beam" in ids


def test_prompts_of_completions():
    def problems(prompt):
        fields = parsed(CompletionFields, {"model": "m", "prompt": prompt})
        return [ask.problem for ask in completion_jobs(READER, fields)]

    assert problems("a") == [RawPrompt("a")]
    assert problems(["a", "b"]) == [RawPrompt("a"), RawPrompt("b")]
    assert problems([1, 2]) == [RawPrompt((1, 2))]
    assert problems([[1, 2], [3]]) == [RawPrompt((1, 2)), RawPrompt((3,))]
    assert refused(lambda: problems([])).param == "prompt"
    assert refused(lambda: problems({"a": 1})).param == "prompt"
    assert refused(lambda: problems(["a"] * 33)).param == "prompt"


def test_items_of_responses():
    def ask(**fields):
        return response_job(READER, parsed(ResponseFields, {"model": "m", **fields}))

    assert ask(input="Hi").problem.messages == ({"role": "user", "content": "Hi"},)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "function_call_output", "output": [{"type": "input_text", "text": "4"}]},
    ]
    tool = {"type": "function", "name": "add", "parameters": {}}
    found = ask(input=items, instructions="Be brief.", tools=[tool], reasoning={"effort": "low"})
    roles = [each["role"] for each in found.problem.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool"]
    assert found.problem.messages[-1]["content"] == "4"
    assert found.problem.tools[0]["function"]["name"] == "add"
    assert found.options["n"] == 4
    for bad in ([], [{"type": "image"}], [{"role": "user"}], [{"content": "x"}]):
        assert refused(lambda bad=bad: ask(input=bad)).param.startswith("input")
    assert (
        refused(lambda: ask(input="x", text={"format": {"type": "json_schema"}})).param
        == "text.format"
    )
