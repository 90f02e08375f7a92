"""Answers as clients read them: streams, event by event, calls of tools, log-probabilities."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from beamwright.errors import InputError
from beamwright.serve.answers import AnswerToken, calls_of
from beamwright.serve.chat import ChatEndpoint
from beamwright.serve.choices import ChoiceChunks
from beamwright.serve.completions import CompletionsEndpoint
from beamwright.serve.job import RoundSummary, SearchJob

CHAT = ChatEndpoint(SimpleNamespace(fingerprint="bw"))


def deltas_of(*texts):
    """Of a chat in whose rounds these texts become final."""
    job, found = SearchJob("tiny", "Hi", {}), []
    chunks = ChoiceChunks(CHAT, [job], with_usage=False, with_search=True)

    async def read():
        async for event in chunks.events():
            found.append(json.loads(event.removeprefix(b"data: ")))

    async def search():
        reading = asyncio.create_task(read())
        for number, text in enumerate(texts, 1):
            job.hear(text, RoundSummary(number, 8, 4, 4, 0, 0.5, 10 * number))
            for _ in range(10):  # it is read until it waits
                await asyncio.sleep(0)
        reading.cancel()

    asyncio.run(search())
    return [event["choices"][0]["delta"] for event in found]


def test_rounds_that_come_with_the_end_are_told_of_too():
    async def read():
        job = SearchJob("tiny", "Hi", {})
        for number in (1, 2):
            job.hear("", RoundSummary(number, 8, 4, 4, 0, 0.5, 10))
        job.settle(InputError("no"))
        chunks = ChoiceChunks(CHAT, [job], with_usage=False, with_search=True)
        return [event async for event in chunks.events()]

    events = asyncio.run(read())
    assert sum(b'"number"' in event for event in events) == 2
    assert b'"error"' in events[-2]
    assert events[-1] == b"data: [DONE]\n\n"


def test_there_is_one_thought_and_then_one_text():
    deltas = deltas_of("", "", "One", "One two", "One two three")
    kinds = [name for delta in deltas for name in ("reasoning", "content") if delta.get(name)]
    assert kinds == ["reasoning"] * 3 + ["content"] * 3
    assert "".join(delta.get("content", "") for delta in deltas) == "One two three"
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_calls_are_taken_out_of_the_text():
    text, (first, second) = calls_of(f"Let me add. {CALL}\n{CALL}")
    assert text == "Let me add."
    assert first["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert first["id"] != second["id"]
    assert json.loads(second["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>{not json}</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"}',
        '<tool_call>{"name": "add"}</tool_call> <tool_call>{"name"}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(text):
    assert calls_of(text) == (text, ())


def test_half_a_character_is_a_token_of_its_own():
    data = "\u00e9".encode()
    tokens = [AnswerToken(data[:1], -0.5, ((b"a", -0.25),)), AnswerToken(data[1:], float("-inf"))]
    content = CHAT.logprobs(tokens)["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == "\u00e9"
    assert content[0]["top_logprobs"][0] == {"token": "a", "logprob": -0.25, "bytes": [97]}
    assert content[1]["logprob"] == -9999.0
    assert CHAT.logprobs(None) is None
    assert CompletionsEndpoint(None).logprobs(tokens)["token_logprobs"] == [-0.5, -9999.0]
