"""OpenAISource: texts from an OpenAI-compatible server, by `/v1/completions`.

Requests run in an event loop on a thread of its own, each on a connection that is closed where
nobody wants its text any more: servers take that for giving up. Replies are bounded in bytes and
seconds; one that is odd is an error of its question, and what may pass is tried again.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

import httpx

from beamwright.errors import BeamwrightError, InputError, UnavailableError
from beamwright.models.tokenizer import TextCodec
from beamwright.remote.dialect import (
    BrokenOff,
    Dialect,
    Stops,
    count_of,
    end_of,
    logprobs_of,
    reply_of,
    text_of,
)
from beamwright.remote.source import (
    PLAIN,
    Continuation,
    GeneratorFacts,
    PromptRequest,
    RemoteModel,
    Reply,
)
from beamwright.sections import SamplingSettings

T = TypeVar("T")

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

    def __init__(self, status: int, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.retry_after_s = status, retry_after_s


class OpenAISource:
    """A `TextSource` over HTTP. The server has been asked what it understands.

    codec: of the model's tokenizer. key: that the server wants. tries: of a request that fails in
    passing.

    Raises:
        InputError: if nobody answers there, or has no such model.
    """

    def __init__(
        self, model: RemoteModel, codec: TextCodec, key: str | None = None, tries: int = MOST_TRIES
    ) -> None:
        self._model, self._codec, self._key, self._tries = model, codec, key, tries
        self._thread: _LoopThread | None = None
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._running: dict[Hashable, Future[None]] = {}
        self.name, context, searches = self._at_start(self._find_model())
        self.dialect = self._at_start(self._find_dialect())
        self.facts = GeneratorFacts(context, self.dialect.returns_ids, searches)

    @property
    def most(self) -> int | None:
        """A text that is read as it is written is left at its stop, the others with it."""
        return 1 if self.dialect.streams else None

    def ask(self, key: Hashable, prompt: PromptRequest) -> None:
        """See `TextSource`."""
        running = self._loop_thread().start(self._answer(key, prompt))
        self._running[key] = running
        running.add_done_callback(lambda _: self._running.pop(key, None))

    def wait(self, timeout_s: float) -> list[Reply]:
        """See `TextSource`."""
        try:
            replies = [self._replies.get(timeout=timeout_s)]
        except Empty:
            return []
        while not self._replies.empty():
            replies.append(self._replies.get())
        return replies

    def cancel(self, key: Hashable) -> None:
        """See `TextSource`: the connection is closed."""
        running = self._running.pop(key, None)
        if running is not None:
            running.cancel()

    def close(self) -> None:
        """Close all connections, and end the thread."""
        if self._thread is not None:
            self._stop()
            self._thread.join()
            self._thread = None

    def _loop_thread(self) -> _LoopThread:
        if self._thread is None:
            self._thread = _LoopThread(self._model.place, self._key)
            # Nobody need close what was never begun, or has failed at its start.
            self._stop = weakref.finalize(self, self._thread.stop)
        return self._thread

    # --- a question, in the event loop -------------------------------------------------------

    async def _answer(self, key: Hashable, prompt: PromptRequest) -> None:
        """Put the reply where `wait` finds it, whatever happens."""
        wait_s = _FIRST_WAIT_S
        for tries in count(1):
            try:
                reply = await self._tried(prompt)
                self._replies.put(replace(reply, key=key, tries=tries))
                return
            except Exception as error:  # whatever what it says does to who reads it
                why, most, kind = self._judged(error, prompt)
                wait_s = max(wait_s, getattr(error, "retry_after_s", 0.0))
            if tries >= most:
                times = f" ({tries} tries)" if tries > 1 else ""
                failure = kind(f"the generator at {self._model.place}: {self._line(why)}{times}")
                self._replies.put(Reply(key, tries=tries, error=failure))
                return
            await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S))
            wait_s *= 2

    def _judged(
        self, error: Exception, prompt: PromptRequest
    ) -> tuple[str, int, type[BeamwrightError]]:
        """What to say of it, how often to try, and whose fault it is."""
        match error:
            case _Refused(status=status):
                most = self._tries if status in (*_PASSING, _BROKEN) else 1
                # What it answers to others, but never to this, is of the question.
                ours = status not in (*_PASSING, *_OURS)
                return str(error), most, InputError if ours else UnavailableError
            case TimeoutError():
                return f"no whole reply in {_reply_s(prompt):g} s", _MOST_HANGS, UnavailableError
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, httpx.HTTPError | json.JSONDecodeError | BrokenOff):
            return said, self._tries, UnavailableError
        return f"no completion ({said})", 1, InputError

    def _line(self, said: str) -> str:
        """What a server has said, fit to be shown: without the key, which it may repeat."""
        said = said.replace(self._key, "(the key)") if self._key else said
        printable = "".join(char if char.isprintable() else " " for char in said)
        return " ".join(printable.split())[:_ERROR_CHARS]

    async def _tried(self, prompt: PromptRequest) -> Reply:
        body = self.dialect.body(self.name, prompt)
        if self.dialect.streams:
            return Reply(None, [await self._read(body, prompt)])
        return reply_of(await self._completed(body, prompt), prompt.stops)

    async def _completed(self, body: Mapping[str, Any], prompt: PromptRequest) -> Any:
        """A reply that comes as a whole."""
        most = _most_bytes(prompt, _TOKEN_BYTES)
        async with self._reply("POST", "completions", _reply_s(prompt), most, body) as chunks:
            return json.loads(b"".join([chunk async for chunk in chunks]))

    async def _read(self, body: Mapping[str, Any], prompt: PromptRequest) -> Continuation:
        """A text as it is written, up to its first stop."""
        text, logprobs = "", list[float]()
        ended: Literal["stop", "eos", "length"] | None = None
        most = _most_bytes(prompt, _EVENT_BYTES)
        async with self._reply("POST", "completions", _reply_s(prompt), most, body) as chunks:
            async for event in _events(chunks):
                for choice in event.get("choices") or ():
                    text += text_of(choice.get("text") or "")
                    logprobs += logprobs_of(choice)
                    reason = choice.get("finish_reason")
                    ended = ended if reason is None else end_of(reason)
                stops = [text.find(s) + len(s) for s in prompt.stops if s in text]
                if stops:
                    text, ended = text[: min(stops)], "stop"
                    break
        if ended is None:  # the server has dropped it; what is there is no step
            raise BrokenOff("the text broke off")
        return Continuation(text, None, tuple(logprobs), ended)

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, most_s: float, most: int, body: Any = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of a reply, of which there may be so many, in so many seconds.

        Raises:
            _Refused: if it says no; TimeoutError; ValueError: if there are more.
        """
        client = self._loop_thread().client
        async with asyncio.timeout(most_s), client.stream(method, path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise await _refused(response)
            yield _bounded(response, most)

    # --- what the server is ------------------------------------------------------------------

    def _at_start(self, question: Coroutine[Any, Any, T]) -> T:
        """Ask the server something at the start; what fails is the user's to mend."""
        try:
            return self._loop_thread().start(question).result()
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
            answer = json.loads(b"".join([chunk async for chunk in chunks]))
        models = {text_of(model["id"]): model for model in answer["data"]}
        name = self._model.name or (next(iter(models)) if len(models) == 1 else None)
        if name not in models:
            problem = "say which, as #NAME" if name is None else "no such model"
            names = self._line(", ".join(sorted(models)[:12]))
            raise InputError(f"{self._option}: {problem}; it has {names}")
        searches = models[name].get("owned_by") == "beamwright" and not name.endswith(PLAIN)
        return name, count_of(models[name].get("max_model_len")) or None, searches

    async def _find_dialect(self) -> Dialect:
        """The richest that it understands."""
        refusals = []
        for extras, ids in ((True, True), (True, False), (False, True), (False, False)):
            try:
                # Not read as it is written, for now; what ends a text is seen below.
                return await self._learned(Dialect(ids, extras, stops=Stops.NAMED))
            except _Refused as error:
                if error.status not in _MISUNDERSTOOD:
                    raise
                refusals.append(error)
        raise refusals[0]

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
                shown = Stops.shown(await self._sample(way, prompt, (stop,)), stop)
                # Texts that are read as they are written are tokenised here.
                ids = returns_ids and shown is not Stops.UNKNOWN
                return replace(way, returns_ids=ids, stops=shown)
        return replace(way, stops=Stops.UNKNOWN)

    def _check_tokenizer(self, text: str, token_ids: Sequence[int]) -> None:
        """Raises InputError if what the server wrote is not what its tokens are here."""
        known = all(0 <= token < self._codec.vocab_size for token in token_ids)
        here = self._codec.decode(token_ids) if known else None
        if here is None or here.strip("\ufffd ") != text.strip("\ufffd "):
            raise InputError(
                f"{self._option}: its tokens are others than --tokenizer's: it wrote "
                f"{self._line(repr(text))}, and they are {here!r} here"
            )

    async def _sample(self, way: Dialect, text: str, stops: Sequence[str]) -> Mapping[str, Any]:
        """A few tokens, the likeliest ones."""
        ids, greedy = tuple(self._codec.encode(text)), SamplingSettings(temperature=0.0)
        prompt = PromptRequest(ids, lambda: text, 1, 0, 4, greedy, tuple(stops))
        answer = await self._completed(way.body(self.name, prompt), prompt)
        choice: Mapping[str, Any] = answer["choices"][0]
        return choice


class _LoopThread:
    """An event loop on a thread, and a client whose connections live in it."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {"Accept-Encoding": "identity"}  # a packed reply has no size to be bounded
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self.client = httpx.AsyncClient(
            base_url=f"{url}/",
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # see `_reply_s`
            limits=httpx.Limits(keepalive_expiry=_KEPT_S),
        )
        self._loop = asyncio.new_event_loop()
        self._work = threading.Thread(target=self._run, name="remote", daemon=True)
        self._work.start()
        self.join = self._work.join

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Have it run there; who cancels the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Soon nothing runs any more. Waits for nothing: garbage collection may call it anywhere,
        in the middle of an import too."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self.client.aclose()


def _reply_s(prompt: PromptRequest) -> float:
    """Seconds in which a whole reply has to be there."""
    return _REPLY_S + prompt.max_tokens * _TOKEN_S


def _most_bytes(prompt: PromptRequest, per_token: int) -> int:
    """Of a reply; some repeat the prompt's tokens with every text."""
    per_text = prompt.max_tokens * per_token + len(prompt.token_ids) * _PROMPT_BYTES
    return _REPLY_BYTES + prompt.count * per_text


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


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """Server-sent events whose lines have ended; raises _Refused for an error among them."""
    begun: list[bytes] = []
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line, begun = b"".join((*begun, end)), []
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise _Refused(_BROKEN, _message(event))
            yield event
        begun.append(rest)


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
    return _Refused(response.status_code, text, float(seconds) if seconds.isdecimal() else 0.0)


def _message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, dict) else error)
