"""`POST /v1/completions`: texts, or token ids, that are continued as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from beamwright.serve.answers import Answer, AnswerToken
from beamwright.serve.body import MOST_TOP_LOGPROBS, Fields, Whole, parsed
from beamwright.serve.choices import LEAST_LOGPROB, ChoicesEndpoint
from beamwright.serve.errors import ApiError
from beamwright.serve.job import SearchJob
from beamwright.serve.options import RequestReader
from beamwright.tree import RawPrompt

_MOST_PROMPTS = 32
_PROMPTS = Field(max_length=_MOST_PROMPTS, fail_fast=True)
_Ids = Annotated[list[Whole], Field(fail_fast=True)]  # a body holds so many values


class CompletionFields(Fields):
    """What a completion takes."""

    prompt: str | Annotated[list[str], _PROMPTS] | _Ids | Annotated[list[_Ids], _PROMPTS]
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    return_token_ids: bool | None = Field(None, strict=True)
    include_stop_str_in_output: bool | None = Field(None, strict=True)


class CompletionsEndpoint(ChoicesEndpoint[CompletionFields]):
    """Prompts' continuations."""

    path, fields = "/v1/completions", CompletionFields
    kind, chunk, prefix = "text_completion", "text_completion", "cmpl-"

    def read(self, body: dict[str, Any]) -> tuple[CompletionFields, list[SearchJob]]:
        """A search for every prompt."""
        fields = parsed(CompletionFields, body)
        return fields, completion_jobs(self.queue.reader, fields)

    def content(self, answer: Answer) -> dict[str, Any]:
        """A text, and what vLLM says of it."""
        ids = {} if answer.token_ids is None else {"token_ids": list(answer.token_ids)}
        return {"text": answer.text, "stop_reason": answer.stop, **ids}

    def delta(self, said: dict[str, Any]) -> dict[str, Any]:
        """A part of one."""
        return {"text": said.get("content", "")}

    def logprobs(self, tokens: Sequence[AnswerToken] | None) -> dict[str, Any] | None:
        """Four lists of the same length."""
        if tokens is None:
            return None
        texts, offsets = [token.data.decode("utf-8", "replace") for token in tokens], [0]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        tops = [
            {data.decode("utf-8", "replace"): max(logprob, LEAST_LOGPROB) for data, logprob in top}
            for top in (token.top for token in tokens)
        ]
        return {
            "tokens": texts,
            "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets[:-1],
        }


def completion_jobs(reader: RequestReader, fields: CompletionFields) -> list[SearchJob]:
    """The searches of all prompts. Raises ApiError 400 for what is not understood."""
    prompts = _prompts(fields.prompt)
    if not prompts:
        raise ApiError(400, f"prompt: from 1 to {_MOST_PROMPTS} of them", "prompt")
    for name in ("return_token_ids", "include_stop_str_in_output"):
        if fields.stream and getattr(fields, name):
            raise ApiError(400, f"{name}: not in a stream", name, "unsupported")
    known = {
        "param": "prompt",
        "token_ids": bool(fields.return_token_ids),
        "with_stop": bool(fields.include_stop_str_in_output),
    }
    return [
        reader.job(fields, prompt, fields.max_tokens, fields.logprobs, **known)
        for prompt in prompts
    ]


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[RawPrompt]:
    if isinstance(prompt, str):
        return [RawPrompt(prompt)]
    ids = tuple(token for token in prompt if isinstance(token, int))
    if ids:
        return [RawPrompt(ids)]
    texts = [text for text in prompt if not isinstance(text, int)]
    return [RawPrompt(text if isinstance(text, str) else tuple(text)) for text in texts]
