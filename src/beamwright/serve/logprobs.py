"""Log-probabilities of an answer's tokens, each as its own bytes, in both of OpenAI's forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.serve.errors import ApiError
from beamwright.solver.solution import Candidate, Solution

_LEAST = -9999.0  # OpenAI's for what has no probability


@dataclass(frozen=True)
class Token:
    """A token of an answer, as its bytes. top: the likeliest in its place."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


def tokens_of(
    solution: Solution, candidate: Candidate, pieces: Sequence[bytes], num_top: int
) -> list[Token]:
    """Those that an answer's text consists of: none adds nothing, or is behind a stop string."""
    found: list[Token] = []
    left = len(candidate.text.encode("utf-8", "replace"))
    for node in solution.tree.node(candidate.lineage).reply():
        if len(node.logprobs) != len(node.token_ids):
            raise ApiError(
                400, "logprobs: this generator does not say which tokens it drew", "logprobs",
                "unsupported",
            )  # fmt: skip
        tops = node.top or ((),) * len(node.token_ids)
        for token, logprob, top in zip(node.token_ids, node.logprobs, tops, strict=True):
            data = pieces[token]
            if not data or left <= 0:
                continue
            left -= len(data)
            likeliest = tuple((pieces[other], value) for other, value in top[:num_top])
            found.append(Token(data, logprob, likeliest))
    return found


def chat_logprobs(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    """As `choices[].logprobs` of a chat has it."""
    if tokens is None:
        return None

    def shown(data: bytes, logprob: float) -> dict[str, Any]:
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(data)}

    content = [
        {**shown(each.data, each.logprob), "top_logprobs": [shown(*top) for top in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    """As `choices[].logprobs` of a completion has it."""
    if tokens is None:
        return None
    offsets, at = [], 0
    for each in tokens:
        offsets.append(at)
        at += len(each.text)
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [max(each.logprob, _LEAST) for each in tokens],
        "top_logprobs": [
            {data.decode("utf-8", "replace"): max(value, _LEAST) for data, value in each.top}
            for each in tokens
        ],
        "text_offset": offsets,
    }
