"""Answers: what all endpoints say of a solution, and what of it is final before its end.

Final text is what every candidate that can still win begins with. No server streams less. What
was thought is told apart, and of what is said behind a thought nothing is final before it is.
Under a strategy that commits (`StrategyRow.commits`) a step with children gets no more, so who can
still win is a leaf that is not pruned; a leaf that is being written says what its parent does.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from itertools import accumulate
from os.path import commonprefix
from typing import Any

from beamwright.engine.endings import text_before
from beamwright.models.tokenizer import TextCodec
from beamwright.serve.body import ApiError, read_arguments, strict_json
from beamwright.serve.job import SearchJob, Told
from beamwright.solver.solution import Candidate
from beamwright.tree import COMPLETE_STOPS, Node, NodeState, SearchTree, StopReason

# None within another: a text of many beginnings is read once.
_CALL = re.compile(r"<tool_call>\s*(\{(?:(?!<tool_call>).)*?\})\s*</tool_call>", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters")
_SCALAR = re.compile(r'[\s]*(["\[\d-]|(true|false)\s*$)')  # or a list: no arguments
_LEAST_LOGPROB = -9999.0  # OpenAI's for what has no probability
_BROKEN = "\ufffd"  # the first bytes of a character that is not complete


def as_text(node: Node, codec: TextCodec | None, stops: Sequence[str]) -> Told:
    """A reply as it is: nothing is told apart, and the marks of thoughts are there."""
    steps = node.reply()
    if codec is None or not any(step.thought for step in steps):
        return Told(said=node.text)
    text = codec.decode([token for step in steps for token in step.token_ids])
    return Told(said=text_before(text, stops if node.stop is StopReason.STOP_STRING else ()))


def told(node: Node) -> Told:
    """A reply in its two parts; what is said between thoughts counts, unlike in `Node.said`."""
    thought, said, steps = "", "", node.reply()
    for step in steps:
        piece = node.text[len(step.parent.text if step.parent else "") : len(step.text)]
        thought, said = (thought + piece, said) if step.thought else (thought, said + piece)
    return Told(thought.strip(), said.lstrip() if steps and steps[0].thought else said)


def final_text(
    tree: SearchTree, stops: Sequence[str] = (), told: Callable[[Node], Told] = told
) -> Told:
    """What the answer will begin with, whatever else is decided.

    stops: strings that end an answer: what may be the beginning of one is held back. told: of a
    path, what may be final.
    """
    leaves: list[Node] = []
    waiting = [tree.root]
    while waiting:
        node = waiting.pop()
        if node.state is NodeState.PRUNED:
            continue
        children = [child for child in node.children if not child.speculative]
        if node.state is NodeState.OPEN and node.parent is not None:
            leaves.append(node.parent)
        elif children:
            waiting += children
        else:
            leaves.append(node)
    thoughts, texts = zip(*map(told, leaves), strict=True) if leaves else ((), ())
    thought = held_back(commonprefix(thoughts), ())  # noqa: RUF071 (of texts, not paths)
    said = held_back(commonprefix(texts), stops)  # noqa: RUF071
    going = any(leaf.thinking and text for leaf, text in zip(leaves, thoughts, strict=True))
    settled = len(set(thoughts)) == 1 and not going
    return Told(thought.rstrip(), said if settled else "")


def held_back(text: str, stops: Sequence[str]) -> str:
    """Without what may yet become another character, or be cut off as a stop string."""
    text = text.rstrip(_BROKEN)
    tails = ((stop, range(max(0, len(text) - len(stop)), len(text))) for stop in stops)
    begun = (start for stop, starts in tails for start in starts if stop.startswith(text[start:]))
    return text[: min(begun, default=len(text))]


def choices_of(job: SearchJob) -> list[Candidate]:
    """The best candidates of a job that is done, the chosen one first."""
    solution = job.found

    def rank(candidate: Candidate) -> tuple[bool, float]:
        score = candidate.score
        return candidate.lineage != solution.lineage, math.inf if score is None else -score

    return sorted(solution.candidates, key=rank)[: job.choices]


def finish_of(candidate: Candidate) -> str:
    """Of OpenAI's list."""
    return "stop" if candidate.stop in COMPLETE_STOPS else "length"


def behind(text: str, sent: str) -> str:
    """What of an answer is left to say.

    Raises:
        ApiError: if it does not begin with what was sent: a search that did not fit beside others
            began again, alone, and its deadline struck earlier than the first time.
    """
    if not text.startswith(sent):
        raise ApiError(422, "the search began again, and ended otherwise", code="search_failed")
    return text[len(sent) :]


def calls_of(text: str) -> tuple[str, list[dict[str, Any]]]:
    """A text without its calls of tools, in Qwen's form, and these; what is none stays text.

    A call of which something would be left out is none, nor is one that holds what JSON does not.
    """
    calls = []
    for match in _CALL.finditer(text):
        try:
            call = strict_json(match[1])
            name, given = call.pop("name"), [call.pop(each) for each in _ARGUMENTS if each in call]
            arguments = read_arguments(*given)
        except (ValueError, KeyError, TypeError):  # TypeError: arguments under both names
            return text, []
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        if not isinstance(name, str) or call or _SCALAR.match(arguments):
            return text, []
        function = {"name": name, "arguments": arguments}
        calls.append(
            {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        )
    return (_CALL.sub("", text).strip(), calls) if calls else (text, [])


def token_logprobs(
    job: SearchJob, candidate: Candidate, pieces: Sequence[bytes], num_top: int
) -> list[dict[str, Any]]:
    """Of the tokens that an answer's text consists of, as chats have them: of none that adds
    nothing, or is behind a stop string. pieces: bytes of token ids.

    Raises:
        ApiError: if the generator does not say which tokens it drew.
    """

    def shown(token: int, logprob: float) -> dict[str, Any]:
        text, value = pieces[token].decode("utf-8", "replace"), max(logprob, _LEAST_LOGPROB)
        return {"token": text, "logprob": value, "bytes": list(pieces[token])}

    content, left = [], len(candidate.text.encode("utf-8", "replace"))
    for step in job.reply(candidate):
        if step.thought:
            left -= len(step.step_text.encode("utf-8", "replace"))
            continue
        if not pieces or len(step.logprobs) != len(step.token_ids):
            said = "logprobs: this generator does not say which tokens it drew"
            raise ApiError(400, said, "logprobs", "unsupported")
        tops = step.top or ((),) * len(step.token_ids)
        for token, logprob, top in zip(step.token_ids, step.logprobs, tops, strict=True):
            if pieces[token] and left > 0:
                left -= len(pieces[token])
                likeliest = [shown(*other) for other in top[:num_top]]
                content.append({**shown(token, logprob), "top_logprobs": likeliest})
    return content


def completion_logprobs(
    job: SearchJob, candidate: Candidate, pieces: Sequence[bytes], text: str
) -> dict[str, Any]:
    """Of all tokens that were drawn, as completions have them. pieces: bytes of token ids.

    Of a generator that does not say which tokens it drew, their log-probabilities alone.
    """
    steps, decoder = job.reply(candidate), getincrementaldecoder("utf-8")("ignore")
    values = [max(value, _LEAST_LOGPROB) for step in steps for value in step.logprobs]
    ids = [token for step in steps for token in step.token_ids]
    if not pieces or len(ids) != len(values):
        unknown = dict.fromkeys(("tokens", "top_logprobs", "text_offset"))
        return {"token_logprobs": values, **unknown}
    tops = [each for step in steps for each in step.top or ((),) * len(step.token_ids)]
    others = (other for top in tops for other, _ in top)
    shown = {t: pieces[t].decode("utf-8", "replace") for t in {*ids, *others}}
    ends = accumulate(len(decoder.decode(pieces[token])) for token in ids)
    known = zip(ids, values, tops, strict=True)
    return {
        "tokens": [shown[token] for token in ids],
        "token_logprobs": values,
        "top_logprobs": [
            {shown[token]: value, **{shown[each]: max(p, _LEAST_LOGPROB) for each, p in top}}
            for token, value, top in known
        ],
        "text_offset": [min(end, len(text)) for end in (0, *ends)][: len(ids)],
    }


def usage(jobs: Sequence[SearchJob]) -> dict[str, Any]:
    """completion_tokens: all that the generator wrote; reasoning_tokens: of thoughts, and those
    not returned."""
    counts = [job.found.tokens for job in jobs]
    prompt, generated = sum(job.prompt_tokens for job in jobs), sum(c.generated for c in counts)
    returned = 0
    for job in jobs:
        steps = {step for answer in choices_of(job) for step in job.reply(answer)}  # shared: one
        returned += sum(len(step.token_ids) for step in steps if not step.thought)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},  # nothing is kept from request to request
        "completion_tokens_details": {"reasoning_tokens": max(0, generated - returned)},
        "search": {
            "kept_tokens": sum(c.kept for c in counts),
            "thought_tokens": sum(c.thought for c in counts),
            "overrun_tokens": sum(c.overrun for c in counts),
            "speculated_tokens": sum(c.speculated for c in counts),
            "verifier_tokens": sum(c.verifier_prefilled + c.verifier_generated for c in counts),
        },
    }


def search_facts(job: SearchJob, *, receipt: bool) -> dict[str, Any]:
    """What is said of the search itself, beside OpenAI's fields. receipt: its receipt, too."""
    solution = job.found
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
            {"index": index, **{name: getattr(candidate, name) for name in shown}}
            for index, candidate in enumerate(choices_of(job))
        ],
        **({"receipt": solution.receipt} if receipt else {}),
    }
