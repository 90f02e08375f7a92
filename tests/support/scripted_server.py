"""A completion server of which a test says what it answers, and how it is when it fails."""

import itertools
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from beamwright.remote.dialects import PromptRequest, Reply
from beamwright.sections import SamplingSettings


class Handler(BaseHTTPRequestHandler):
    """Answers as the script says, which the server carries."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        models, props = self.server.script.models, self.server.script.props
        if self.path.startswith("/props"):
            self.answer((404, {"error": "no such thing"}) if props is None else (200, props))
            return
        models = next(models) if hasattr(models, "__next__") else models
        listed = isinstance(models, list)
        self.answer((200, {"object": "list", "data": models}) if listed else models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.script.bodies.append(body)
        self.server.script.paths.append(self.path)
        self.answer(self.server.script.answer(body))

    def answer(self, found):
        self.server.script.keys.append(self.headers["authorization"])
        self.server.script.accepts.append(self.headers["accept-encoding"])
        if found is None:
            self.close_connection = True
        elif callable(found):
            status = getattr(found, "status", 200)
            self.write(status, found(), **getattr(found, "headers", {}))
        elif isinstance(found, tuple):
            self.write(found[0], [json.dumps(found[1]).encode()], **dict(*found[2:]))
        else:
            events = (f"data: {json.dumps(event)}\n\n".encode() for event in found)
            self.write(200, itertools.chain(events, [b"data: [DONE]\n\n"]))

    def write(self, status, chunks, **headers):
        self.send_response(status)
        for name, value in {"connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        try:
            for chunk in chunks:
                self.wfile.write(chunk)
                self.wfile.flush()
        except OSError:
            self.server.script.gone.set()


class Scripted:
    """answer: from a request's body to (status, JSON, perhaps headers), or to lines of a stream;
    None hangs up. A function gives the bytes of a reply, chunk by chunk (its `headers`: more of
    them); `models` may be one, too.

    bodies: of all requests so far, those of the start included; paths: where they went. props: of
    llama-server.
    """

    def __init__(self, answer, models=None, props=None):
        self.answer, self.bodies, self.keys, self.accepts = answer, [], [], []
        self.paths, self.props = [], props
        self.models = [{"id": "m", "max_model_len": 512}] if models is None else models
        self.gone = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.script = self
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)

    @property
    def asked(self):
        """Bodies of questions, those of the start left out."""
        return [body for body in self.bodies if body.get("max_tokens", body.get("n_predict")) != 4]

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def choice(text, **fields):
    return {"index": 0, "text": text, "finish_reason": "stop", **fields}


def piece(text, **fields):
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **fields}]}


def said(*choices, **usage):
    return 200, {"choices": list(choices), "usage": usage}


def refuses(message, status=400):
    return status, {"error": {"message": message, "code": status}}


def sent(content, status=200, **headers):
    """A reply's bytes, with headers."""

    def reply():
        return iter([content])

    reply.headers = {name.replace("_", "-"): value for name, value in headers.items()}
    reply.status = status
    return reply


@contextmanager
def speaking(codec, *, ids=True, extras=True, names=True, then=None, **options):
    """A server that understands so much; then: answers to questions behind the start."""

    def answer(body):
        if not ids and isinstance(body["prompt"], list):
            return refuses("prompt: a string is expected", 500)  # as llama-cpp-python has it
        if not extras and "return_token_ids" in body:
            return refuses("return_token_ids: extra fields are not permitted", 422)
        if body["max_tokens"] != 4:
            return then(body)
        text = " 2 and"
        stop = next((each for each in body.get("stop", ()) if each in text), None)
        if stop is not None:
            cut = text.index(stop)
            text = text[: cut + len(stop)] if extras else text[:cut]
        more = {"stop_reason": stop} if names else {}
        if extras:
            more["token_ids"] = codec.encode(text)
        return said(choice(text, **more))

    with Scripted(answer, **options) as server:
        yield server


PROPS = {
    "default_generation_settings": {"params": {"top_k": 40}, "n_ctx": 512},
    **{"total_slots": 3, "model_path": "m.gguf", "build_info": "b11434"},
}


def drawn(codec, text, index=0, stop_type="limit", stopping_word="", **fields):
    """A text as llama-server b11434 has it; without the log-probabilities of what ended it."""
    ids = codec.encode(text)
    known = ids[: len(ids) - len(codec.encode(stopping_word))]
    probs = [{"id": token, "token": "", "logprob": -0.25, "top_logprobs": []} for token in known]
    return {
        **{"index": index, "content": text.removesuffix(stopping_word), "tokens": ids},
        **{"stop_type": stop_type, "stopping_word": stopping_word, "tokens_evaluated": 7},
        **{"timings": {"cache_n": 5, "prompt_n": 2}, "completion_probabilities": probs},
        **fields,
    }


@contextmanager
def llama_server(codec, then=None, props=PROPS, start=None):
    """llama-server b11434, whose answers to questions behind the start are those of `then`."""

    def answer(body):
        if "prompt" not in body or "max_tokens" in body:  # of its other endpoint
            return said(choice(" 2 and"))
        if body["n_predict"] != 4:
            return then(body)
        return (200, drawn(codec, " 2 and")) if start is None else start

    models = [{"id": "m.gguf", "owned_by": "llamacpp", "meta": {"n_ctx_train": 4096}}]
    with Scripted(answer, models, props) as server:
        yield server


def question(codec, text="one two", **changes):
    given = {
        "token_ids": tuple(codec.encode(text)),
        "text": lambda: text,
        "count": 1,
        "seed": 5,
        "max_tokens": 9,
        "sampling": SamplingSettings(temperature=0.7),
        "stops": ("\n\n",),
        **changes,
    }
    return PromptRequest(**given)


def answered(source, asked):
    """A source's reply to one question."""
    source.send("key", asked)
    (reply,) = waited(source)
    assert reply.key == "key"
    return reply


def waited(source):
    """What a source has answered, as soon as it has."""
    end = time.monotonic() + 20
    while not (found := source.wait(0.1)):
        assert time.monotonic() < end, "no reply"
    return found


class Script:
    """A source that answers when a test says so."""

    context, token_ids = 1024, True

    def __init__(self, codec):
        self.codec, self.most = codec, None
        self.asked, self.cancelled, self._replies = {}, [], []

    def send(self, key, asked):
        self.asked[key] = asked

    def wait(self, timeout_s):
        found, self._replies = self._replies, []
        return found

    def cancel(self, key):
        self.cancelled.append(key)

    def answer(self, key, *written, **fields):
        self._replies.append(Reply(key, written, **fields))
