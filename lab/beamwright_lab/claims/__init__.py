"""The four papers' mechanisms and figures, beside ours: the rows of `docs/papers/*.md`.

A row says where the mechanism is, which recipe or option runs it and which test holds it, and which
file of `docs/figures` our figure is of: it judges itself by what stands there, so that a run with
another result has another verdict. Nothing here computes anything.
"""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal

from beamwright_lab.common import table

Verdict = Literal["reproduced", "partly", "not reproduced", "beyond the paper"]
Found = Mapping[str, Any]
# Our figures in words, and what they say of the claim.
Judged = tuple[str, Verdict]
Judge = Callable[[Found], Judged]

# The file, the recipe and the test of what is not built.
NONE = "none"

# A figure within this share of the paper's is the paper's.
NEAR = 0.1

KEY = (
    "*Reproduced*: our figure is within a tenth of the paper's, or its statement holds. *Partly*: "
    "the direction agrees, the size does not. *As printed* and *another way*: how a mechanism "
    "without a figure is built. *Computed*: from equations and data sheets. *Simulated*: the real "
    "schedules on a virtual clock, with the card's data sheet. *Measured*: on two CPU cores unless "
    "a card is named. Files are below `src/beamwright/`, recipes below `recipes/`."
)


@dataclass(frozen=True)
class Claim:
    """A row. Every cell says something: no field is empty.

    file: below src/beamwright, or lab/... recipe: `name.yaml: setting`, or an option. test: below
    tests. paper: its figure and where it stands. source: the file of docs/figures that ours is read
    from; where there is none, ours says what is known instead. note: of the verdict.
    """

    mechanism: str
    section: str
    file: str
    recipe: str
    test: str
    paper: str
    source: str | None = None
    judge: Judge | None = None
    how: str = "by a test"
    ours: str = "no figure"
    verdict: str = "as printed"
    note: str = ""

    def row(self, found: Found | None, letter: str = "") -> dict[str, str]:
        ours, verdict = self.ours, self.verdict
        if found is not None and self.judge is not None:
            said, verdict = self.judge(found)
            ours = f"{said} ({letter})"
        return {
            "mechanism": self.mechanism,
            "section": self.section,
            "file": _code(self.file),
            "recipe or option": _code(self.recipe),
            "test": _code(self.test if self.test == NONE else f"tests/{self.test}"),
            "paper's figure": self.paper,
            "ours": ours,
            "simulated or measured": self.how,
            "verdict": f"{verdict}: {self.note}" if self.note else verdict,
        }


def _code(name: str) -> str:
    return name if name == NONE else f"`{name}`"


def markdown(claims: Sequence[Claim], read: Callable[[str], Found]) -> str:
    """The table, what its words mean, and the commands."""
    files = list(dict.fromkeys(claim.source for claim in claims if claim.source))
    found = {name: read(name) for name in files}
    letters = dict(zip(files, ascii_uppercase, strict=False))
    rows = [
        claim.row(found[claim.source], letters[claim.source]) if claim.source else claim.row(None)
        for claim in claims
    ]
    commands = "\n".join(
        line for name in files for line in command_lines(letters[name], found[name])
    )
    key = textwrap.fill(KEY, 110)
    return f"{table(rows, list(rows[0]))}\n\n{key}\n\n```text\n{commands}\n```"


def command_lines(letter: str, found: Found) -> Iterator[str]:
    """Its date, commit and command, in lines that are not too long."""
    origin = f"{found['machine']['date']}, {found['commit'] or 'no commit kept'}"
    said = f"{letter}  {origin}: {found['command']}"
    yield from textwrap.wrap(said, 110, subsequent_indent="     ", break_on_hyphens=False)


def read_claims(module: str) -> tuple[Claim, ...]:
    """The rows of the TOML file beside a module, whose functions judge them."""
    judges = globals() | vars(sys.modules[module])
    file = Path(__file__).with_name(module.rpartition(".")[2] + ".toml")
    claims = []
    for row in tomllib.loads(file.read_text(encoding="utf-8"))["claims"]:
        if "judge" in row:
            name, *given = row["judge"]
            row["judge"] = judges[name](*given) if given else judges[name]
        claims.append(Claim(**row))
    return tuple(claims)


# --- what is shared ----------------------------------------------------------------------------


def near(ours: float, paper: float) -> bool:
    return abs(ours / paper - 1) <= NEAR


def of(holds: bool, otherwise: Verdict = "partly") -> Verdict:
    return "reproduced" if holds else otherwise


def span(text: str) -> tuple[float, float]:
    """`1.63-6.57`."""
    low, high = text.split("-")
    return float(low), float(high)


def same_trees(found: Found) -> Judged:
    """Of `checks.schedules`: another way to run a search gives the same tree."""
    equal, trees = (sum(row[name] for row in found["rows"]) for name in ("equal", "trees"))
    settings = len(found["rows"])
    return f"{equal} of {trees} trees equal in {settings} settings", of(equal == trees)
