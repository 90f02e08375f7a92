"""Traces of a thinking model: a thought in passes, its end, and a short answer with a box.

A thought works the problem out, then often goes on although the answer stands: it checks, in other
words, up to four times. Some passes hold an error that is put in, so that a check is worth its
tokens. A trace is a list of pieces, each of which is learnt or only read.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from make_tokenizer import EOS
from problems import (
    LAST_WORDS,
    MAX_VALUE,
    Problem,
    _event_styles,
    apply,
    final_answer,
)

START, END = "<think>", "</think>"
EMPTY = f"{START}\n\n{END}\n\n"
OPENINGS = ("", "", "Okay, let me work it out.\n\n", "Let me go month by month.\n\n")
CHECKS = (
    "Wait, let me check that.\n\n",
    "Hmm, let me go over it again.\n\n",
    "Wait, is that right? Once more.\n\n",
    "Let me check it in short.\n\n",
)
AGAIN = ("That is {0} again.", "Again it is {0}.")
OTHER = "This time it is {0}, not {1}."
SETTLED = "So the answer is {0}."
FINAL_WORDS = "The final answer is \\boxed{{{0}}}."
# How an engine closes a thought before its time; the last is the message that Qwen3's makers use.
CLOSES = (
    END,
    f"{END}\n\n",
    f"\n{END}\n\n",
    f"\n{END}\n\n",
    f"\n\nI have to answer now.\n{END}\n\n",
    "\n\nConsidering the limited time by the user, I have to give the solution based on the "
    f"thinking directly now.\n{END}\n\n",
)
# What a probe writes before the number, behind a close or in the middle of a thought.
PROBES = ("The final answer is \\boxed{", "\\boxed{", "**Final answer:** \\boxed{")
PASSES = (0.34, 0.36, 0.18, 0.11, 0.01)  # of one pass, two, ...
FLAWED, FLAWED_CHECK = 0.12, 0.06  # first passes and checks with an error
PROBED = 0.35  # of the closed traces
SHARES = {"whole": 0.65, "closed": 0.22, "direct": 0.13}


@dataclass(frozen=True)
class Piece:
    """Some text of a trace. `learn`: the loss is on it; `found`: the answer that it states."""

    text: str
    learn: bool = True
    found: str | None = None


def settled(found: list[str]) -> str:
    """The answer found most often, of several the one found first."""
    return Counter(found).most_common(1)[0][0]


def brief(problem: Problem, index: int, values: list[int]) -> str:
    """An event's step in short: month and equations."""
    terse = _event_styles(problem, index, values)[0]
    return terse.replace(f" {problem.names[0]} ", " ", 1)


def flawed(rng: random.Random, problem: Problem, index: int, values: list[int]) -> Problem | int:
    """An event gone wrong: with another operand, or the wrong number that comes out of it."""
    event, right = problem.events[index], apply(problem.events[index], values)[0]
    if event.kind in ("gain", "lose") and rng.random() < 0.4:
        amount = max(2, event.a + rng.choice((-10, -2, -1, 1, 2, 10)))
        other = replace(event, a=amount)
        events = (*problem.events[:index], other, *problem.events[index + 1 :])
        return replace(problem, events=events)
    return max(1, right + rng.choice((-100, -10, -10, -9, -2, -1, -1, 1, 1, 2, 9, 10, 10, 100)))


def work_out(
    rng: random.Random, problem: Problem, styles: list[int] | None, flaw: bool
) -> list[Piece]:
    """One pass over the events, without what it comes to; the last piece's `found` is that.

    styles: by event, which of its wordings; None: in short.
    """
    values, pieces = list(problem.start), []
    at = rng.randrange(len(problem.events)) if flaw and problem.events else None
    for index in range(len(problem.events)):
        told, wrong = problem, None
        if index == at:
            mistake = flawed(rng, problem, index, values)
            told, wrong = (mistake, None) if isinstance(mistake, Problem) else (problem, mistake)
        after = apply(told.events[index], values)
        if styles is None:
            text = brief(told, index, values)
        else:
            text = _event_styles(told, index, values)[styles[index]]
        if wrong is not None:
            head, tail = text.rsplit(f"={after[0]}", 1)
            text, after = f"{head}={wrong}{tail}", [wrong]
        if not 0 < after[0] <= MAX_VALUE:
            return work_out(rng, problem, styles, flaw=False)
        pieces.append(Piece(text + "\n\n", index != at))
        values = after
    return [*pieces, Piece("", found=str(values[0]))]


def think(rng: random.Random, problem: Problem) -> list[Piece]:
    """A whole thought, from its start to its end: the passes and what they come to."""
    wanted = rng.choices(range(1, len(PASSES) + 1), PASSES)[0]
    name, thing = problem.names[0], problem.thing
    pieces, found = [Piece(f"{START}\n{rng.choice(OPENINGS)}")], list[str]()
    styles = [rng.randrange(3) for _ in problem.events]
    while len(found) < wanted:
        check = rng.randrange(len(CHECKS))
        pieces += [Piece(CHECKS[check])] if found else []
        # Checks with the last of the words are in short, few of the others.
        short = bool(found) and (check == len(CHECKS) - 1 or rng.random() < 0.15)
        flaw = rng.random() < (FLAWED_CHECK if found else FLAWED)
        *worked, end = work_out(rng, problem, None if short else styles, flaw)
        answer = str(end.found)
        if not found:
            words = f"So {name} has {answer} {thing}."
        elif answer == found[-1]:
            words = rng.choice(AGAIN).format(answer)
        else:
            words = OTHER.format(answer, found[-1])
        found.append(answer)
        pieces += [*worked, Piece(words + "\n\n", found=answer)]
        if len(found) == wanted and 1 < wanted < 4 and len(set(found)) == wanted:
            wanted += rng.random() < 0.8  # nothing has been found twice
    if len(set(found)) > 1 or (len(found) > 1 and rng.random() < 0.5):
        pieces.append(Piece(SETTLED.format(settled(found)) + "\n\n"))
    last = pieces.pop()
    return [*pieces, replace(last, text=last.text[:-1]), Piece(END)]


def answer_words(rng: random.Random, problem: Problem, answer: str) -> str:
    """The answer part of a reply."""
    last = LAST_WORDS.format(answer)
    wordy = f"So {problem.names[0]} has {answer} {problem.thing}. {last}"
    return rng.choice((last, last, FINAL_WORDS.format(answer), wordy))


def encoded(tokenizer: PreTrainedTokenizerFast, piece: Piece) -> tuple[list[int], list[bool]]:
    """A piece's tokens and which of them are learnt."""
    ids = tokenizer.encode(piece.text) if piece.text else []
    return ids, [piece.learn] * len(ids)


def closed_early(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, problem: Problem
) -> tuple[list[int], list[bool]]:
    """A thought cut at a random token and what can be said of the answer there."""
    ids, learn, ends = list[int](), list[bool](), list[tuple[int, str]]()
    for piece in think(rng, problem):
        more, learn_more = encoded(tokenizer, piece)
        ids, learn = ids + more, learn + learn_more
        ends += [(len(ids), piece.found)] if piece.found is not None else []
    cut = rng.randrange(2, len(ids) - 1)
    ids, learn = ids[:cut], learn[:cut]
    found = [answer for end, answer in ends if end <= cut]
    answer = settled(found) if found else final_answer(problem)
    close = rng.choice(CLOSES)
    if rng.random() < PROBED:
        close = f"{END}\n\n" if close == END else close
        inside = rng.random() < 0.3
        before = "\n\n" if inside else close
        tail = [Piece(before + rng.choice(PROBES), False), Piece(answer + "}.")]
    else:
        gap = "\n\n" if close == END else ""
        tail = [Piece(close, False), Piece(gap + answer_words(rng, problem, answer)), Piece(EOS)]
    for piece in tail:
        more, learn_more = encoded(tokenizer, piece)
        ids, learn = ids + more, learn + learn_more
    return ids, learn


def reply(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, problem: Problem
) -> tuple[list[int], list[bool]]:
    """What stands behind the prompt: a thought, whole, cut short or empty, and an answer."""
    kind = rng.choices([*SHARES], [*SHARES.values()])[0]
    if kind == "closed":
        return closed_early(tokenizer, rng, problem)
    if kind == "direct":
        words = answer_words(rng, problem, final_answer(problem))
        pieces = [Piece(EMPTY, False), Piece(words + EOS)]
    else:
        pieces = think(rng, problem)
        found = [piece.found for piece in pieces if piece.found is not None]
        pieces += [Piece("\n\n" + answer_words(rng, problem, settled(found)) + EOS)]
    ids, learn = list[int](), list[bool]()
    for piece in pieces:
        more, learn_more = encoded(tokenizer, piece)
        ids, learn = ids + more, learn + learn_more
    return ids, learn
