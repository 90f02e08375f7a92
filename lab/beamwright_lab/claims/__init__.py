"""What the four papers claim, beside ours: the rows of `docs/papers/*.md`, made of files.

A claim says which file of `docs/figures` it reads, and judges itself by what stands there: a run
with another result has another verdict. Nothing here computes anything.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

from beamwright_lab.common import table

Verdict = Literal["reproduced", "partly", "not reproduced", "not tried", "beyond the paper"]
How = Literal["simulated", "computed", "measured"]
Found = Mapping[str, Any]
Judged = tuple[str, Verdict]
"""Our figures in words, and what they say of the claim."""
Judge = Callable[[Found], Judged]

NEAR = 0.1
"""A figure within this share of the paper's is the paper's."""

KEY = (
    "*Reproduced*: the paper's figure within a tenth, or what it says holds. *Partly*: its "
    "direction, not its size. *Computed*: from equations and data sheets. *Simulated*: the "
    "real schedules on a virtual clock, with the card's data sheet. *Measured*: on two CPU cores."
)


@dataclass(frozen=True)
class Claim:
    """paper: its figure and where it stands. file: what ours is read from, if it was tried."""

    claim: str
    paper: str
    file: str | None = None
    judge: Judge | None = None
    how: How | None = None

    def row(self, found: Found | None, letter: str) -> dict[str, str]:
        ours: Judged = ("", "not tried")
        if found is not None and self.judge is not None:
            ours = self.judge(found)
        return {
            "claim": f"{self.claim}: {self.paper}",
            "ours": ours[0],
            "command": letter,
            "verdict": ours[1],
            "simulated or measured": self.how or "",
        }


def markdown(claims: Sequence[Claim], read: Callable[[str], Found]) -> str:
    """The table, what its words mean, and the commands."""
    files = list(dict.fromkeys(claim.file for claim in claims if claim.file))
    found = {name: read(name) for name in files}
    letters = dict(zip(files, ascii_uppercase, strict=False))
    rows = [
        claim.row(found[claim.file], letters[claim.file]) if claim.file else claim.row(None, "")
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
