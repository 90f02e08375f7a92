"""The JSON of a request: who reads a large one holds up nobody, and the first mistake is told."""

import threading

import httpx
import pytest
from pydantic import ValidationError

from beamwright.serve import body
from beamwright.serve.body import parsed
from beamwright.serve.chat import ChatFields
from beamwright.serve.completions import CompletionFields
from beamwright.serve.errors import ApiError
from beamwright.serve.responses import ResponseFields

SAID = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": SAID}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/feed/searches", {"problem": "x"}),
    ],
)
def test_a_body_that_takes_long_to_read_holds_up_nobody(serve, monkeypatch, path, fields):
    server, statuses, come, go_on = serve(), [], threading.Event(), threading.Event()
    read_json = body.read_json

    def slow(*args):
        come.set()
        go_on.wait(30)
        return read_json(*args)

    monkeypatch.setattr(body, "read_json", slow)
    sent = fields if path.startswith("/feed") else {"model": "tiny", "seed": 1, **fields}
    asking = threading.Thread(
        target=lambda: statuses.append(server.http.post(path, json=sent).status_code)
    )
    asking.start()
    try:
        assert come.wait(30)
        assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
    finally:
        go_on.set()
        asking.join(30)
    assert statuses == [200]


MANY = 2000


@pytest.mark.parametrize(
    ("kind", "given", "param"),
    [
        (ChatFields, {"messages": [1] * MANY}, "messages[0]"),
        (ChatFields, {"messages": [*SAID, *[{}] * MANY]}, "messages[1].role"),
        (ChatFields, {"messages": [{**SAID[0], "content": [1] * MANY}]}, "messages[0].content"),
        (ChatFields, {"messages": [{**SAID[0], "tool_calls": [1] * MANY}]},
         "messages[0].tool_calls[0]"),
        (ChatFields, {"messages": SAID, "tools": [1] * MANY}, "tools[0]"),
        (ChatFields, {"messages": SAID, "stop": [1] * MANY}, "stop"),
        (CompletionFields, {"prompt": [1.5] * MANY}, "prompt"),
        (CompletionFields, {"prompt": [[1.5] * MANY]}, "prompt"),
        (CompletionFields, {"prompt": [[1]] * MANY}, "prompt"),
        (ResponseFields, {"input": [1] * MANY}, "input"),
        (ResponseFields, {"input": "x", "tools": [1] * MANY}, "tools[0]"),
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
