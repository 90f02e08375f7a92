r"""Answer formats (`--answers`): extract the answer from a reply, and decide which ones are equal.

Each format is one declaration:

```python
@answers("sql", meaning="SQL queries; two are equal if their results are equal")
class Sql(Section):
    def read(self, text): ...
    def key(self, answer, notes): return notes.get("result", answer)
```

The results are stored on the nodes (`Node.answer`, `Node.vote`); votes and stop rules read only
these. The default format looks for a box, a tag, a phrase or a line. Unlike `math-verify`, it does
not take the last number of a text as the answer. A path that states no answer has no vote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, takewhile
from typing import Any

from pydantic import PrivateAttr

from beamwright.declare import declaration, make_declared
from beamwright.protocols import Answers
from beamwright.registry import Table, TableEntry
from beamwright.search.answer_keys import (
    LETTERS,
    chosen_option,
    normalise_answer,
    option_letter,
    read_options,
    split_option,
)
from beamwright.search.quantity import counted_number, trim
from beamwright.sections import Section

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_THOUGHT = "</think>"
_RUN_ON = re.compile(  # the beginning of a next problem that some models write after the answer
    r"(?<=\S)(?:[^\S\n]*+\n){2,}+\s*+\**(?:Question|Problem|Q)(?:\s*\d+)?\**\s*:"
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(?=\{)|\s*([^\s{}$\\,;]+))")
_JOINED = re.compile(r"[\s$]*(?:,|;|,?\s*\band\b)[\s$]*")  # text that joins two boxes to one answer
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.IGNORECASE | re.DOTALL)
_PHRASE = re.compile(
    r"(?<![a-z])(?:"
    r"answer[*_]*(?:\s+(?:to|for|of)\s+[^.\n:]{1,80}?)?"
    r"(?:\s+(?:is|would\s+be|must\s+be|should\s+be)\b|\s*:|(?<=final\sanswer)\s*=)"
    r"|(?:correct|right|best)\s+(?:option|choice)\s+is\b"
    r"|^[#*_ \t]*(?:the\s+)?(?:final\s+)?answer[*_ \t]*$"  # a heading
    r")(?:[:\s*_}]|</?(?:strong|b|em|i|u|p|br|span)>)*",
    re.IGNORECASE | re.MULTILINE,
)
_CHOSEN = re.compile(
    r"(?:\b(?i:option|choice)\s+\(?|\()([A-J])\)?\**\s+is\s+(?:the\s+)?(?:correct|right|best)"
)
_HASHES = re.compile(r"^[ \t]*####[ \t]*(.+?)[ \t]*$", re.MULTILINE)  # last line in GSM8K solutions
# The end of a sentence: a period, a line's end, or an exclamation mark that is not a factorial.
_SENTENCE_END = re.compile(r"(?<!\bsq)\.(?=\s|$|\*)|\n|!(?=\s*$|\s+[A-Z]|\*)")
_ASIDE = re.compile(
    r",?\s+(?:because|since|as|which|so|where|while|due|given|meaning|"
    r"and\s+(?:this|that|it|we|the))\b"
)
_REMARK = re.compile(
    r"[,;]\s+(?!(?:and|or)\b)(?=[A-Za-z]{2})|\s+[(](?!mod|base)(?=[a-z]{2})"
    r"|\s+[-\u2013\u2014]\s+(?=[A-Za-z]{2})"
)
_ADVERB = re.compile(
    r"(?:(?:therefore|thus|then|so|hence|simply|just|exactly|precisely|clearly|indeed|now|"
    r"equal\s+to|given\s+by),?\s+)+",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)"
    # "$18 in total and $5" contains amounts of money and no formula.
    r"|\$(?!\d[\d,.]*\s+[A-Za-z]{2})(?:\\.|[^$\n\\])+\$",
    re.DOTALL,
)
_FORMULAS = re.compile(
    rf"(?:{_FORMULA.pattern})(?:\s*(?:,\s*(?:and|or)?|and|or)\s*(?:{_FORMULA.pattern}))*", re.DOTALL
)
_GOES_ON = re.compile(r"\s*[=+*/^<>-]")
# An option's letter at the beginning of a text. `_AFTER_LETTER` checks the text after the letter.
_LETTER = re.compile(
    r"[*_$]*(?P<word>(?i:option|choice|letter)\s+)?[*_$]*\(?"
    r"(?<![A-Za-z0-9])(?P<letter>[A-J])(?![A-Za-z0-9])"
    r"(?P<rest>[^\n]*)"
)
_AFTER_LETTER = re.compile(
    r"(?:\)|[.:])(?=[\s.,:;*$]|$)|[*_$]*\s*$"
    r"|[*_$]*[,;]?\s+(?:because|since|as|which|is|for)\b|\s+[-\u2013\u2014]\s"
)
_ANOTHER = re.compile(r"[)*$]*\s*(?:,|and\b|or\b|&)\s*(?:and\s+|or\s+)?\(?[A-J](?![A-Za-z])")
_OPTION_LINE = re.compile(r"^[ \t*_>-]*\(?([A-J])[).:]\**\s*\S", re.MULTILINE)
_MENTION = re.compile(
    r"\(([A-J])\)|\*\*([A-J])\b|\b(?i:option|choice|answer)\s+([A-J])\b"
    r"|(?<!and )(?<!or )(?<!, )\b([A-J])[.*_]*$"
)


def extract_answer(text: str, options: Mapping[str, str] | None = None) -> str | None:
    r"""Return the final answer that `text` states, or None.

    The first of these that is present is the answer:

    1. the last balanced, non-empty `\boxed{...}` or `\fbox{...}`, or several boxes joined by "and";
       if a phrase after the box states a number or a letter, that one is the answer instead,
    2. the last `<answer>...</answer>`,
    3. the last phrase or line: the text after "The answer is", "Answer:" or "The correct option
       is", or a line such as `#### 60`,
    4. an option's letter at the beginning of the last line or of the first line.

    For an option with its text, "(B) 12 cm", the letter is the answer. Surrounding `$`, emphasis,
    words around a number and a final period are not part of the answer. The thought before
    `</think>`, and a next problem after the reply, are read only if the rest states no answer.

    options: the options of a multiple-choice problem, by letter. A last line that mentions exactly
        one option states that option.
    """
    for part in reversed(text.split(_THOUGHT)):
        run_on = _RUN_ON.search(part)
        first = _answer_of_part(part[: run_on.start()], options) if run_on else None
        if answer := first or _answer_of_part(part, options):
            return answer
    return None


def _answer_of_part(text: str, options: Mapping[str, str] | None) -> str | None:
    """Return the answer that one part of a reply states; see `extract_answer`."""
    end, boxed = _last_box(text)
    if boxed:  # a phrase after the box may choose one of several answers, or correct the box
        later = takewhile(lambda phrase: phrase[0] >= end, _phrases(text, options))
        clear = (answer for _, answer in later if option_letter(answer) or counted_number(answer))
        return next(clear, boxed)
    tagged = [match[1].strip() for match in reversed(list(_TAG.finditer(text)))]
    inside = (
        trim(each) if "\n" in each else _stated_answer(_PHRASE.split(each)[-1], options)
        for each in tagged
    )
    phrases = (answer for _, answer in _phrases(text, options))
    return next(filter(None, chain(inside, phrases)), None) or _last_letter(text, options)


def _last_box(text: str) -> tuple[int, str]:
    """Return the position after the last box, and its content ("" without a box).

    Boxes that "and" or a comma joins to the last one are part of the content.
    """
    closing, boxes = _closing_braces(text), []
    for match in _BOX.finditer(text):
        end = match.end() if match[1] else closing.get(match.end(), 0)
        if answer := trim(match[1] or text[match.end() + 1 : end]):
            boxes.append((match.start(), end + (not match[1]), answer))
    answers: list[str] = []
    begin = end = 0
    for start, stop, answer in reversed(boxes):
        if answers and not _JOINED.fullmatch(text[stop:begin]):
            break
        begin, end, answers = start, end or stop, [answer, *answers]
    return end, ", ".join(dict.fromkeys(answers))


def _phrases(text: str, options: Mapping[str, str] | None) -> Iterator[tuple[int, str]]:
    """Yield (position, answer) of each phrase or line that states an answer, the last one first."""
    matches = [*_PHRASE.finditer(text), *_HASHES.finditer(text), *_CHOSEN.finditer(text)]
    for match in sorted(matches, key=lambda match: match.start(), reverse=True):
        # A number follows #### in an answer line; words follow it in a Markdown heading.
        line = match[1] if match.re is not _PHRASE else ""
        is_number = not re.search("[A-Za-z]", line) or not text[match.end() :].strip()
        if match.re is _PHRASE:
            line = _stated_answer(text[match.end() :], options)
        elif match.re is _HASHES and not _FORMULA.fullmatch(line.removesuffix(".")):
            line = line if is_number and counted_number(line) else ""
        if line:
            yield match.start(), trim(line)


def _stated_answer(text: str, options: Mapping[str, str] | None) -> str:
    """Return the answer at the beginning of `text`: an option's letter, formulas, or a clause."""
    text = _ADVERB.sub("", text, count=1) if _ADVERB.match(text) else text
    if letter := _stated_letter(text, options):
        return letter
    listed = _FORMULAS.match(text)
    formulas = [trim(each[0]) for each in _FORMULA.finditer(listed[0])] if listed else []
    rest = _SENTENCE_END.split(text[listed.end() if listed else 0 :], maxsplit=1)[0]
    if formulas and not _GOES_ON.match(rest):
        counted = f"{formulas[-1]}{rest.rstrip('* ')}"
        is_one = len(formulas) == 1 and rest.strip("* ") and counted_number(counted)
        return counted if is_one else ", ".join(formulas)
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0]
    sentence = re.sub(r"\*\*|</?(?:strong|b|em|i|u|p|br|span)>", "", sentence).strip("_* ")
    sentence = _ASIDE.split(sentence, maxsplit=1)[0]
    if re.match(r"[^A-Za-z]{0,3}\d", sentence) and not counted_number(sentence):
        sentence = _REMARK.split(sentence, maxsplit=1)[0]
    return trim(sentence.rstrip(",;- \u2013\u2014"))


def _stated_letter(text: str, options: Mapping[str, str] | None) -> str | None:
    """Return the option's letter at the beginning of `text`; None if it begins otherwise."""
    match = _LETTER.match(text)
    if (
        match is None
        or _ANOTHER.match(match["rest"])
        or match["letter"] not in (options or LETTERS)
    ):
        return None
    is_option = match["word"] or _AFTER_LETTER.match(match["rest"].rstrip())
    return match["letter"] if is_option or (options and match["rest"][:1] != "(") else None


def _last_letter(text: str, options: Mapping[str, str] | None) -> str | None:
    """Return the option's letter that the last or the first line states; None if neither does.

    The line is the letter, maybe with the option's text. Failing that, the last line may mention
    exactly one letter of `options`.
    """
    lines = text.strip().splitlines() or [""]
    last = lines[-1]
    listed = {match[1] for match in _OPTION_LINE.finditer(text)}
    for line in (last, lines[0]):
        plain = line.strip(" *_$>-")
        letter, option = split_option(plain) or (chosen_option(plain, options or {}), "")
        if letter in [*(options or LETTERS)] and (not option or listed <= {letter}):
            return letter
    mentioned = {mark[mark.lastindex or 0] for mark in _MENTION.finditer(last[-400:])}
    return mentioned.pop() if len(mentioned) == 1 and mentioned <= {*(options or ())} else None


def _closing_braces(text: str) -> dict[int, int]:
    """Return the position of the closing brace for each opening brace that has one."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    # An escaped brace, which this pattern matches with its backslash, opens or closes no group.
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


# --- formats ------------------------------------------------------------------------------------

ANSWERS: Table[TableEntry] = Table("search", "--answers", "read", "key")
# Decorator that declares an answer format: a class with `read` and `key` (`protocols.Answers`).
answers = partial(declaration, ANSWERS, TableEntry)


@answers("math", meaning=r"a box, an <answer>, 'The answer is ...'; compared as exact numbers")
class Mathematics(Section):
    """Default format, for mathematics and multiple choice: a letter equals its option's text."""

    _options: dict[str, str] = PrivateAttr(default_factory=dict)

    def about(self, problem: str) -> Answers:
        answers = self.model_copy()
        answers._options = read_options(problem)
        return answers

    def read(self, text: str) -> str | None:
        return extract_answer(text, self._options)

    def key(self, answer: str, notes: Mapping[str, str]) -> str:
        del notes
        return chosen_option(answer, self._options) or normalise_answer(answer)


@answers("code", meaning="the last fenced block; compared as text without spaces at line ends")
class Code(Section):
    """Format for programs, queries and proofs: the last fenced code block is the answer."""

    def read(self, text: str) -> str | None:
        blocks = _FENCED.findall(text)
        return blocks[-1].strip("\n") if blocks and blocks[-1].strip() else None

    def key(self, answer: str, notes: Mapping[str, str]) -> str:
        del notes
        return "\n".join(line.rstrip() for line in answer.strip().splitlines())


def make_answers(name: str, given: Mapping[str, Any], problem: str = "") -> Answers:
    """Build the answer format that `--answers` names, for one problem.

    given: the options of the search section by name; the format takes its own among them.
    problem: the text of the problem; "" if the format is not for one problem.

    Raises:
        InputError: for an unknown name, or for an option's value that is not valid.
    """
    row = ANSWERS.find(name)
    own = {option: given[option] for option in row.options if option in given}
    answers: Answers = make_declared(ANSWERS, row.make, own)
    about = getattr(answers, "about", None)
    return answers if about is None else about(problem)
