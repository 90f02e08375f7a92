"""The client of completion servers: dialects, failures, what is given up."""

import asyncio
import json
import threading
import time
from email.utils import formatdate

import pytest

from beamwright.remote import connection
from beamwright.remote import generator as client
from beamwright.sections import SamplingSettings
from scripted_server import (
    answered,
    choice,
    piece,
    question,
    refuses,
    said,
    speaking,
    waited,
)
from tables import beside

ASKED = beside(__file__)

# --- dialects --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "ids", "extras", "token_ids", "streams"),
    [
        ({}, True, True, True, False),
        ({"names": False}, True, True, True, False),
        ({"ids": False}, False, True, True, False),
        ({"extras": False}, True, False, False, False),
        ({"extras": False, "names": False, "ids": False}, False, False, False, True),
    ],
)
def test_it_finds_out_what_a_server_understands(
    codec, source_of, server, ids, extras, token_ids, streams
):
    with speaking(codec, then=lambda body: said(choice("x")), **server) as running:
        source = source_of(running)
        if not source.dialect.streams:
            assert answered(source, question(codec, "a b")).error is None
            assert (running.asked[0]["prompt"] == "a b") == (not ids)
            assert running.asked[0].get("add_special_tokens") == (None if ids else False)
    assert (source.dialect.ids, source.dialect.extras) == (ids, extras)
    assert (source.token_ids, source.dialect.streams) == (token_ids, streams)


def test_a_question_says_what_was_asked_and_nothing_else(codec, source_of):
    with speaking(codec, then=lambda body: said(choice("x\n\n", stop_reason="\n\n"))) as server:
        source = source_of(server)
        answered(source, question(codec))
        sampling = SamplingSettings(temperature=0.7, top_k=7, min_p=0.1, top_p=0.9)
        more = {"count": 3, "sampling": sampling, "ignore_eos": True, "stops": tuple("abcdef")}
        answered(source, question(codec, **more))
    plain, full = server.asked
    assert plain == {**ASKED, "prompt": codec.encode("one two")}
    wanted = {"n": 3, "top_k": 7, "min_p": 0.1, "top_p": 0.9, "ignore_eos": True}
    assert {name: full[name] for name in wanted} == wanted
    assert full["stop"] == list("abcd")  # OpenAI and vLLM take no more


@pytest.mark.parametrize(
    ("fields", "ended", "text"),
    [
        ({"text": "a\n\n", "stop_reason": "\n\n"}, "stop", "a\n\n"),
        ({"text": "a", "stop_reason": "\n\n"}, "stop", "a\n\n"),
        ({"text": "a", "matched_stop": "\n\n"}, "stop", "a\n\n"),
        ({"text": "a", "stop_reason": 2}, "eos", "a"),
        ({"text": "a", "finish_reason": "length"}, "length", "a"),
        ({"text": ""}, "eos", ""),
    ],
)
def test_what_a_reply_says(reply_to, fields, ended, text):
    known = {"token_ids": [7, 8], "logprobs": {"tokens": ["x"], "token_logprobs": [-0.5, None]}}
    usage = {"prompt_tokens": 11, "prompt_tokens_details": {"cached_tokens": 8}}
    reply, _ = reply_to(lambda body: said(choice(**fields, **known), **usage))
    (written,) = reply.written
    assert (written.ended, written.text) == (ended, text)
    assert (written.token_ids, written.logprobs) == ((7, 8), (-0.5,))
    assert (reply.prompt_tokens, reply.cached_tokens, reply.tries) == (11, 8, 1)


# --- texts that are read as they are written -------------------------------------------------


def test_a_text_is_left_where_it_stops(codec, source_of):
    """Such a server says neither which stop it was nor shows it: it is not told of any."""

    def answer(body):
        assert body["stream"]
        assert "stop" not in body
        logprobs = {"token_logprobs": [-0.25]}
        return iter([piece("on", logprobs=logprobs), piece("e\n"), *[piece("\nmore ")] * 200_000])

    with speaking(codec, extras=False, names=False, then=answer) as server:
        source = source_of(server)
        assert source.most == 1
        (written,) = answered(source, question(codec)).written
        assert server.gone.wait(10)
    assert (written.text, written.ended) == ("one\n\n", "stop")
    assert written.token_ids is None
    assert written.logprobs == (-0.25,)


PIECES = [piece("on", error=None), piece("e ", finish_reason=""), piece("two\u2028"),
          piece("", finish_reason="stop")]  # fmt: skip


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("begins", ["", "\ufeff", ": a remark\n\n", "event: x\nid: 1\nretry: 5\n"])
@pytest.mark.parametrize("form", ["one line", "several lines", "no blank", "no blank after data:"])
@pytest.mark.parametrize("ends", ["data: [DONE]\n\n", "", "data: [DONE]"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_server_sent_events_are_read_as_the_standard_says(newline, begins, form, ends, size):
    """Marks of the byte order, all ends of lines, several lines of data, a last one without end."""
    indent = 1 if form == "several lines" else None
    texts = [json.dumps(each, indent=indent, ensure_ascii=False) for each in PIECES]
    blank = "" if form == "no blank" else "\n"
    lines = ["".join(f"data: {line}\n" for line in text.split("\n")) + blank for text in texts]
    stream = begins + "".join(lines) + ends
    stream = stream if ends else stream.rstrip("\n")
    stream = stream.replace("data: ", "data:") if form == "no blank after data:" else stream
    whole = stream.replace("\n", newline).encode()

    async def read():
        async def chunks():
            for start in range(0, len(whole), size):
                yield whole[start : start + size]
            yield b"\n\n"  # as of every reply

        return [event async for event in connection.read_events(chunks())]

    assert asyncio.run(read()) == PIECES


def test_a_text_that_breaks_off_is_no_end(reply_to):
    """Some servers drop a request for the next one; it is asked again."""
    logprobs = [{"token_logprobs": [value]} for value in (None, -1.0)]
    whole = [piece("one", logprobs=logprobs[0])]
    whole += [piece(" two", logprobs=logprobs[1], finish_reason="stop")]
    whole[0]["choices"][0]["finish_reason"] = ""  # as some say for none
    replies = [iter(whole[:1]), iter(whole)]
    reply, _ = reply_to(lambda body: replies.pop(0), streams=True)
    (written,) = reply.written
    assert (written.text, written.ended, written.logprobs) == ("one two", "eos", (-1.0,))
    assert reply.tries == 2


# --- what goes wrong -------------------------------------------------------------------------


def test_what_may_pass_is_tried_again(reply_to):
    aborted = said(choice("x", finish_reason="abort"))
    replies = [None, refuses("busy", 503), refuses("slow down", 429), aborted, said(choice("x"))]
    reply, server = reply_to(lambda body: replies.pop(0), tries=8)
    assert reply.error is None
    assert reply.tries == 5
    assert all(body == server.asked[0] for body in server.asked)  # the same seed, too


def test_a_server_says_when_it_may_be_asked_again(reply_to, monkeypatch):
    monkeypatch.setattr(client, "_LONGEST_WAIT_S", 0.4)
    later = formatdate(time.time() + 1800, usegmt=True)
    past = "Fri, 31 Dec 1999 23:59:59 GMT"
    for after, waits in (("1800", True), (later, True), ("0.4", True), (past, False), ("x", False)):
        replies = [(*refuses("busy", 503), {"retry-after": after}), said(choice("x"))]
        begun_s = time.monotonic()
        reply, _ = reply_to(lambda body, replies=replies: replies.pop(0), tries=2)
        assert (reply.error, reply.tries) == (None, 2)
        if waits:
            assert 0.4 <= time.monotonic() - begun_s < 60


def test_who_is_given_up_hangs_up(codec, source_of):
    """The stream of a text that nobody wants is closed; others go on."""
    started, go = threading.Event(), threading.Event()

    def answer(body):
        if body["seed"] == 1:
            started.set()
            return (piece("x") for _ in range(10**9))
        go.wait(10)
        return iter([piece("y", finish_reason="stop")])

    with speaking(codec, extras=False, names=False, then=answer) as server:
        source = source_of(server)
        source.send("one", question(codec, seed=1))
        source.send("two", question(codec, seed=2))
        assert started.wait(10)
        source.cancel("one")
        assert server.gone.wait(10)
        go.set()
        (reply,) = waited(source)
        source.close()  # and can be used again
        assert answered(source, question(codec, seed=3)).error is None
    assert reply.key == "two"


def test_the_callers_own_event_loop_stays(codec, source_of):
    asyncio.set_event_loop(loop := asyncio.new_event_loop())
    try:
        with speaking(codec) as server:
            source_of(server).close()
        assert asyncio.get_event_loop_policy().get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()
