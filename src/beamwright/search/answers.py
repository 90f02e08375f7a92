"""Final answers in a path's text: where they stand and when two are written alike.

Pure text: no models and no mathematics. Two answers that mean the same but are written
differently (`1/2`, `0.5`) stay different here; `evaluate` decides about those.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_PHRASE = re.compile(r"\banswer is\s*:?\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?")
_SPACING = re.compile(r"\\[!,;: ]|\\q?quad\b|\\(?:left|right)(?![A-Za-z])|~|\s+")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")
_MATH_MARKS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def extract_answer(text: str) -> str | None:
    r"""The final answer that `text` states, or None.

    The last balanced, non-empty `\boxed{...}` wins; without one, what follows the last
    "The answer is". Surrounding `$` and a final period do not belong to the answer.
    """
    for match in reversed(list(_BOX.finditer(text))):
        answer = _trim(_braced(text, match.end()) or "")
        if answer:
            return answer
    for match in reversed(list(_PHRASE.finditer(text))):
        answer = _trim(_SENTENCE_END.split(text[match.end() :], maxsplit=1)[0])
        if answer:
            return answer
    return None


def normalise_answer(answer: str) -> str:
    r"""One spelling for answers that differ in layout only: `27.0` is `27`, `$1,000$` is `1000`.

    LaTeX spacing, `\left`, `\right`, `\text{...}` and the `d` of `\dfrac` go; a plain number
    loses its thousands commas, plus sign and idle zeros. Two answers that normalise to the
    same text are the same answer; the reverse does not hold.
    """
    text = _trim(answer).replace("\u2212", "-").replace("\\%", "%").replace("\\$", "$")
    text = text.removeprefix("$").strip()
    text = _TEXT.sub(r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    spaced = _SPACING.sub(" ", text)
    # Words keep one space between them ("two apples"); formulas keep none.
    words = re.fullmatch(r"[A-Za-z' -]+", spaced) is not None
    text = " ".join(spaced.split()) if words else "".join(spaced.split())
    if re.fullmatch(r"\([A-Za-z]\)", text):  # a multiple-choice letter
        return text[1]
    text = text.replace("{,}", ",")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return _plain_number(text) or text


def _plain_number(text: str) -> str | None:
    """`text` without idle signs and zeros if it is a decimal number, else None."""
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    whole = match[2].lstrip("0") or "0"
    fraction = (match[3] or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if match[1] == "-" and number != "0" else number


def _braced(text: str, start: int) -> str | None:
    """What the brace at `start` encloses, or None if it is never closed."""
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":  # an escaped brace does not open or close a group
            position += 2
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
        position += 1
    return None


def _trim(answer: str) -> str:
    """`answer` without surrounding space, math marks and a final period."""
    previous = None
    while answer != previous:
        previous = answer
        answer = answer.strip()
        if answer.endswith(".") and not answer.endswith(("...", "\\right.")):
            answer = answer[:-1]
        for opening, closing in _MATH_MARKS:
            inside = len(answer) >= len(opening) + len(closing)
            if inside and answer.startswith(opening) and answer.endswith(closing):
                answer = answer[len(opening) : -len(closing)]
    return answer
