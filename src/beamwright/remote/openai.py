"""OpenAISource: texts from an OpenAI-compatible server, by `/v1/completions`.

Requests run in an event loop on a thread of its own, each on a connection that is closed where
nobody wants its text any more: servers take that for giving up.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Literal

import httpx

from beamwright.config import SamplingSettings
from beamwright.errors import BeamwrightError, InputError, UnavailableError
from beamwright.models import TextCodec
from beamwright.remote.dialect import (
    BrokenOff,
    Dialect,
    Stops,
    end_of,
    logprobs_of,
    stops_shown,
)
from beamwright.remote.named import PLAIN, FarModel
from beamwright.remote.source import Asked, Facts, Reply, Written

MOST_TRIES = 8  # a minute in all: servers start anew
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_CONNECT_S, _READ_S, _KEPT_S = 10.0, 600.0, 2.0  # servers hang up after five idle seconds
_MOST_HANGS = 2  # of ten minutes each
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
        self.facts = Facts(context, self.dialect.returns_ids, searches)

    @property
    def most(self) -> int | None:
        """A text that is read as it is written is left at its stop, the others with it."""
        return 1 if self.dialect.streams else None

    def ask(self, key: Hashable, asked: Asked) -> None:
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

    def _begin(self, key: Hashable, asked: Asked) -> None:
        task = asyncio.ensure_future(self._answer(key, asked))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _give_up(self, key: Hashable) -> None:
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()

    async def _answer(self, key: Hashable, asked: Asked) -> None:
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
            except httpx.ReadTimeout as error:
                why, most = _said(error), _MOST_HANGS
            except (httpx.HTTPError, json.JSONDecodeError, BrokenOff) as error:
                why, most = _said(error), self._tries
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                why, most, kind = f"no completion ({_said(error)})", 1, InputError
            if tries >= most:
                self._replies.put(Reply(key, tries=tries, error=self._error(kind, why, tries)))
                return
            await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S))
            wait_s *= 2

    def _error(self, kind: type[BeamwrightError], why: str, tries: int) -> BeamwrightError:
        times = f" ({tries} tries)" if tries > 1 else ""
        return kind(f"the generator at {self._model.place}: {why}{times}")

    async def _tried(self, asked: Asked) -> Reply:
        client, body = self._running().client, self.dialect.body(self.name, asked)
        if not self.dialect.streams:
            answer: Mapping[str, Any] = await _post(client, "completions", body)
            choices = sorted(answer["choices"], key=lambda each: int(each.get("index", 0)))
            if not choices:
                raise ValueError("it has no choices")
            written = [self.dialect.written(each, asked.stops) for each in choices]
            return _with_usage(answer, written)
        return Reply(None, [await self._read(client, body, asked)])

    async def _read(
        self, client: httpx.AsyncClient, body: Mapping[str, Any], asked: Asked
    ) -> Written:
        """A text as it is written, up to its first stop."""
        text, logprobs = "", list[float]()
        ended: Literal["stop", "eos", "length"] | None = None
        async with client.stream("POST", "completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise _refused(response)
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise _Refused(_BROKEN, _message(event))
                for choice in event.get("choices") or ():
                    text += str(choice.get("text") or "")
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
        return Written(text, None, tuple(logprobs), ended)

    # --- what it is --------------------------------------------------------------------------

    def _once(self, ask: Any) -> Any:
        """Ask the server something at the start; what fails is the user's to mend."""
        thread = self._running()
        try:
            return thread.run(ask())
        except _Refused as error:
            raise InputError(f"{self._option}: {error}") from error
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise InputError(f"{self._option}: {why}") from error
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
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
        client = self._running().client
        response = await client.get("models")
        if response.status_code != httpx.codes.OK:
            raise _refused(response)
        models = {str(each["id"]): each for each in response.json()["data"]}
        name = self._model.name or (next(iter(models)) if len(models) == 1 else None)
        if name not in models:
            asked = "say which, as #NAME" if name is None else "no such model"
            raise InputError(f"{self._option}: {asked}; it has {', '.join(sorted(models)[:12])}")
        found = models[name].get("max_model_len")
        searches = models[name].get("owned_by") == "beamwright" and not name.endswith(PLAIN)
        return name, found if isinstance(found, int) and found > 0 else None, searches

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
            text = str(choice["text"])
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
            raise InputError(
                f"{self._option}: its tokens are others than --tokenizer's: it wrote {text!r}, "
                f"and they are {here!r} here"
            )

    async def _sample(
        self, dialect: Dialect, prompt: str, stops: Sequence[str]
    ) -> Mapping[str, Any]:
        """A few tokens, the likeliest ones."""
        ids = tuple(self._codec.encode(prompt))
        greedy = SamplingSettings(temperature=0.0)
        asked = Asked(ids, lambda: prompt, 1, 0, 4, greedy, tuple(stops))
        answer = await _post(self._running().client, "completions", dialect.body(self.name, asked))
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
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
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


async def _post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    if response.status_code != httpx.codes.OK:
        raise _refused(response)
    answer: dict[str, Any] = response.json()
    return answer


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _refused(response: httpx.Response) -> _Refused:
    try:
        text = _message(response.json())
    except (ValueError, AttributeError):
        text = response.text
    seconds = response.headers.get("retry-after", "")
    after = float(seconds) if seconds.isdecimal() else None
    return _Refused(response.status_code, " ".join(text.split())[:200], after)


def _message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _with_usage(answer: Mapping[str, Any], written: Sequence[Written]) -> Reply:
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Reply(None, written, usage.get("prompt_tokens"), details.get("cached_tokens"))


def _first_end(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop in a text ends."""
    found = [text.find(each) + len(each) for each in stops if each in text]
    return min(found, default=None)
