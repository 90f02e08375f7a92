"""What an answer is, and when two are one: each way is one declaration, under `--answers`.

```python
@answers("sql", meaning="queries, equal where the verifier saw equal results")
class Sql(Section):
    def read(self, text): ...
    def key(self, answer, notes): return notes.get("result", answer)
```

Votes, stops, pages and records read what is noted on nodes (`Node.answer`, `Node.vote`) alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import PrivateAttr

from beamwright.declare import declaration, made
from beamwright.protocols import Answers
from beamwright.registry import Table, TableRow
from beamwright.search.alike import choice_of, normalise_answer
from beamwright.search.answers import extract_answer
from beamwright.search.letters import options_of
from beamwright.sections import Section

ANSWERS: Table[TableRow] = Table("search", "--answers", "read", "key")
answers = partial(declaration, ANSWERS, TableRow)
"""Declare a way of reading answers: a class with `read` and `key`, see `protocols.Answers`."""

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)


@answers("math", meaning=r"a box, an <answer>, 'The answer is ...'; equal as exact numbers are")
class Mathematics(Section):
    """The default. Where a problem lists options, one's letter and its text are one answer."""

    _options: dict[str, str] = PrivateAttr(default_factory=dict)

    def about(self, problem: str) -> Answers:
        way = self.model_copy()
        way._options = options_of(problem)
        return way

    def read(self, text: str) -> str | None:
        return extract_answer(text, self._options)

    def key(self, answer: str, notes: Mapping[str, str]) -> str:
        del notes
        return choice_of(answer, self._options) or normalise_answer(answer)


@answers("code", meaning="the last fenced block; equal to the letter, but for spaces at line ends")
class Code(Section):
    """Programs, queries, proofs."""

    def read(self, text: str) -> str | None:
        blocks = _FENCED.findall(text)
        return blocks[-1].strip("\n") if blocks and blocks[-1].strip() else None

    def key(self, answer: str, notes: Mapping[str, str]) -> str:
        del notes
        return "\n".join(line.rstrip() for line in answer.strip().splitlines())


def make_answers(name: str, given: Mapping[str, Any], problem: str = "") -> Answers:
    """The way of this name, for this problem. given: options of the search section.

    Raises:
        InputError: for an unknown name, or a value that it cannot use.
    """
    row = ANSWERS.find(name)
    own = {option: given[option] for option in row.options if option in given}
    way: Answers = made(ANSWERS, row.make, own)
    about = getattr(way, "about", None)
    return way if about is None else about(problem)
