"""Thoughts over HTTP: told apart from what is said, and as long as a request lets them be."""

import json

import pytest

pytest.importorskip("fastapi")

from beamwright import Solver
from beamwright.models.hub import BUNDLED
from beamwright.sections import SearchSettings
from beamwright.serve.body import ApiError, ServerLimits, parse_fields
from beamwright.serve.chat import ChatFields
from beamwright.serve.job import RequestReader, thinking_option
from served import Served, text_of
from tables import beside

CASES = beside(__file__)

PROBLEM = json.loads((BUNDLED / "test.jsonl").read_text().splitlines()[0])["problem"]
OPTIONS = {"search": "majority", "n": 2, "verifier": "none", "max_tokens": 500}


@pytest.fixture(scope="module")
def server():
    with Solver(model="bundled:thinking", **OPTIONS) as solver, Served(solver) as server:
        yield server


@pytest.fixture(scope="module")
def whole(server):
    return server.chat(PROBLEM, seed=1).json()


@pytest.fixture(scope="module")
def alone(server):
    """The message of the model without a search."""
    reply = server.chat(PROBLEM, seed=1, model="tiny:plain", logprobs=True).json()
    (choice,) = reply["choices"]
    said = b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"])
    assert said.decode().strip() == choice["message"]["content"].strip()
    return choice["message"]


def test_what_was_thought_is_beside_what_is_said_under_both_names(server, whole):
    message = whole["choices"][0]["message"]
    assert "\\boxed{" in message["content"]
    assert "\\boxed{" not in message["reasoning"] != ""
    assert message["reasoning_content"] == message["reasoning"]
    assert "think>" not in json.dumps(message)
    used, search = whole["usage"], whole["usage"]["search"]
    assert 0 < search["thought_tokens"] <= used["completion_tokens_details"]["reasoning_tokens"]


def test_a_stream_says_the_same_the_thought_first(server, alone):
    events = server.stream(
        messages=[{"role": "user", "content": PROBLEM}], seed=1, model="tiny:plain"
    )
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    names = [name for each in deltas for name in ("reasoning", "content") if each.get(name)]
    thought = "".join(each.get("reasoning", "") for each in deltas)
    assert (thought, text_of(events)) == (alone["reasoning"], alone["content"])
    assert names == sorted(names, reverse=True)


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_thoughts_that_nobody_wants_to_read_are_not_told(server, whole, fields):
    reply = server.chat(PROBLEM, seed=1, **fields).json()
    assert reply["search"]["tree_hash"] == whole["search"]["tree_hash"]
    assert "reasoning" not in json.dumps(reply["choices"])
    events = server.stream(messages=[{"role": "user", "content": PROBLEM}], seed=1, **fields)
    assert "reasoning" not in json.dumps([event["choices"] for event in events])


@pytest.mark.parametrize("where", ["thought", "said", "both", "between"])
def test_stop_strings_end_an_answer_and_no_thought(server, alone, where):
    asked = {"model": "tiny:plain", "seed": 1}
    thought, said = alone["reasoning"], alone["content"]
    stop = {"thought": thought[4:12], "said": said[9:12], "both": "=", "between": "\n"}[where]
    assert (where == "said") or stop in thought
    stopped = said[: said.find(stop)] if stop in said else said
    (choice,) = server.chat(PROBLEM, stop=[stop], **asked).json()["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == (thought, stopped)
    body = {"model": "tiny:plain", "prompt": f"{PROBLEM}\n\n", "seed": 1, "stop": [stop]}
    (whole,) = server.http.post("/v1/completions", json=body).json()["choices"]
    assert stop not in whole["text"], "what is continued as it is has no thoughts"
    assert "reasoning" not in whole


def test_a_response_has_an_item_for_the_thought(server):
    body = {"model": "tiny:plain", "input": PROBLEM, "seed": 1}
    thought, message = server.http.post("/v1/responses", json=body).json()["output"]
    assert (thought["type"], message["type"]) == ("reasoning", "message")
    assert "\\boxed{" in message["content"][0]["text"]
    asked = [{"role": "user", "content": text} for text in (PROBLEM, "Are you sure?")]
    again = {**body, "input": [asked[0], thought, message, asked[1]], "max_output_tokens": 4}
    assert server.http.post("/v1/responses", json=again).status_code == 200
    lines = server.http.post("/v1/responses", json={**body, "stream": True}).text.splitlines()
    shown = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [each["sequence_number"] for each in shown] == [*range(len(shown))]
    kinds = [each["type"].removeprefix("response.") for each in shown]
    assert kinds[1:5] == [
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done"
    ]  # fmt: skip
    said = {each["type"]: each for each in shown}
    assert said["response.reasoning_text.done"]["text"] == thought["content"][0]["text"]
    assert said["response.output_text.done"]["text"] == message["content"][0]["text"]
    assert said["response.output_text.done"]["output_index"] == 1


@pytest.mark.parametrize("fields", CASES["switched_off"])
def test_thinking_is_switched_off(server, fields):
    reply = server.chat(PROBLEM, seed=1, **fields).json()
    assert reply["usage"]["search"]["thought_tokens"] == 0
    assert "reasoning" not in reply["choices"][0]["message"]


def test_a_budget_is_kept(server):
    reply = server.chat(PROBLEM, seed=1, model="tiny:plain", thinking_token_budget=20).json()
    assert 0 < reply["usage"]["search"]["thought_tokens"] <= 21
    assert "\\boxed{" in reply["choices"][0]["message"]["content"]


# --- what is asked, without a model ---------------------------------------------------------------


def asked(max_tokens=None, context=32768, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], **fields}
    return thinking_option(parse_fields(ChatFields, body), context, max_tokens)


@pytest.mark.parametrize(("fields", "thinking"), CASES["budgets"])
def test_budgets_and_efforts(fields, thinking):
    assert asked(fields.pop("max_tokens", None), **fields) == thinking


@pytest.mark.parametrize(("fields", "param", "said"), CASES["contradictions"])
def test_what_contradicts_itself_is_one_line(fields, param, said):
    with pytest.raises(ApiError, match=said) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_search_object_is_asked_last():
    reader = RequestReader("m", SearchSettings(), ServerLimits(), thought_base_tokens=1024)
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "reasoning_effort": "low"}
    for more, thinking in (({}, 128), ({"search": {"thinking": 9}}, 9)):
        job = reader.make_job(parse_fields(ChatFields, {**body, **more}), "?")
        assert job.options["thinking"] == thinking
