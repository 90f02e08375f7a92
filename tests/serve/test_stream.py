"""What a stream says of a search, event by event."""

import asyncio
import json
from types import SimpleNamespace

from beamwright.errors import InputError
from beamwright.serve.chat import ChatEndpoint
from beamwright.serve.choices import ChoiceChunks
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
