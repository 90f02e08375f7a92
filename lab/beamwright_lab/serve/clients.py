"""The official `openai` package (PyPI) against a server: what its users do, checked.

    python -m beamwright_lab.serve.clients
    python -m beamwright_lab.serve.clients --url http://127.0.0.1:8000/v1 --model NAME --key KEY

Without --url it starts a server of the bundled pair. `openai` may be installed anywhere else, too:
with --url this file needs nothing but that package.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

try:
    import openai
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    sys.exit("beamwright_lab.serve.clients needs the openai package: pip install openai")

PROBLEM = (
    "Eva starts with 125 cards. In February Eva gets 11 cards. Then in March Eva finds 17 cards. "
    "How many cards does Eva have now?"
)
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


class Checks:
    """What a user of the package does. client: it. model: the name of the server's recipe."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self.client, self.model = client, model
        self.base = str(client.base_url).removesuffix("v1/")

    def ask(self, **fields: Any) -> Any:
        messages = [{"role": "user", "content": PROBLEM}]
        whole = {"model": self.model, "messages": messages, "seed": 7, **fields}
        return self.client.chat.completions.create(**whole)

    def refused(self, kind: type[openai.APIStatusError], **fields: Any) -> openai.APIStatusError:
        try:
            self.ask(**fields)
        except kind as refusal:
            error = refusal
        else:
            raise AssertionError("it is not refused")
        assert error.response.headers["x-should-retry"] == "false"
        assert error.request_id
        return error

    # --- checks: each returns what is worth saying -----------------------------------------------

    def models(self) -> str:
        names = [each.id for each in self.client.models.list()]
        assert {self.model, f"{self.model}:plain"} <= set(names)
        assert self.client.models.retrieve(f"{self.model}:plain").owned_by == "beamwright"
        return f"{len(names)} names"

    def chat(self) -> str:
        found = self.ask()
        (choice,) = found.choices
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        used = found.usage
        assert used.total_tokens == used.prompt_tokens + used.completion_tokens
        assert used.completion_tokens_details.reasoning_tokens > 0
        assert self.ask().choices[0].message.content == choice.message.content  # equal seeds
        return repr(choice.message.content[-24:])

    def streaming(self) -> str:
        whole = self.ask().choices[0].message.content
        text, thought, ends, used = "", "", [], None
        options = {"include_usage": True}
        for chunk in self.ask(stream=True, stream_options=options):
            used = chunk.usage or used
            for choice in chunk.choices:
                assert not (text and getattr(choice.delta, "reasoning", None))
                text += choice.delta.content or ""
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
        assert text == whole
        assert len(ends) == 1
        assert used is not None
        return f"{len(thought.splitlines())} rounds told"

    def stream_helper(self) -> str:
        messages: Any = [{"role": "user", "content": PROBLEM}]
        kinds = set()
        with self.client.chat.completions.stream(
            model=self.model, messages=messages, seed=7
        ) as stream:
            kinds |= {event.type for event in stream}
            final = stream.get_final_completion()
        assert final.choices[0].message.content == self.ask().choices[0].message.content
        return ", ".join(sorted(kinds))

    def three_choices(self) -> str:
        whole = [choice.message.content for choice in self.ask(n=3).choices]
        assert len(whole) == 3
        texts = {0: "", 1: "", 2: ""}
        for chunk in self.ask(n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert list(texts.values()) == whole
        return f"{len(set(whole))} different"

    def text_completion(self) -> str:
        found = self.client.completions.create(
            model=f"{self.model}:plain",
            prompt=["Ann has 3", "Ben has 4"],
            max_tokens=20,
        )
        assert [each.index for each in found.choices] == [0, 1]
        return repr(found.choices[0].text[:24])

    def response(self) -> str:
        found = self.client.responses.create(
            model=self.model, input=PROBLEM, extra_body={"seed": 7}
        )
        assert found.output_text == self.ask().choices[0].message.content
        kinds = [each.type for each in self.client.responses.create(
            model=self.model, input=PROBLEM, stream=True, extra_body={"seed": 7}
        )]  # fmt: skip
        assert kinds[0] == "response.created"
        assert kinds[-1] in ("response.completed", "response.incomplete")
        return f"{len(kinds)} events"

    def search_object(self) -> str:
        found = self.ask(extra_body={"search": {"method": "best-of-n", "n": 6, "width": 1}})
        assert (found.search["method"], found.search["n"]) == ("best-of-n", 6)
        return str(found.search["answer"])

    def errors(self) -> str:
        for kind, param, fields in (
            (openai.NotFoundError, "model", {"model": "no-such-model"}),
            (openai.BadRequestError, "temperature", {"temperature": 3}),
            (openai.BadRequestError, "presence_penalty", {"presence_penalty": 1}),
            (openai.BadRequestError, "messages", {"messages": []}),
            (openai.BadRequestError, "search.width", {"extra_body": {"search": {"width": "x"}}}),
            (
                openai.BadRequestError,
                "response_format",
                {"response_format": {"type": "json_object"}},
            ),
        ):
            error = self.refused(kind, **fields)
            assert error.param == param, (error.param, param)
        return "each names its param"

    def tools(self) -> str:
        assert self.refused(openai.BadRequestError, tools=[TOOL]).param == "tools"
        return "refused, naming tools"

    def cancelled(self) -> str:
        """Nothing is left of streams that are closed, and of requests that run out of time."""
        large = {"search": {"method": "best-of-n", "n": 64, "width": 1}}
        for _ in range(3):
            stream = self.ask(stream=True, extra_body=large)
            next(iter(stream))
            stream.close()
        hasty = self.client.with_options(timeout=0.05, max_retries=0)
        messages: Any = [{"role": "user", "content": PROBLEM}]
        with suppress(openai.APITimeoutError):
            hasty.chat.completions.create(model=self.model, messages=messages, extra_body=large)
        began = time.perf_counter()
        while self.searches():
            assert time.perf_counter() - began < 10
            time.sleep(0.01)
        return f"all gone {time.perf_counter() - began:.2f} s later"

    def searches(self) -> int:
        key = {"authorization": f"Bearer {self.client.api_key}"}
        request = urllib.request.Request(f"{self.base}health", headers=key)
        with urllib.request.urlopen(request) as response:
            found: int = json.load(response)["searches"]
        return found

    def at_once(self) -> str:
        async def all_of_them() -> list[str]:
            async with openai.AsyncOpenAI(
                base_url=str(self.client.base_url), api_key=self.client.api_key
            ) as client:
                messages: Any = [{"role": "user", "content": PROBLEM}]
                answers = await asyncio.gather(*(
                    client.chat.completions.create(model=self.model, messages=messages, seed=7)
                    for _ in range(8)
                ))  # fmt: skip
            return [each.choices[0].message.content or "" for each in answers]

        assert set(asyncio.run(all_of_them())) == {self.ask().choices[0].message.content}
        return "8 equal answers"


NAMES = (
    *("models", "chat", "streaming", "stream_helper", "three_choices"),
    *("text_completion", "response", "search_object", "errors", "tools"),
    *("cancelled", "at_once"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="with /v1")
    parser.add_argument("--model", default="bundled", help="name of the server's recipe")
    parser.add_argument("--key", default="none")
    options = parser.parse_args()
    context: Any = nullcontext()
    if options.url is None:
        from beamwright_lab.serve.running import server

        context = server("--n", "8", "--width", "4")
    failed = []
    with context as running:
        url = options.url or f"{running.url}/v1"
        checks = Checks(openai.OpenAI(base_url=url, api_key=options.key), options.model)
        for name in NAMES:
            check: Callable[[], str] = getattr(checks, name)
            try:
                print(f"PASS {name.replace('_', ' ')}: {check()}", flush=True)
            except Exception as error:
                failed.append(name)
                print(f"FAIL {name.replace('_', ' ')}: {error!r:.300}", flush=True)
    print(
        json.dumps({"benchmark": "serve_clients", "openai": openai.__version__, "failed": failed})
    )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
