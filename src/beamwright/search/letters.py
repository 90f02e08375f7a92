"""Multiple choice: the options in a problem's text, and the letter that an answer names.

A problem's options are what its text lists, so that they are known wherever it is: in a problem
set, a chat, on another machine. Letters go from A to J.
"""

from __future__ import annotations

import re

LETTERS = "ABCDEFGHIJ"

_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
# "A) ..", "A. ..", "**A:** .." at the beginning of a line; "(A)" anywhere.
_MARK = re.compile(r"(?:^[ \t>*_-]*([A-J])[).:]|(?<![A-Za-z0-9])\(([A-J])\)\}?)[*_]*", re.MULTILINE)
_NAMED = re.compile(
    r"(?P<word>(?i:the\s+)?(?i:correct\s+)?(?i:option|choice|answer|letter)(?:\s+is)?\s*:?\s*)?"
    r"(?:\((?P<enclosed>[A-J])\)|(?P<bare>[A-J]))"
    r"(?:$|(?P<mark>[).:](?=[\s\\]|$)|\)(?=\S)|\s(?=\s*(?:because|since)\b))?"
    r"(?:\\[ ,;]|\s)*(?P<text>.*))",
    re.DOTALL,
)
_AROUND = re.compile(r"^(?:\\[ ,;]|[\s$~])+|(?:\\q?quad|\\text(?:bf)?\s*\{\s*\}?|[\s$~;,]|\\ )+$")
_DASH = re.compile(r"[-\u2013\u2014]\s+(?=[A-Za-z]{3}|[A-Za-z]+ [A-Za-z])")


def split_option(answer: str) -> tuple[str, str] | None:
    r"""The letter that an answer is, and the text behind it; None if it names no option.

    Reads `B`, `(B) 12 cm`, `B: 12 cm`, `Option B`, `E - a risk score`, `\textbf{(B)}\ 12`.
    """
    match = _NAMED.fullmatch(_WRAPPED.sub(r"\1", answer).strip(" $*_\n").removesuffix("."))
    if match is None:
        return None
    text, dash = match["text"] or "", _DASH.match(match["text"] or "")
    if text and not (match["enclosed"] or match["mark"] or dash):
        return None
    if match["enclosed"] and text[:1] in tuple("+-*/^=,&<>"):  # (A + B) / 2, (A), (B)
        return None
    return match["enclosed"] or match["bare"], text[dash.end() :] if dash else text


def letter_of(answer: str) -> str | None:
    """The letter that an answer is, with or without its option's text."""
    found = split_option(answer)
    return found[0] if found else None


def options_of(problem: str) -> dict[str, str]:
    """The options that a problem lists, by letter; empty if it lists none."""
    marks = list(_MARK.finditer(problem))
    letters = "".join(mark[1] or mark[2] for mark in marks)
    number = max((n for n in range(2, len(LETTERS) + 1) if LETTERS[:n] in letters), default=0)
    place = letters.find(LETTERS[:number])
    ends = [*(mark.start() for mark in marks), len(problem)]
    texts = [problem[mark.end() : end] for mark, end in zip(marks, ends[1:], strict=True)]
    listed = [_AROUND.sub("", text.strip().partition("\n")[0]) for text in texts[place:]]
    return dict(zip(LETTERS[:number], listed, strict=False))
