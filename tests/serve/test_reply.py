"""Answers as clients read them: calls of tools, log-probabilities."""

import json

import pytest

from beamwright.serve.answers import AnswerToken, calls_of
from beamwright.serve.chat import ChatEndpoint
from beamwright.serve.completions import CompletionsEndpoint

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
    content = ChatEndpoint(None).logprobs(tokens)["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == "\u00e9"
    assert content[0]["top_logprobs"][0] == {"token": "a", "logprob": -0.25, "bytes": [97]}
    assert content[1]["logprob"] == -9999.0
    assert ChatEndpoint(None).logprobs(None) is None
    assert CompletionsEndpoint(None).logprobs(tokens)["token_logprobs"] == [-0.5, -9999.0]
