"""From a solution to what a client reads: choices, calls of tools, usage."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.serve.desk import Job
from beamwright.serve.errors import ApiError
from beamwright.serve.logprobs import Token, chat_logprobs, completion_logprobs, tokens_of
from beamwright.solver.solution import Candidate, Solution
from beamwright.tree import COMPLETE_STOPS, StopReason

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """One choice. finish: of OpenAI's list. calls: of tools, whose text is taken out.

    token_ids: all that were drawn, None where nobody asked for them. stop: the string that has
    ended it, None where none has.
    """

    index: int
    text: str
    finish: str
    candidate: Candidate
    calls: tuple[dict[str, Any], ...] = ()
    tokens: tuple[Token, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    stop: str | None = None

    def behind(self, sent: str) -> str:
        """What of the text is left to say.

        Raises:
            ApiError: if it does not begin with what was sent: a search that did not fit beside
                others began again, alone, and its deadline struck earlier than the first time.
        """
        if not self.text.startswith(sent):
            raise ApiError(422, "the search began again, and ended otherwise", code="search_failed")
        return self.text[len(sent) :]


def answers(job: Job, solution: Solution, pieces: Sequence[bytes] = ()) -> list[Answer]:
    """The best of the candidates, the chosen one first. pieces: bytes of token ids."""
    ask, found = job.ask, []
    chosen = next(c for c in solution.candidates if c.lineage == solution.lineage)
    others = [c for c in solution.candidates if c is not chosen]
    others.sort(key=lambda c: -math.inf if c.score is None else c.score, reverse=True)
    for index, candidate in enumerate([chosen, *others][: ask.choices]):
        text, calls = _without_calls(candidate.text) if ask.tools else (candidate.text, ())
        tokens = None
        if ask.top_logprobs is not None:
            tokens = tuple(tokens_of(solution, candidate, pieces, ask.top_logprobs))
        finish = "tool_calls" if calls else _finish(candidate)
        ids = _reply_ids(solution, candidate) if ask.token_ids or ask.stops else ()
        stop = _stop_of(candidate, ids, ask.stops, pieces)
        if ask.with_stop and stop is not None:
            text += stop
        drawn = ids if ask.token_ids else None
        found.append(Answer(index, text, finish, candidate, calls, tokens, drawn, stop))
    return found


def _reply_ids(solution: Solution, candidate: Candidate) -> tuple[int, ...]:
    steps = solution.tree.node(candidate.lineage).reply()
    return tuple(token for step in steps for token in step.token_ids)


def _stop_of(
    candidate: Candidate, ids: Sequence[int], stops: Sequence[str], pieces: Sequence[bytes]
) -> str | None:
    """The string before which a text was cut: the first one there."""
    if candidate.stop != StopReason.STOP_STRING or not pieces:
        return None
    whole = b"".join(pieces[token] for token in ids).decode("utf-8", "replace")
    places = {whole.find(each): each for each in reversed(stops) if each in whole}
    return places[min(places)] if places else None


def _finish(candidate: Candidate) -> str:
    return "stop" if candidate.stop in COMPLETE_STOPS else "length"


def _without_calls(text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    calls = []
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match[1])
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, RecursionError):
            return text, ()
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        function = {"name": str(name), "arguments": arguments}
        found = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        calls.append(found)
    return (_CALL.sub("", text).strip(), tuple(calls)) if calls else (text, ())


# --- shapes ----------------------------------------------------------------------------------


def usage(jobs: Sequence[Job], found: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """completion_tokens: all that the generator wrote; reasoning_tokens: those not returned."""
    solutions = [job.outcome for job in jobs if isinstance(job.outcome, Solution)]
    prompt = sum(job.prompt_tokens for job in jobs)
    generated = sum(each.tokens.generated for each in solutions)
    returned = sum(map(_num_returned, solutions, found))
    search = {
        "kept_tokens": sum(each.tokens.kept for each in solutions),
        "overrun_tokens": sum(each.tokens.overrun for each in solutions),
        "speculated_tokens": sum(each.tokens.speculated for each in solutions),
        "verifier_tokens": sum(
            each.tokens.verifier_prefilled + each.tokens.verifier_generated for each in solutions
        ),
    }
    details = {"reasoning_tokens": max(0, generated - returned)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},  # nothing is kept from request to request
        "completion_tokens_details": details,
        "search": search,
    }


def _num_returned(solution: Solution, found: Sequence[Answer]) -> int:
    """Tokens of the answers; a step that several have is one."""
    ends = [solution.tree.node(answer.candidate.lineage) for answer in found]
    return sum(len(node.token_ids) for node in {node for end in ends for node in end.reply()})


def search_facts(job: Job, solution: Solution, found: Sequence[Answer]) -> dict[str, Any]:
    """What is said of the search itself, beside OpenAI's fields."""
    settings = solution.settings.search
    return {
        "method": settings.search,
        "n": settings.n,
        "width": settings.width,
        "seed": solution.seed,
        "rounds": solution.rounds,
        "stop_reason": solution.reason_fewer,
        "tree_hash": solution.tree_hash,
        "exact": solution.exact,
        "answer": solution.answer,
        "warnings": list(solution.warnings),
        "seconds": round(solution.time.total_s, 3),
        "candidates": [
            {
                "index": each.index,
                "answer": each.candidate.answer,
                "score": each.candidate.score,
                "stop": each.candidate.stop,
                "tokens": each.candidate.tokens,
            }
            for each in found
        ],
    }


@dataclass(frozen=True)
class ReplyFormat:
    """How one endpoint writes what all of them say."""

    kind: str
    prefix: str
    chat: bool

    def head(self, job: Job, fingerprint: str, *, chunk: bool) -> dict[str, Any]:
        """What every object begins with."""
        return {
            "id": self.prefix + job.id.removeprefix("chatcmpl-"),
            "object": f"{self.kind}.chunk" if chunk and self.chat else self.kind,
            "created": int(job.created_s),
            "model": job.ask.model,
            "system_fingerprint": fingerprint,
        }

    def choice(self, answer: Answer, offset: int = 0) -> dict[str, Any]:
        """A whole answer."""
        if not self.chat:
            found: dict[str, Any] = {
                "index": offset + answer.index,
                "text": answer.text,
                "finish_reason": answer.finish,
                "stop_reason": answer.stop,
                "logprobs": completion_logprobs(answer.tokens),
            }
            if answer.token_ids is not None:
                found["token_ids"] = list(answer.token_ids)
            return found
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text if answer.text or not answer.calls else None,
            "refusal": None,
        }
        if answer.calls:
            message["tool_calls"] = list(answer.calls)
        return {
            "index": offset + answer.index,
            "message": message,
            "finish_reason": answer.finish,
            "logprobs": chat_logprobs(answer.tokens),
        }

    def piece(
        self, index: int, delta: Mapping[str, Any], answer: Answer | None = None
    ) -> dict[str, Any]:
        """A choice of a chunk. answer: whose log-probabilities go with it."""
        tokens = None if answer is None else answer.tokens
        if self.chat:
            logprobs = chat_logprobs(tokens)
            return {
                "index": index, "delta": dict(delta), "finish_reason": None, "logprobs": logprobs
            }  # fmt: skip
        return {
            "index": index,
            "text": delta.get("content", ""),
            "finish_reason": None,
            "logprobs": completion_logprobs(tokens),
        }


CHAT = ReplyFormat("chat.completion", "chatcmpl-", chat=True)
COMPLETION = ReplyFormat("text_completion", "cmpl-", chat=False)
