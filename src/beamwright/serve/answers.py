"""Parts of a reply that all endpoints share, and the text that can be streamed before the end.

A text is final, and can be streamed, once every candidate that can still win begins with it.
Thoughts (reasoning before the answer) are kept apart from the answer. No text after a thought is
final before the thought itself is final.

The candidates that can still win are the leaves that are not pruned. This holds for strategies that
never return to a step that has children (`StrategyEntry.commits`). A leaf that is still being
decoded counts with its parent's text.
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

from beamwright.engine.endings import cut_before
from beamwright.models.tokenizer import TextCodec
from beamwright.serve.body import ApiError, parse_strict_json, read_arguments
from beamwright.serve.job import ReplyText, SearchJob
from beamwright.solver.solution import Candidate
from beamwright.tree import COMPLETE_STOPS, Node, NodeState, SearchTree, StopReason

# Matches a tool call. A match contains no second `<tool_call>`: otherwise a text with many unclosed
# calls would take quadratic time.
_CALL = re.compile(r"<tool_call>\s*(\{(?:(?!<tool_call>).)*?\})\s*</tool_call>", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters")
# Matches the beginning of a JSON scalar or list, which a call's arguments must not be.
_SCALAR = re.compile(r'[\s]*(["\[\d-]|(true|false)\s*$)')
_LEAST_LOGPROB = -9999.0  # OpenAI's value for a token without probability
_BROKEN = "\ufffd"  # decoded from the first bytes of an incomplete character


def raw_reply(node: Node, codec: TextCodec | None, stops: Sequence[str]) -> ReplyText:
    """Return the reply that ends in `node` as one raw text, with thoughts and their markers.

    If a stop string in `stops` ended the reply, the text ends before this string.
    """
    steps = node.reply()
    if codec is None or not any(step.thought for step in steps):
        return ReplyText(said=node.text)
    text = codec.decode([token for step in steps for token in step.token_ids])
    return ReplyText(said=cut_before(text, stops if node.stop is StopReason.STOP_STRING else ()))


def split_reply(node: Node) -> ReplyText:
    """Split the reply that ends in `node` into thought and answer.

    Text between two thoughts belongs to the answer, unlike in `Node.said`.
    """
    thought, said, steps = "", "", node.reply()
    for step in steps:
        piece = node.text[len(step.parent.text if step.parent else "") : len(step.text)]
        thought, said = (thought + piece, said) if step.thought else (thought, said + piece)
    return ReplyText(thought.strip(), said.lstrip() if steps and steps[0].thought else said)


def settled_text(
    tree: SearchTree, stops: Sequence[str] = (), split: Callable[[Node], ReplyText] = split_reply
) -> ReplyText:
    """Return the beginning of the reply that no later decision of the search can change.

    stops: strings that end an answer; a suffix that may begin a stop string is held back.
    split: a function that returns the reply of a leaf, split into thought and answer.
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
    thoughts, texts = zip(*map(split, leaves), strict=True) if leaves else ((), ())
    thought = unchanging_prefix(commonprefix(thoughts), ())  # noqa: RUF071 (texts, not file paths)
    said = unchanging_prefix(commonprefix(texts), stops)  # noqa: RUF071
    going = any(leaf.thinking and text for leaf, text in zip(leaves, thoughts, strict=True))
    settled = len(set(thoughts)) == 1 and not going
    return ReplyText(thought.rstrip(), said if settled else "")


def unchanging_prefix(text: str, stops: Sequence[str]) -> str:
    """Return `text` without a suffix that later tokens may change.

    The removed suffix is an incomplete character, or the beginning of a stop string in `stops`.
    """
    text = text.rstrip(_BROKEN)
    tails = ((stop, range(max(0, len(text) - len(stop)), len(text))) for stop in stops)
    begun = (start for stop, starts in tails for start in starts if stop.startswith(text[start:]))
    return text[: min(begun, default=len(text))]


def choices_of(job: SearchJob) -> list[Candidate]:
    """Return the best candidates of a finished job, the chosen one first, then by score.

    At most `job.choices` candidates are returned.
    """
    solution = job.finished_solution

    def rank(candidate: Candidate) -> tuple[bool, float]:
        score = candidate.score
        return candidate.lineage != solution.lineage, math.inf if score is None else -score

    return sorted(solution.candidates, key=rank)[: job.choices]


def finish_reason_of(candidate: Candidate) -> str:
    """Return the candidate's finish reason in OpenAI's terms: "stop" or "length"."""
    return "stop" if candidate.stop in COMPLETE_STOPS else "length"


def unsent_text(text: str, sent: str) -> str:
    """Return the rest of `text` after the part that was `sent`.

    Raises:
        ApiError: 422 if `text` does not begin with `sent`. This can happen when a search did not
            fit into memory with the others, was restarted alone, and met its deadline at an earlier
            step than the first time.
    """
    if not text.startswith(sent):
        raise ApiError(
            422,
            "the search was restarted and its text differs from what was streamed; try again",
            code="search_failed",
        )
    return text[len(sent) :]


def split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return a text without its tool calls, and the calls in OpenAI's format.

    The text has calls in Qwen's format. If a call is invalid JSON or has members other than its
    name and arguments, the whole text is returned unchanged, without calls.
    """
    calls = []
    for match in _CALL.finditer(text):
        try:
            call = parse_strict_json(match[1])
            name, given = call.pop("name"), [call.pop(each) for each in _ARGUMENTS if each in call]
            arguments = read_arguments(*given)
        except (ValueError, KeyError, TypeError):  # TypeError: arguments are given twice
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
    """Return the log-probabilities of an answer's tokens in the format of chat completions.

    Tokens that add no text, tokens of thoughts, and tokens after a stop string are left out.
    pieces: the bytes of each token id. num_top: number of most likely tokens listed per token.

    Raises:
        ApiError: 400 if the generator does not return its sampled tokens.
    """

    def shown(token: int, logprob: float) -> dict[str, Any]:
        text, value = pieces[token].decode("utf-8", "replace"), max(logprob, _LEAST_LOGPROB)
        return {"token": text, "logprob": value, "bytes": list(pieces[token])}

    content, left = [], len(candidate.text.encode("utf-8", "replace"))
    for step in job.reply_nodes(candidate):
        if step.thought:
            left -= len(step.step_text.encode("utf-8", "replace"))
            continue
        if not pieces or len(step.logprobs) != len(step.token_ids):
            said = "logprobs: this generator does not return each token with its log-probability"
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
    """Return the log-probabilities of all sampled tokens in the format of text completions.

    If the generator does not return its sampled tokens, only their log-probabilities are known and
    the other fields are null. pieces: the bytes of each token id.
    """
    steps, decoder = job.reply_nodes(candidate), getincrementaldecoder("utf-8")("ignore")
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


def usage_fields(jobs: Sequence[SearchJob]) -> dict[str, Any]:
    """Return the `usage` object of a reply, summed over its jobs.

    completion_tokens: all tokens that the generator wrote.
    reasoning_tokens: the completion tokens that are not in a returned answer, thoughts included.
    """
    counts = [job.finished_solution.tokens for job in jobs]
    prompt, generated = sum(job.prompt_tokens for job in jobs), sum(c.generated for c in counts)
    returned = 0
    for job in jobs:
        # A set, so that steps that several answers share count once.
        steps = {step for answer in choices_of(job) for step in job.reply_nodes(answer)}
        returned += sum(len(step.token_ids) for step in steps if not step.thought)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},  # no KV is kept between requests
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
    """Return the `search` object of a reply: facts about the search itself.

    receipt: whether to include the search's receipt.
    """
    solution = job.finished_solution
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
