"""RemoteGenerator: sample texts from a model on a server (`--model openai:...`).

Requests run in an event loop on a separate thread, each on its own connection. Closing the
connection cancels the request on the server. Replies are limited in bytes and seconds. An invalid
reply fails only its own request; temporary errors are retried.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from beamwright.errors import BeamwrightError, InputError, UnavailableError
from beamwright.io import read_json_object, read_text
from beamwright.models.hub import tokenizer_folder
from beamwright.models.tokenizer import TextCodec
from beamwright.remote.connection import BROKEN, RequestRefused, ServerClient, read_events
from beamwright.remote.dialects import (
    CROWDED,
    LLAMA,
    OPTIONAL,
    STOP_FIELDS,
    Completions,
    Continuation,
    Dialect,
    Ended,
    LlamaServer,
    PromptRequest,
    Reply,
    choice_logprobs,
    find_count,
    parse_finish_reason,
    parse_text,
)
from beamwright.sections import ELSEWHERE, ModelSettings, SamplingSettings

PLAIN_SUFFIX = ":plain"  # a Beamwright server's model with this suffix samples without a search
MOST_TRIES = 8  # tries of a request take about a minute, in which a server can restart
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_REPLY_S, _TOKEN_S = 600.0, 1.0  # timeout of a reply, including queueing, and addition per token
_MODELS_S, _MODELS_BYTES = 30.0, 16 << 20
_ALIVE_S = 5.0  # timeout of the liveness check, which asks for the list of models
_MOST_HANGS = 2
_REPLY_BYTES, _PROMPT_BYTES = 64 << 10, 16  # size limit of a reply, and addition per prompt token
_EVENT_BYTES = 2048  # size limit of a streamed event, which may hold a single token
_PROMPT = "The answer is"
# HTTP statuses by their meaning:
_OURS = (401, 402, 403, 404)  # the key or model is wrong, so every request would fail
_PASSING = (408, 409, 425, 429, 502, 503, 504)  # temporary error: a retry may succeed
_LOADING = (429, 503)  # at the start, the server may still be loading: wait
_MISUNDERSTOOD = (400, 404, 422, BROKEN)  # unsupported field (500: llama-cpp-python)
_SINGLE = (400, 422, 501)  # the server may not support n > 1: retry with one text
_FORMS = ((True, True), (True, False), (False, True), (False, False))  # (extras, ids) to try


class RemoteGenerator:
    """Client of a model on a server, with any number of requests in flight, for one thread.

    The constructor connects to the server and detects which fields the server supports.

    name: the model's name on the server; "" for the server's only model.
    codec: the model's tokenizer.
    key, login: the API key and user:password for the server.
    context: maximum number of tokens of a path; 0 if the server does not report it.
    most: maximum number of texts per request; None for no limit.
    token_ids: True if the server returns the sampled token ids.

    Raises:
        InputError: if the server does not answer or does not have the model.
    """

    name: str
    context: int

    def __init__(
        self, url: str, name: str, codec: TextCodec, key: str | None = None, login: str = ""
    ) -> None:
        self.codec, self.vocab = codec, codec.vocab_size
        self._url, self._key, self._login = url, key, login
        self._root = url.removesuffix("/v1")
        self._option = f"--model {ELSEWHERE}{url}#{name}".removesuffix("#")
        self.dialect: Dialect = Completions()
        self._turn, self._is_crowded = asyncio.Lock(), False
        self._work: threading.Thread | None = None
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._running: dict[Hashable, Future[None]] = {}
        try:
            self._start(self._connect, name).result()
        except Exception as error:  # an invalid reply may raise anything
            self.close()
            if isinstance(error, BeamwrightError):
                raise
            why, http = "the server does not speak OpenAI's protocol", self._http
            if isinstance(error, RequestRefused | httpx.HTTPError):
                why = http.describe_error(error)
            elif isinstance(error, TimeoutError):
                why = "the server did not finish its reply in time"
            elif http.last:
                why += f"; it replied {http.printable_line(http.last)}"
            raise InputError(f"{self._option}: {why}") from error
        self.most, self.token_ids = self.dialect.most, self.dialect.token_ids

    @classmethod
    def connect(cls, settings: ModelSettings) -> RemoteGenerator:
        """Connect to the server and model of `--model`, and load the model's tokenizer.

        Raises:
            InputError: if the model is missing, or if its tokenizer or context is unknown.
        """
        spec = settings.model
        url, _, name = spec.removeprefix(ELSEWHERE).partition("#")
        if not _is_url(url):
            raise InputError(f"--model {spec}: must have the form openai:http://HOST:PORT/v1#NAME")
        folder = _tokenizer_of(settings, name.removesuffix(PLAIN_SUFFIX))
        codec = TextCodec.load(folder, settings.chat_template, settings.template_args)
        key, login = _read_key(settings.model_key), getattr(spec, "login", "")
        if key and login:
            raise InputError(f"--model {spec}: the URL contains a login; remove it or --model-key")
        found = cls(url.rstrip("/"), name, codec, key, login)
        known = found.context or read_json_object(folder / "config.json").get(
            "max_position_embeddings"
        )
        limits = [limit for limit in (known, settings.context) if isinstance(limit, int) and limit]
        if not limits:
            found.close()
            raise InputError(
                f"--model {spec}: the server reports no context length; pass --context N"
            )
        found.context = min(limits)
        return found

    def send(self, key: Hashable, prompt: PromptRequest) -> None:
        """Start a request for continuations of a prompt; `wait` returns the reply."""
        self._running[key] = running = self._start(self._run_request, key, prompt)
        running.add_done_callback(lambda _: self._running.pop(key, None))

    def wait(self, timeout_s: float) -> list[Reply]:
        """Return the replies that have arrived; wait up to `timeout_s` seconds for the first."""
        replies: list[Reply] = []
        with suppress(Empty):
            replies.append(self._replies.get(timeout=timeout_s))
            while True:
                replies.append(self._replies.get_nowait())
        return replies

    def cancel(self, key: Hashable) -> None:
        """Cancel a request by closing its connection; its reply may still arrive."""
        running = self._running.pop(key, None)
        if running is not None:
            running.cancel()

    def close(self) -> None:
        """Close all connections and end the thread. The next call starts a new one."""
        if self._work is not None:
            self._stop()
            self._work.join()
            self._work = None

    def find_fault(self) -> str | None:
        """Check that the server answers; return None, or the error as text. Thread-safe."""
        if self._work is None:
            return None
        asked = asyncio.run_coroutine_threadsafe(self._get_info("models", _ALIVE_S), self._loop)
        try:
            asked.result(2 * _ALIVE_S)
        except Exception as error:  # an invalid reply may raise anything
            return self._http.describe_error(error)
        return None

    def _start(self, work: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> Future[None]:
        """Run a coroutine in the loop; cancelling the future cancels it."""
        if self._work is None:
            try:
                self._http = ServerClient(self._url, self._key, self._login)
            except InputError as error:
                raise InputError(f"{self._option}: {error}") from error
            # Create asyncio's own event loop, even if the caller has set another loop factory.
            runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            self._loop = runner.get_loop()
            # End the thread, without waiting, when this object is garbage collected.
            self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
            served = (runner, self._http.client)
            self._work = threading.Thread(target=_serve, args=served, name="remote", daemon=True)
            self._work.start()
        return asyncio.run_coroutine_threadsafe(work(*given), self._loop)

    # --- one request, in the event loop ------------------------------------------------------

    async def _run_request(self, key: Hashable, prompt: PromptRequest) -> None:
        """Send the request, with retries, and queue its reply or error for `wait`."""
        single = ""
        for tries in count(1):
            answer = None
            try:
                if self.dialect.streams:
                    reply = Reply(key, [await self._read(prompt)])
                else:
                    async with self._turn if self._is_crowded else nullcontext():
                        answer = await self._post(prompt)
                    reply = self.dialect.parse_reply(key, answer, prompt.stops)
                self._replies.put(replace(reply, tries=tries))
                return
            except Exception as error:  # an invalid reply may raise anything
                self._is_crowded |= CROWDED in str(error)
                if (
                    prompt.count > 1
                    and isinstance(error, RequestRefused)
                    and error.status in _SINGLE
                ):
                    prompt, single = replace(prompt, count=1), str(error)
                    continue
                why, most, kind = self._classify_error(error, prompt, answer)
                pause_s = _pause_s(tries, error)
            if tries >= most:
                times = f" ({tries} tries)" if tries > 1 else ""
                before = f"{single}; with one text per request: " if single not in ("", why) else ""
                said = self._http.describe_error(ValueError(before + why))
                failure = kind(f"the generator at {self._url}: {said}{times}")
                self._replies.put(Reply(key, tries=tries, error=failure))
                return
            await asyncio.sleep(pause_s)

    def _classify_error(
        self, error: Exception, prompt: PromptRequest, answer: Any
    ) -> tuple[str, int, type[BeamwrightError]]:
        """Return an error's message, the maximum number of tries, and the class to raise then.

        answer: the complete reply; None if none was received.
        """
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, RequestRefused):
            most = MOST_TRIES if error.status in (*_PASSING, BROKEN) else 1
            # A refusal that is not temporary and not about key or model is this request's fault.
            ours = error.status not in (*_PASSING, *_OURS)
            return str(error), most, InputError if ours else UnavailableError
        if isinstance(error, TimeoutError):
            return f"no complete reply in {_reply_s(prompt):g} s", _MOST_HANGS, UnavailableError
        if isinstance(error, httpx.HTTPError | json.JSONDecodeError | ConnectionError):
            return said, MOST_TRIES, UnavailableError
        shown = ""
        with suppress(RecursionError):  # a reply may be nested too deeply to print
            shown = f" in {json.dumps(answer, ensure_ascii=False):.200}"
        return f"invalid completion ({said}){shown * (answer is not None)}", 1, InputError

    async def _post(self, prompt: PromptRequest) -> Any:
        """Request a complete reply, without streaming."""
        return await self._http.fetch_json(*self._build_request(prompt, self.dialect.token_bytes))

    async def _read(self, prompt: PromptRequest) -> Continuation:
        """Stream a text up to its first stop string."""
        text, logprobs = "", list[float]()
        ended: Ended | None = None
        async with self._http.stream(*self._build_request(prompt, _EVENT_BYTES)) as chunks:
            async for event in read_events(chunks):
                for choice in event.get("choices") or ():
                    text += parse_text(choice.get("text") or "")
                    logprobs += choice_logprobs(choice)
                    reason = choice.get("finish_reason")  # some servers send "" for none
                    ended = parse_finish_reason(reason) if reason else ended
                stops = [text.find(s) + len(s) for s in prompt.stops if s in text]
                if stops:
                    text, ended = text[: min(stops)], "stop"
                    break
        if ended is None:  # the stream broke off, so the text is incomplete
            raise ConnectionAbortedError("the stream broke off")
        return Continuation(text, None, tuple(logprobs), ended)

    def _build_request(
        self, prompt: PromptRequest, per_token: int
    ) -> tuple[str, str, float, int, Any]:
        """Return the arguments of `ServerClient.stream` for a prompt, with timeout and size limit.

        The size limit includes the prompt, which some servers repeat with every text.

        per_token: maximum bytes of JSON per generated token.
        """
        per_text = prompt.max_tokens * per_token + len(prompt.token_ids) * _PROMPT_BYTES
        most, body = _REPLY_BYTES + prompt.count * per_text, self.dialect.body(self.name, prompt)
        return "POST", self.dialect.path, _reply_s(prompt), most, body

    # --- detection of the server -------------------------------------------------------------

    async def _connect(self, wanted: str) -> None:
        """Find the model on the server; retry for about a minute while the server loads it."""
        for tries in count(1):
            try:
                return await self._detect_server(wanted)
            except RequestRefused as error:
                if error.status not in _LOADING or tries >= MOST_TRIES:
                    raise
                await asyncio.sleep(_pause_s(tries, error))

    async def _detect_server(self, wanted: str) -> None:
        """Detect the model's name, its context, and the richest dialect that the server supports.

        A Beamwright server's model that runs a whole search per reply is refused.
        """
        answer = await self._get_info("models", _MODELS_S)
        models = {parse_text(model["id"]): model for model in answer["data"] or ()}
        name = wanted or (next(iter(models)) if len(models) == 1 else None)
        if name not in models and f"{name}:latest" in models:  # Ollama's names have a tag
            name = f"{name}:latest"
        if name not in models:
            names = self._http.printable_line(", ".join(sorted(models)[:12]))
            names = names or "none: load or pull one there"
            raise InputError(f"{self._option}: append #NAME of a model; the server has {names}")
        self.name = name
        self.context = find_count(models[name], "max_model_len") or 0
        if models[name].get("owned_by") == "beamwright" and not name.endswith(PLAIN_SUFFIX):
            whole = "this Beamwright server would run a whole search for each step"
            raise InputError(f"{self._option}: {whole}; name its model #{name}{PLAIN_SUFFIX}")
        if models[name].get("owned_by") == LLAMA and await self._try_llama_api():
            return
        refusals, forms, without = list[str](), [*_FORMS], frozenset[str]()
        while forms:
            extras, ids = forms[0]
            self.dialect = Completions(ids=ids, extras=extras, without=without)
            try:
                self.dialect = await self._probe_abilities(self.dialect)
                return
            except RequestRefused as error:
                if error.status not in _MISUNDERSTOOD:
                    raise
                refusals.append(str(error))
                named = frozenset(name for name in OPTIONAL if name in str(error)) - without
                without |= named
                forms = forms if named else forms[1:]
        said = self._http.describe_error(ValueError("; ".join(dict.fromkeys(refusals))))
        raise InputError(f"{self._option}: {said}")

    async def _get_info(self, path: str, most_s: float) -> Any:
        """Return the JSON of a GET request about the server, such as its list of models."""
        return await self._http.fetch_json("GET", path, most_s, _MODELS_BYTES)

    async def _try_llama_api(self) -> bool:
        """Use llama-server's own API; return False if the server reports no sampled tokens."""
        try:
            # A server of several models loads the model `name` for this request.
            props = await self._get_info(f"{self._root}/props?model={quote(self.name)}", _REPLY_S)
            self.dialect = dialect = LlamaServer.of(self._root, props)
            answer = await self._post(self._probe(()))
            (written,) = dialect.parse_reply("", answer, ()).written
        except (RequestRefused, KeyError, TypeError, ValueError) as error:
            if isinstance(error, RequestRefused) and error.status not in _MISUNDERSTOOD:
                raise
            return False
        self._check_tokenizer(written.text, written.token_ids or ())
        self.context = self.context or dialect.context
        return True

    async def _probe_abilities(self, dialect: Completions) -> Completions:
        """Send sample requests in a dialect; return it with the abilities that replies show."""
        choice = await self._sample_probe(())
        text, token_ids = parse_text(choice["text"]), choice.get("token_ids")
        returns_ids = dialect.extras and token_ids is not None
        if returns_ids:
            self._check_tokenizer(text, token_ids or ())
        shown = False
        if text.strip():
            stop = text.strip()[0]
            choice = await self._sample_probe((stop,))
            named = stop in [choice.get(name) for name in STOP_FIELDS]
            shown = named or str(choice.get("text", "")).endswith(stop)
        # If replies do not show the stop string, each text is streamed by its own request, cut at
        # the stop string and tokenised here.
        most = None if shown else 1
        return replace(dialect, most=most, token_ids=returns_ids and shown, streams=not shown)

    def _check_tokenizer(self, text: str, token_ids: Sequence[int]) -> None:
        """Raise InputError unless `token_ids`, decoded here, give the server's text."""
        known = all(0 <= token < self.codec.vocab_size for token in token_ids)
        here = self.codec.decode(token_ids) if known else None
        if here is None or here.strip("\ufffd ") != text.strip("\ufffd "):
            raise InputError(
                f"{self._option}: the server's tokens do not match --tokenizer: it wrote "
                f"{self._http.printable_line(repr(text))}, which decodes to {here!r} here"
            )

    async def _sample_probe(self, stops: tuple[str, ...]) -> Mapping[str, Any]:
        """Request a few greedy tokens, and return the reply's choice as JSON, not parsed."""
        choice: Mapping[str, Any] = (await self._post(self._probe(stops)))["choices"][0]
        return choice

    def _probe(self, stops: tuple[str, ...]) -> PromptRequest:
        ids, greedy = tuple(self.codec.encode(_PROMPT)), SamplingSettings(temperature=0.0)
        return PromptRequest(ids, lambda: _PROMPT, 1, 0, 4, greedy, stops)


# --- parts of `--model` and its companions ------------------------------------------------------


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # unbalanced brackets, or an invalid port
        return False


def _tokenizer_of(settings: ModelSettings, name: str) -> Path:
    if settings.tokenizer is not None:
        return tokenizer_folder(settings.tokenizer, f"tokenizer {settings.tokenizer}")
    try:
        return tokenizer_folder(name, f"tokenizer {name}")
    except InputError as error:
        raise InputError(
            f"--model {settings.model}: the model's tokenizer is needed here; "
            "pass --tokenizer PATH or --tokenizer hf:ORG/NAME"
        ) from error


def _read_key(file: str | None) -> str | None:
    if file is None:
        return None
    words = read_text(Path(file), "--model-key ").split()
    if len(words) != 1 or not words[0].isascii():
        raise InputError(f"--model-key {file}: the file must hold one ASCII key")
    return words[0]


def _serve(runner: asyncio.Runner, client: httpx.AsyncClient) -> None:
    """Run the thread's event loop until it is stopped, then close the connections."""
    loop = runner.get_loop()
    loop.run_forever()
    loop.run_until_complete(client.aclose())
    runner.close()


def _pause_s(tries: int, error: Exception) -> float:
    """Return the seconds before the next try: doubled each time, at least `Retry-After`."""
    asked_s = getattr(error, "retry_after_s", 0.0)
    return min(max(_FIRST_WAIT_S * 2.0 ** (tries - 1), asked_s), _LONGEST_WAIT_S)


def _reply_s(prompt: PromptRequest) -> float:
    """Return the timeout of a complete reply in seconds."""
    return _REPLY_S + prompt.max_tokens * _TOKEN_S
