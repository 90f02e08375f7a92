"""What all replies have in common: a stream that is silent says that it is there."""

import asyncio

import pytest

from beamwright.serve import endpoint
from beamwright.serve.body import ApiError


class Silent(endpoint.Endpoint):
    """Two parts, far from each other."""

    def read(self, body):
        raise NotImplementedError

    def whole(self):
        raise NotImplementedError

    async def parts(self):
        yield b"first"
        await asyncio.sleep(0.5)
        yield b"second"
        raise ApiError(400, "enough")

    def failed(self, error):
        return error.message.encode()


@pytest.fixture
def sent(monkeypatch):
    monkeypatch.setattr(endpoint, "QUIET_S", 0.1)

    async def read():
        return [part async for part in Silent(None)._events()]

    return asyncio.run(read())


def test_comments_are_sent_where_nothing_else_is(sent):
    silent = sent[1 : sent.index(b"second")]
    assert silent
    assert set(silent) == {endpoint.COMMENT}


def test_what_fails_in_a_stream_is_its_last_event(sent):
    assert sent[sent.index(b"second") + 1 :] == [b"enough", b""]
