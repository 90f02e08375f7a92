"""The API as its clients see it: over a socket, a real search behind it."""

import asyncio
import json
import re
from functools import reduce
from operator import getitem
from threading import Event

import pytest

from beamwright.serve import endpoint
from beamwright.serve.answers import split_tool_calls
from served import ASKED, PATIENCE, Gate, text_of
from tables import beside

CASES = beside(__file__)

JSON = {"content-type": "application/json"}


def test_a_chat_is_the_search_that_solve_does(served):
    found = served.chat(seed=3).json()
    solution = served.solver.solve(ASKED, seed=3)
    warnings = list(solution.warnings)
    assert warnings, "random weights state no answer"
    assert (
        found["search"]["warnings"] == served.stream(seed=3)[-1]["search"]["warnings"] == warnings
    )
    (run, *_) = served.http.get("/feed/searches").json()["searches"]
    lines = served.http.get(f"/feed/searches/{run['id']}").text.splitlines()
    assert json.loads(lines[-1])["warnings"] == warnings
    assert found["search"]["tree_hash"] == solution.tree_hash
    (choice,) = found["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": solution.text, "refusal": None
    }  # fmt: skip
    assert choice["finish_reason"] == ("stop" if solution.stop == "eos" else "length")
    assert (found["object"], found["model"]) == ("chat.completion", "tiny")
    usage = found["usage"]
    assert usage["completion_tokens"] == solution.tokens.generated
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["completion_tokens_details"]["reasoning_tokens"] < solution.tokens.generated
    assert found["search"]["seed"] == 3


@pytest.mark.parametrize("method", ["beam", "dvts", "mcts", "best-of-n", "", "plain"])
def test_a_stream_says_what_the_whole_answer_does(served, method):
    name = f"tiny:{method}" if method else "tiny"
    for seed in range(2):
        whole = served.chat(model=name, seed=seed).json()
        events = served.stream(model=name, seed=seed)
        assert text_of(events) == whole["choices"][0]["message"]["content"]
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(event["object"] == "chat.completion.chunk" for event in events)
        assert len({event["id"] for event in events}) == 1
        ends = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
        assert ends == [whole["choices"][0]["finish_reason"]]
        assert events[-1]["search"]["tree_hash"] == whole["search"]["tree_hash"]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        told = [name for d in deltas for name in ("reasoning", "content") if d.get(name)]
        assert told == sorted(told, reverse=True), "thoughts come before the text"
        assert ("reasoning" in told) == (method != "plain" and whole["search"]["rounds"] > 1)


@pytest.mark.parametrize(
    ("path", "fields", "first"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": ASKED}]}, '{"content": '),
        ("completions", {"prompt": ASKED}, '"text": '),
        ("responses", {"input": ASKED}, "response.output_item.added"),
    ],
    ids=["chat", "completions", "responses"],
)
def test_a_slow_client_misses_nothing(served, monkeypatch, path, fields, first):
    """It takes the beginning of the text, and what follows when the search has ended."""
    took = Event()

    async def slowly(parts):
        async for part in parts:
            yield part
            if first.encode() in part and not took.is_set():
                took.set()
                while served.queue.jobs:
                    await asyncio.sleep(0.01)

    class Waits(Gate):
        def on_round(self, job, report):
            assert report.round == 1 or took.wait(PATIENCE)

    monkeypatch.setattr(endpoint, "_with_comments", slowly)
    monkeypatch.setattr(served.queue, "listeners", [*served.queue.listeners, Waits()])
    body = {"model": "tiny:plain", "seed": 1, "search": {"ignore_eos": True}, **fields}
    response = served.http.post(f"/v1/{path}", json={**body, "stream": True})
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    whole = served.http.post(f"/v1/{path}", json=body).json()
    assert "".join(map(said_in, events)) == said_in(whole)
    assert took.is_set()
    if path == "responses":
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        assert (whole["object"], whole["store"]) == ("response", False)


def said_in(reply):
    """The text of a whole reply, or of an event of one."""
    if "choices" in reply:
        (choice,) = reply["choices"]
        said = choice.get("message") or choice.get("delta") or choice
        return said.get("content") or said.get("text") or ""
    if "output" in reply:
        return reply["output"][0]["content"][0]["text"]
    return reply["delta"] if reply["type"] == "response.output_text.delta" else ""


def test_usage_and_rounds_are_streamed_where_they_are_asked_for(served):
    *events, last = served.stream(
        stream_options={"include_usage": True}, search={"events": True}, seed=1
    )
    assert (last["choices"], last["usage"]["completion_tokens"] > 0) == ([], True)
    assert all(event["usage"] is None for event in events)
    rounds = [event for event in events if "number" in event.get("search", {})]
    assert [each["search"]["number"] for each in rounds] == list(range(1, len(rounds) + 1))
    assert all(event["choices"][0]["delta"] == {} for event in rounds)


def test_several_choices_are_the_best_of_the_candidates(served):
    found = served.chat(n=3, seed=2).json()
    solution = served.solver.solve(ASKED, seed=2)
    texts = [choice["message"]["content"] for choice in found["choices"]]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert texts[0] == solution.text
    others = sorted((c.score for c in solution.candidates), reverse=True)
    others.remove(solution.score)
    scores = [candidate["score"] for candidate in found["search"]["candidates"]]
    assert scores == pytest.approx([solution.score, *others[:2]])
    events = served.stream(n=3, seed=2)
    assert [text_of(events, index) for index in range(3)] == texts


def test_every_token_of_an_answer_has_its_own_log_probability(served):
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 3}):
        found = served.chat(seed=4, **fields).json()["choices"][0]
        content = found["logprobs"]["content"]
        said = b"".join(bytes(token["bytes"]) for token in content)
        assert said.decode() == found["message"]["content"]
        assert all(token["logprob"] <= 0 for token in content)
        for token in content:
            assert len(token["top_logprobs"]) == fields.get("top_logprobs", 0)
            best = [other["logprob"] for other in token["top_logprobs"]]
            assert best == sorted(best, reverse=True)
    events = served.stream(seed=4, logprobs=True)
    pieces = [c for e in events for c in e["choices"] if c["logprobs"]]
    said = "".join(token["token"] for c in pieces for token in c["logprobs"]["content"])
    assert said == text_of(events) == found["message"]["content"]


def test_prompts_of_a_completion_are_choices_in_their_order(served):
    body = {"model": "tiny:plain", "prompt": ["one two", "three"], "seed": 1}
    found = served.http.post("/v1/completions", json=body).json()
    events = served.stream("/v1/completions", **body)
    for index, choice in enumerate(found["choices"]):
        pieces = [c["text"] for e in events for c in e["choices"] if c["index"] == index]
        assert (choice["index"], "".join(pieces)) == (index, choice["text"])
    assert found["object"] == events[0]["object"] == "text_completion"
    assert [each["seed"] for each in found["search"]] == [1, 1]


@pytest.mark.parametrize("fields", [{}, {"stop": ["e"]}, {"max_tokens": 3}])
def test_a_completion_has_all_that_is_known_of_its_tokens(served, fields):
    body = {"model": "tiny:plain", "prompt": "one two", "seed": 4, "return_token_ids": True}
    plain = served.http.post("/v1/completions", json={**body, **fields}).json()
    found = served.http.post("/v1/completions", json={**body, **fields, "logprobs": 1}).json()
    assert found["search"]["tree_hash"] == plain["search"]["tree_hash"]
    (choice,) = found["choices"]
    known, text = choice["logprobs"], choice["text"]
    assert {len(each) for each in known.values()} == {len(choice["token_ids"])}
    assert "".join(known["tokens"]).startswith(text)
    for token, logprob, top in zip(
        known["tokens"], known["token_logprobs"], known["top_logprobs"], strict=True
    ):
        assert 1 <= len(top) <= 2
        assert top[token] == pytest.approx(logprob, abs=1e-4)
        assert max(top.values()) >= logprob
    for token, offset in zip(known["tokens"], known["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token[: len(text) - offset]


def test_the_document_says_what_bodies_hold(served):
    document = served.http.get("/openapi.json").json()
    for path in ("chat/completions", "completions", "responses"):
        body = document["paths"][f"/v1/{path}"]["post"]["requestBody"]
        schema = body["content"]["application/json"]["schema"]
        for reference in re.findall('"[$]ref": "#/([^"]*)"', json.dumps(schema)):
            names = [part.replace("~1", "/") for part in reference.split("/")]
            assert reduce(getitem, names, document)["type"] == "object"
        assert schema["properties"]["model"]["enum"][:2] == ["tiny", "tiny:plain"]
        assert schema["properties"]["n"]["anyOf"][0]["minimum"] == 1
        assert schema["properties"]["user"] == {}
        assert schema["properties"]["store"] == {"enum": [None, False]}
        assert schema["additionalProperties"] is False
    assert not [path for path in document["paths"] if path.startswith(("/page", "/docs"))]


@pytest.mark.parametrize(("method", "path", "status", "name", "value"), CASES["addresses"])
def test_a_model_health_and_what_there_is_not(served, method, path, status, name, value):
    response = served.http.request(method, path)
    found = response.json()
    assert response.status_code == status
    if name is None:
        assert set(found["error"]) == {"message", "type", "param", "code"}
    else:
        assert found[name] == value


CHAT = "chat/completions"


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        *CASES["errors"],
        (CHAT, {"search": {"deadline": 10**400}}, 400, "search.deadline"),
        *((CHAT, {"messages": [{"role": "user", "content": "word " * words}], "stream": streams},
           400, "messages") for words in (500, 50_000) for streams in (False, True)),
        ("completions", {"prompt": "word " * 500}, 400, "prompt"),
        ("responses", {"input": "word " * 500}, 400, "input"),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(served, path, fields, status, param):
    messages = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {}
    content = json.dumps({"model": "tiny", **messages, **fields})
    response = served.http.post(f"/v1/{path}", content=content, headers=JSON)
    assert response.status_code == status, response.text
    if status != 200:
        assert response.json()["error"]["param"] == param
        assert response.headers["x-should-retry"] == "false"
    if "word word" in content:  # LiteLLM, LangChain and others go by OpenAI's words, or the code
        assert '"code": "context_length_exceeded"' in response.text
        known = f"This model's maximum context length is {served.solver.context} tokens"
        told = rf"{known}\. However, .* resulted in \d+ tokens\. \(context_length_exceeded\)"
        assert re.fullmatch(told, response.json()["error"]["message"])
    assert response.headers["x-request-id"].startswith("req_")
    assert not served.queue.jobs


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SHOWS_TOOLS = (
    "{% for t in tools or [] %}tool {{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
)


def test_tools_are_shown_to_a_model_that_knows_them(serve):
    server = serve(search={"chat_template": SHOWS_TOOLS})
    plain, shown = server.chat(seed=1).json(), server.chat(seed=1, tools=TOOLS).json()
    assert shown["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    dropped = server.chat(seed=1, tools=TOOLS, tool_choice="none").json()
    assert dropped["search"]["tree_hash"] == plain["search"]["tree_hash"]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    assert server.chat(messages=said, tools=TOOLS).status_code == 200
    for name in ("\ud800", "x" * 100_000):
        tools = [{"type": "function", "function": {"name": name}}]
        body = {"model": "tiny", "messages": said[:1], "tools": tools}
        response = server.http.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def test_a_request_s_arguments_of_the_template_are_its_own(serve):
    shown = SHOWS_TOOLS + "{% if think is defined and think %}the the the{% endif %}"
    server = serve(search={"chat_template": shown, "template_args": {"think": True}})
    usual, same, other = (
        server.chat(seed=1, chat_template_kwargs=args).json()
        for args in (None, {"think": True}, {"think": False, "odd": 1})
    )
    assert usual["usage"]["prompt_tokens"] > other["usage"]["prompt_tokens"]
    assert usual["search"]["tree_hash"] == same["search"]["tree_hash"]
    assert other["search"]["receipt"]["problem"]["template_args"] == {"think": False, "odd": 1}
    said = "--template-args: the chat template does not read odd"
    assert said in other["search"]["warnings"]
    assert said not in same["search"]["warnings"]
    refused = server.chat(chat_template_kwargs={"tokenize": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_an_agent_s_loop(serve, monkeypatch):
    """An agent's loop, with a model that is made to call."""
    server = serve(search={"chat_template": SHOWS_TOOLS})
    calls = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    monkeypatch.setattr(
        "beamwright.serve.answers.split_tool_calls",
        lambda text: split_tool_calls(f"Let me add. {calls}" if len(messages) == 1 else text),
    )
    messages = [{"role": "user", "content": "1+2?"}]
    fields = {"model": "tiny", "messages": messages, "tools": TOOLS, "seed": 1}
    events = server.stream(**fields)
    while True:
        choice = server.chat(**fields).json()["choices"][0]
        message = choice["message"]
        messages.append(message)
        if "tool_calls" not in message:
            break
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Let me add.")
        for call in message["tool_calls"]:
            total = str(sum(json.loads(call["function"]["arguments"]).values()))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": total})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["content"] == "3"
    choices = [choice for event in events for choice in event["choices"]]
    assert text_of(events) == "Let me add."
    (called,) = [c["delta"]["tool_calls"] for c in choices if "tool_calls" in c["delta"]]
    assert (called[0]["index"], called[0]["function"]["name"]) == (0, "add")
    assert choices[-1]["finish_reason"] == "tool_calls"
