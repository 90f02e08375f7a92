"""OpenAISource: texts from an OpenAI-compatible server, by `/v1/completions`.

Requests run in an event loop on a thread of its own, each on a connection that is closed where
nobody wants its text any more: servers take that for giving up.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Literal

import httpx

from beamwright.errors import BeamwrightError, InputError, UnavailableError
from beamwright.models import TextCodec
from beamwright.remote.dialect import (
    BrokenOff,
    Dialect,
    Stops,
    count_of,
    end_of,
    logprobs_of,
    object_of,
    stops_shown,
    text_of,
)
from beamwright.remote.named import PLAIN, FarModel
from beamwright.remote.source import Continuation, GeneratorFacts, PromptRequest, Reply
from beamwright.sections import SamplingSettings

MOST_TRIES = 8  # a minute in all: servers start anew
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_CONNECT_S, _KEPT_S = 10.0, 2.0  # servers hang up after five idle seconds
_REPLY_S, _TOKEN_S = 600.0, 1.0  # a whole reply, with its wait in the server's queue
_MODELS_S, _MODELS_BYTES = 30.0, 16 << 20
_MOST_HANGS = 2
_REPLY_BYTES, _TOKEN_BYTES, _PROMPT_BYTES = 64 << 10, 512, 16  # of JSON: in all, per token
_EVENT_BYTES = 2048  # around a token that comes alone
_ERROR_CHARS = 200
_PROMPTS = ("1 + 1 =", "The answer is")
_BROKEN = 500  # by the question, if it stays so
_OURS = (401, 402, 403, 404)  # of the key, or of the model: no question will be answered
_PASSING = (408, 409, 425, 429, 502, 503, 504)  # may go well the next time
_MISUNDERSTOOD = (400, 404, 422, _BROKEN)  # llama-cpp-python says 500


class _Refused(Exception):
    """The server has said no. text: in its words."""

    def __init__(self, status: int, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.retry_after_s = status, retry_after_s


class OpenAISource:
    """A `Source` over HTTP. The server has been asked what it understands.

    codec: of the model's tokenizer. key: that the server wants. tries: of a request that fails in
    passing.

    Raises:
        InputError: if nobody answers there, or has no such model.
    """

    def __init__(
        self,
        model: FarModel,
        codec: TextCodec,
        key: str | None = None,
        tries: int = MOST_TRIES,
    ) -> None:
        self._model, self._codec, self._key, self._tries = model, codec, key, tries
        self._thread: _LoopThread | None = None
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._tasks: dict[Hashable, asyncio.Future[None]] = {}
        self.name, context, searches = self._once(self._find_model)
        self.dialect = self._once(self._find_dialect)
        self.facts = GeneratorFacts(context, self.dialect.returns_ids, searches)

    @property
    def most(self) -> int | None:
        """A text that is read as it is written is left at its stop, the others with it."""
        return 1 if self.dialect.streams else None

    def ask(self, key: Hashable, asked: PromptRequest) -> None:
        """See `Source`."""
        loop = self._running()
        loop.call(self._begin, key, asked)

    def wait(self, timeout_s: float) -> list[Reply]:
        """See `Source`."""
        try:
            found = [self._replies.get(timeout=timeout_s)]
        except Empty:
            return []
        while not self._replies.empty():
            found.append(self._replies.get())
        return found

    def cancel(self, key: Hashable) -> None:
        """See `Source`: the connection is closed."""
        if self._thread is not None:
            self._thread.call(self._give_up, key)

    def close(self) -> None:
        """Close all connections, and end the thread."""
        if self._thread is not None:
            self._stop()
            self._thread.join()
            self._thread = None

    # --- in the event loop -------------------------------------------------------------------

    def _begin(self, key: Hashable, asked: PromptRequest) -> None:
        task = asyncio.ensure_future(self._answer(key, asked))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _give_up(self, key: Hashable) -> None:
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()

    async def _answer(self, key: Hashable, asked: PromptRequest) -> None:
        """Put the reply where `wait` finds it, whatever happens."""
        wait_s, tries, most = _FIRST_WAIT_S, 0, self._tries
        while True:
            tries += 1
            kind: type[BeamwrightError] = UnavailableError
            try:
                reply = await self._tried(asked)
                self._replies.put(replace(reply, key=key, tries=tries))
                return
            except _Refused as error:
                why = str(error)
                most = self._tries if error.status in (*_PASSING, _BROKEN) else 1
                # What it answers to others, but never to this, is of the question.
                kind = UnavailableError if error.status in (*_PASSING, *_OURS) else InputError
                wait_s = max(wait_s, error.retry_after_s or 0.0)
            except TimeoutError:
                why, most = f"no whole reply in {_reply_s(asked):g} s", _MOST_HANGS
            except (httpx.HTTPError, json.JSONDecodeError, BrokenOff) as error:
                why, most = _said(error), self._tries
            except Exception as error:  # whatever what it says does to who reads it
                why, most, kind = f"no completion ({_said(error)})", 1, InputError
            if tries >= most:
                self._replies.put(Reply(key, tries=tries, error=self._error(kind, why, tries)))
                return
            await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S))
            wait_s *= 2

    def _error(self, kind: type[BeamwrightError], why: str, tries: int) -> BeamwrightError:
        times = f" ({tries} tries)" if tries > 1 else ""
        return kind(f"the generator at {self._model.place}: {self._line(why)}{times}")

    def _line(self, said: str) -> str:
        """What a server has said, fit to be shown: without the key, which it may repeat."""
        said = said.replace(self._key, "(the key)") if self._key else said
        printable = "".join(each if each.isprintable() else " " for each in said)
        return " ".join(printable.split())[:_ERROR_CHARS]

    async def _tried(self, asked: PromptRequest) -> Reply:
        body = self.dialect.body(self.name, asked)
        if self.dialect.streams:
            return Reply(None, [await self._read(body, asked)])
        answer = await self._completed(body, asked)
        choices = sorted(answer["choices"], key=lambda each: int(each.get("index", 0)))
        if not choices:
            raise ValueError("it has no choices")
        written = [self.dialect.written(each, asked.stops) for each in choices]
        return _with_usage(answer, written)

    async def _completed(self, body: Mapping[str, Any], asked: PromptRequest) -> Mapping[str, Any]:
        """A reply that comes as a whole."""
        most = _most_bytes(asked, _TOKEN_BYTES)
        async with self._reply("POST", "completions", _reply_s(asked), most, body) as chunks:
            answer: Mapping[str, Any] = json.loads(b"".join([each async for each in chunks]))
        return answer

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, most_s: float, most: int, body: Any = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of a reply, of which there may be so many, in so many seconds.

        Raises:
            _Refused: if it says no; TimeoutError; ValueError: if there are more.
        """
        client = self._running().client
        async with asyncio.timeout(most_s), client.stream(method, path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise await _refused(response)
            yield _bounded(response, most)

    async def _read(self, body: Mapping[str, Any], asked: PromptRequest) -> Continuation:
        """A text as it is written, up to its first stop."""
        text, logprobs = "", list[float]()
        ended: Literal["stop", "eos", "length"] | None = None
        most = _most_bytes(asked, _EVENT_BYTES)
        async with self._reply("POST", "completions", _reply_s(asked), most, body) as chunks:
            async for line in _lines(chunks):
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise _Refused(_BROKEN, _message(event))
                for choice in event.get("choices") or ():
                    text += text_of(choice.get("text") or "")
                    logprobs += logprobs_of(choice)
                    reason = choice.get("finish_reason")
                    if reason is not None:
                        ended = end_of(reason)
                end = _first_end(text, asked.stops)
                if end is not None:
                    text, ended = text[:end], "stop"
                    break
        if ended is None:  # the server has dropped it; what is there is no step
            raise BrokenOff("the text broke off")
        return Continuation(text, None, tuple(logprobs), ended)

    # --- what it is --------------------------------------------------------------------------

    def _once(self, ask: Any) -> Any:
        """Ask the server something at the start; what fails is the user's to mend."""
        thread = self._running()
        try:
            return thread.run(ask())
        except BeamwrightError:
            raise
        except TimeoutError as error:
            raise InputError(f"{self._option}: what answers there does not end") from error
        except (_Refused, httpx.HTTPError) as error:
            why = self._line(str(error)) or type(error).__name__
            raise InputError(f"{self._option}: {why}") from error
        except Exception as error:  # whatever what it says does to who reads it
            raise InputError(
                f"{self._option}: what answers there does not speak OpenAI's protocol "
                f"({type(error).__name__})"
            ) from error

    @property
    def _option(self) -> str:
        name = f"#{self._model.name}" if self._model.name else ""
        return f"--model openai:{self._model.place}{name}"

    async def _find_model(self) -> tuple[str, int | None, bool]:
        """Its name there, its context, and whether it is a search by another Beamwright."""
        async with self._reply("GET", "models", _MODELS_S, _MODELS_BYTES) as chunks:
            found = json.loads(b"".join([each async for each in chunks]))
        models = {text_of(each["id"]): each for each in found["data"]}
        name = self._model.name or (next(iter(models)) if len(models) == 1 else None)
        if name not in models:
            asked = "say which, as #NAME" if name is None else "no such model"
            names = self._line(", ".join(sorted(models)[:12]))
            raise InputError(f"{self._option}: {asked}; it has {names}")
        searches = models[name].get("owned_by") == "beamwright" and not name.endswith(PLAIN)
        return name, count_of(models[name].get("max_model_len")) or None, searches

    async def _find_dialect(self) -> Dialect:
        """The richest that it understands."""
        ways = [Dialect(ids, extras) for extras in (True, False) for ids in (True, False)]
        refusal: _Refused | None = None
        for way in ways:
            # Not read as it is written, for now; what ends a text is seen below.
            plain = replace(way, stops=Stops.NAMED)
            try:
                return await self._learned(plain)
            except _Refused as error:
                if error.status not in _MISUNDERSTOOD:
                    raise
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    async def _learned(self, way: Dialect) -> Dialect:
        """What else is known of a way that it understands; raises _Refused if it does not."""
        for prompt in _PROMPTS:
            choice = await self._sample(way, prompt, ())
            text = text_of(choice["text"])
            returns_ids = way.extras and isinstance(choice.get("token_ids"), list)
            if returns_ids:
                self._check_tokenizer(text, choice["token_ids"])
            if text.strip():
                stop = text.strip()[0]
                shown = stops_shown(await self._sample(way, prompt, (stop,)), stop)
                # Texts that are read as they are written are tokenised here.
                ids = returns_ids and shown is not Stops.UNKNOWN
                return replace(way, returns_ids=ids, stops=shown)
        return replace(way, stops=Stops.UNKNOWN)

    def _check_tokenizer(self, text: str, token_ids: Sequence[int]) -> None:
        """Raises InputError if what the server wrote is not what its tokens are here."""
        known = all(0 <= token < self._codec.vocab_size for token in token_ids)
        here = self._codec.decode(token_ids) if known else None
        if here is None or here.strip("\ufffd ") != text.strip("\ufffd "):
            wrote = self._line(repr(text))
            raise InputError(
                f"{self._option}: its tokens are others than --tokenizer's: it wrote {wrote}, "
                f"and they are {here!r} here"
            )

    async def _sample(
        self, dialect: Dialect, prompt: str, stops: Sequence[str]
    ) -> Mapping[str, Any]:
        """A few tokens, the likeliest ones."""
        ids = tuple(self._codec.encode(prompt))
        greedy = SamplingSettings(temperature=0.0)
        asked = PromptRequest(ids, lambda: prompt, 1, 0, 4, greedy, tuple(stops))
        answer = await self._completed(dialect.body(self.name, asked), asked)
        choice: Mapping[str, Any] = answer["choices"][0]
        return choice

    def _running(self) -> _LoopThread:
        if self._thread is None:
            self._thread = _LoopThread(self._model.place, self._key)
            # Nobody need close what was never begun, or has failed at its start.
            self._stop = weakref.finalize(self, self._thread.stop)
        return self._thread


class _LoopThread:
    """An event loop on a thread, and a client whose connections live in it."""

    def __init__(self, url: str, key: str | None) -> None:
        self.client = httpx.AsyncClient(
            base_url=f"{url}/",
            headers={
                "Accept-Encoding": "identity",  # a packed reply has no size that could be bounded
                **({"Authorization": f"Bearer {key}"} if key else {}),
            },
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # see `_reply_s`
            limits=httpx.Limits(keepalive_expiry=_KEPT_S),
        )
        self._loop = asyncio.new_event_loop()
        self._work = threading.Thread(target=self._run, name="remote", daemon=True)
        self._work.start()

    def run(self, coroutine: Any) -> Any:
        """Its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call(self, function: Any, *of: Any) -> None:
        """Soon."""
        self._loop.call_soon_threadsafe(function, *of)

    def stop(self) -> None:
        """Soon nothing runs any more. Waits for nothing: garbage collection may call it anywhere,
        in the middle of an import too."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self) -> None:
        """Returns when it has stopped."""
        self._work.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self.client.aclose()


def _reply_s(asked: PromptRequest) -> float:
    """Seconds in which a whole reply has to be there."""
    return _REPLY_S + asked.max_tokens * _TOKEN_S


def _most_bytes(asked: PromptRequest, per_token: int) -> int:
    """Of a reply; some repeat the prompt's tokens with every text."""
    each = asked.max_tokens * per_token + len(asked.token_ids) * _PROMPT_BYTES
    return _REPLY_BYTES + asked.count * each


async def _bounded(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """Its bytes as they come; raises ValueError where there are more."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"it is in {encoding}, which was not asked for")
    size = 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > most:
            raise ValueError(f"more than {most:,} bytes, for what was asked")
        yield chunk


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines that have ended."""
    begun: list[bytes] = []
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*begun, end))
            begun = []
        begun.append(rest)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


async def _refused(response: httpx.Response) -> _Refused:
    said = bytearray()
    async for chunk in response.aiter_raw():
        said += chunk
        if len(said) > _REPLY_BYTES:
            break
    text = said.decode(errors="replace")
    with suppress(ValueError, AttributeError, RecursionError):
        text = _message(json.loads(text))
    seconds = response.headers.get("retry-after", "")
    after = float(seconds) if seconds.isdecimal() else None
    return _Refused(response.status_code, text, after)


def _message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _with_usage(answer: Mapping[str, Any], written: Sequence[Continuation]) -> Reply:
    usage = object_of(answer.get("usage"))
    cached = object_of(usage.get("prompt_tokens_details")).get("cached_tokens")
    return Reply(None, written, count_of(usage.get("prompt_tokens")), count_of(cached))


def _first_end(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop in a text ends."""
    found = [text.find(each) + len(each) for each in stops if each in text]
    return min(found, default=None)
