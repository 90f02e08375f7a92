"""Real clients, real jobs, and a real `beamwright serve` of the bundled models.

None of the clients is needed: those that are there are tried.
"""

import gc
import json
import subprocess
import sys
from functools import partial

import httpx
import pytest

from served import until

# They leave sockets and loops to the garbage collector.
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

EGGS = "Jack has 70 eggs. In April Jack gets 9 eggs. How many eggs does Jack have now?"
MESSAGES = [{"role": "user", "content": EGGS}]
LONG = [{"role": "user", "content": "apples " * 3000}]
KEY = "none"


@pytest.fixture(scope="module")
def url():
    command = [sys.executable, "-m", "beamwright", "serve", "--port", "0", "--json", "--n", "8"]
    with subprocess.Popen([*command, "--seed", "1"], stdout=subprocess.PIPE, text=True) as server:
        yield json.loads(server.stdout.readline())["base_url"]
        server.terminate()


@pytest.fixture(autouse=True)
def left_to_gc():
    yield
    gc.collect()


@pytest.fixture
def client(url):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_chats(client):
    create = partial(client.chat.completions.create, model="bundled", messages=MESSAGES, seed=7)
    whole = [choice.message.content for choice in create(n=3).choices]
    assert "79" in whole[0]
    texts = ["", "", ""]
    for chunk in create(n=3, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == whole
    assert chunk.usage.completion_tokens > 0
    with client.chat.completions.stream(model="bundled", messages=MESSAGES, seed=7) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole[0]
    history = [*MESSAGES, create().choices[0].message.model_dump(), *MESSAGES]
    assert create(messages=history).choices
    found = create(extra_body={"search": {"method": "best-of-n", "n": 6, "width": 1}})
    assert (found.search["method"], found.search["n"]) == ("best-of-n", 6)
    with create(stream=True, extra_body={"search": {"method": "best-of-n", "n": 64}}) as stream:
        next(iter(stream))
    health = str(client.base_url.join("/health"))
    until(lambda: httpx.get(health).json()["searches"] == 0)


def test_a_written_answer_is_streamed_as_it_is_returned(client):
    """No text of a candidate is sent before the model has written its answer."""
    asked = {"model": "bundled:heavy", "messages": MESSAGES, "seed": 7}
    create = partial(client.chat.completions.create, **asked, max_tokens=60)
    whole = create().choices[0].message.content
    with create(stream=True) as stream:
        sent = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert sent == whole


def test_openai_completions_and_responses(client):
    done = client.completions.create(model="bundled:plain", prompt=f"{EGGS}\n\n", logprobs=1)
    known = done.choices[0].logprobs
    assert len(known.tokens) == len(known.top_logprobs) == len(known.text_offset) > 0
    create = partial(client.responses.create, model="bundled", extra_body={"seed": 7})
    first = create(input=EGGS, text={"verbosity": "medium"})
    assert "79" in first.output_text
    assert create(input=[*MESSAGES, *first.output, *MESSAGES], truncation="auto").output_text
    kinds = [event.type for event in create(input=EGGS, stream=True)]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(url, stream):
    litellm = pytest.importorskip("litellm")
    given = {"api_base": url, "api_key": KEY, "max_retries": 0, "stream": stream}
    reply = litellm.completion(model="openai/bundled", messages=MESSAGES, **given)
    if stream:
        reply = litellm.stream_chunk_builder([*reply])
    assert "79" in reply.choices[0].message.content
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model="openai/bundled", messages=LONG, **given)
