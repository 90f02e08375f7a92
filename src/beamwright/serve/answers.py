"""Answers: what all endpoints say of a solution: texts, calls of tools, tokens, usage."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.serve.errors import ApiError
from beamwright.serve.job import SearchJob
from beamwright.solver.solution import Candidate, Solution
from beamwright.tree import COMPLETE_STOPS, StopReason

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer, as its bytes. top: the likeliest in its place."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """One choice. finish: of OpenAI's list. calls: of tools, whose text is taken out.

    tokens: with log-probabilities, token_ids: all that were drawn; None where nobody asked for
    them. stop: the string that has ended it, None where none has.
    """

    index: int
    text: str
    finish: str
    candidate: Candidate
    calls: tuple[dict[str, Any], ...] = ()
    tokens: tuple[AnswerToken, ...] | None = None
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


def solution_of(job: SearchJob) -> Solution:
    """Of a job that is done."""
    assert isinstance(job.outcome, Solution)
    return job.outcome


def answers_of(job: SearchJob, pieces: Sequence[bytes] = ()) -> list[Answer]:
    """The best of a job's candidates, the chosen one first. pieces: bytes of token ids."""
    solution, answers = solution_of(job), []
    chosen = next(c for c in solution.candidates if c.lineage == solution.lineage)
    others = [c for c in solution.candidates if c is not chosen]
    others.sort(key=lambda c: -math.inf if c.score is None else c.score, reverse=True)
    for index, candidate in enumerate([chosen, *others][: job.choices]):
        text, calls = calls_of(candidate.text) if job.tools else (candidate.text, ())
        tokens = None
        if job.top_logprobs is not None:
            tokens = tuple(_tokens(solution, candidate, pieces, job.top_logprobs))
        steps = solution.tree.node(candidate.lineage).reply()
        ids = tuple(token for step in steps for token in step.token_ids)
        stop = _stop(candidate, ids, job.stops, pieces)
        if job.with_stop and stop is not None:
            text += stop
        complete = candidate.stop in COMPLETE_STOPS
        finish = "tool_calls" if calls else "stop" if complete else "length"
        drawn = ids if job.token_ids else None
        answers.append(Answer(index, text, finish, candidate, calls, tokens, drawn, stop))
    return answers


def _stop(
    candidate: Candidate, ids: Sequence[int], stops: Sequence[str], pieces: Sequence[bytes]
) -> str | None:
    """The string before which a text was cut: the first one there."""
    if candidate.stop != StopReason.STOP_STRING or not pieces:
        return None
    whole = b"".join(pieces[token] for token in ids).decode("utf-8", "replace")
    places = {whole.find(stop): stop for stop in reversed(stops) if stop in whole}
    return places[min(places)] if places else None


def calls_of(text: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """A text without its calls of tools, and these; what is none stays text."""
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
        call_id = f"call_{secrets.token_hex(12)}"
        calls.append({"id": call_id, "type": "function", "function": function})
    return (_CALL.sub("", text).strip(), tuple(calls)) if calls else (text, ())


def _tokens(
    solution: Solution, candidate: Candidate, pieces: Sequence[bytes], num_top: int
) -> Iterator[AnswerToken]:
    """Those that an answer's text consists of: none adds nothing, or is behind a stop string."""
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
            if data and left > 0:
                left -= len(data)
                likeliest = tuple((pieces[other], value) for other, value in top[:num_top])
                yield AnswerToken(data, logprob, likeliest)


# --- what is said beside the text ------------------------------------------------------------


def usage(jobs: Sequence[SearchJob], answers: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """completion_tokens: all that the generator wrote; reasoning_tokens: those not returned."""
    solutions = [job.outcome for job in jobs if isinstance(job.outcome, Solution)]
    counts = [solution.tokens for solution in solutions]
    prompt, generated = sum(job.prompt_tokens for job in jobs), sum(c.generated for c in counts)
    returned = 0
    for solution, some in zip(solutions, answers, strict=False):
        ends = [solution.tree.node(answer.candidate.lineage) for answer in some]
        steps = {step for end in ends for step in end.reply()}  # one that several have is one
        returned += sum(len(step.token_ids) for step in steps)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},  # nothing is kept from request to request
        "completion_tokens_details": {"reasoning_tokens": max(0, generated - returned)},
        "search": {
            "kept_tokens": sum(c.kept for c in counts),
            "overrun_tokens": sum(c.overrun for c in counts),
            "speculated_tokens": sum(c.speculated for c in counts),
            "verifier_tokens": sum(c.verifier_prefilled + c.verifier_generated for c in counts),
        },
    }


def search_facts(job: SearchJob, answers: Sequence[Answer]) -> dict[str, Any]:
    """What is said of the search itself, beside OpenAI's fields."""
    solution = solution_of(job)
    settings = solution.settings.search
    shown = ("answer", "score", "stop", "tokens")
    return {
        "method": settings.search,
        "n": settings.n,
        "width": settings.width,
        **{name: getattr(solution, name) for name in ("seed", "rounds", "tree_hash", "exact")},
        "stop_reason": solution.reason_fewer,
        "answer": solution.answer,
        "warnings": list(solution.warnings),
        "seconds": round(solution.time.total_s, 3),
        "candidates": [
            {"index": each.index, **{name: getattr(each.candidate, name) for name in shown}}
            for each in answers
        ],
    }
