"""The tables "Claims and results" of `docs/papers/*.md`: what each paper claims and what we found.

A claim (a table row) names the source file that implements it, the recipe or option that runs it,
and the test that checks it. Its result and verdict are derived from a file of `docs/figures`, so a
run with another result changes the verdict. Nothing here measures or simulates.
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
# Our result in words, and the verdict that it gives.
Judged = tuple[str, Verdict]
Judge = Callable[[Found], Judged]

# Stands for the file, recipe and test of a mechanism that is not built.
NONE = "none"

# Largest relative difference from the paper's figure that counts as reproduced.
NEAR = 0.1

KEY = (
    "*Reproduced*: our figure is within a tenth of the paper's, or its statement holds. *Partly*: "
    "the direction agrees, the size does not. *As published* or *built differently*: we built "
    "the mechanism, but have no figure to compare. *Beyond the paper*: it gives no "
    "figure, we do. *Computed*: from equations and data sheets. *Simulated*: our scheduling code "
    "on a virtual clock, with pass times from the GPU's data sheet. *Measured*: on two CPU cores "
    "unless a GPU is named. A letter such as (A) names the command below the table that produced "
    "the result. Files are below `src/beamwright/`, recipes below `recipes/`."
)


@dataclass(frozen=True)
class Claim:
    """One claim of a paper: a table row without empty cells.

    file: path below src/beamwright, or `lab/...`. recipe: `name.yaml: setting`, or an option.
    test: path below tests. paper: what the paper reports, and where. source: name of the file of
    docs/figures that holds our result; without one, `ours` is the text of the cell. judge: derives
    the result and the verdict from that file. note: explains the verdict.
    """

    mechanism: str
    section: str
    file: str
    recipe: str
    test: str
    paper: str
    source: str | None = None
    judge: Judge | None = None
    how: str = "by its test"
    ours: str = "no figure"
    verdict: str = "as published"
    note: str = ""

    def row(self, found: Found | None, letter: str = "") -> dict[str, str]:
        """Return the cells by column. found: the content of `source`; letter: of its command."""
        ours, verdict = self.ours, self.verdict
        if found is not None and self.judge is not None:
            said, verdict = self.judge(found)
            ours = f"{said} ({letter})"
        return {
            "mechanism or claim": self.mechanism,
            "section": self.section,
            "file": _code(self.file),
            "recipe or option": _code(self.recipe),
            "test": _code(self.test if self.test == NONE else f"tests/{self.test}"),
            "the paper reports": self.paper,
            "our result": ours,
            "obtained how": self.how,
            "verdict": f"{verdict}: {self.note}" if self.note else verdict,
        }


def _code(name: str) -> str:
    return name if name == NONE else f"`{name}`"


def markdown(claims: Sequence[Claim], read: Callable[[str], Found]) -> str:
    """Return the table, the meaning of its terms, and the commands of its files."""
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
    """Return date, commit and command of a file, wrapped to 110 characters."""
    origin = f"{found['machine']['date']}, {found['commit'] or 'no commit kept'}"
    said = f"{letter}  {origin}: {found['command']}"
    yield from textwrap.wrap(said, 110, subsequent_indent="     ", break_on_hyphens=False)


def read_claims(module: str) -> tuple[Claim, ...]:
    """Read the TOML file with a module's name; its `judge` entries name functions of the module."""
    judges = globals() | vars(sys.modules[module])
    file = Path(__file__).with_name(module.rpartition(".")[2] + ".toml")
    claims = []
    for row in tomllib.loads(file.read_text(encoding="utf-8"))["claims"]:
        if "judge" in row:
            name, *given = row["judge"]
            row["judge"] = judges[name](*given) if given else judges[name]
        claims.append(Claim(**row))
    return tuple(claims)


# --- helpers of the judges ---------------------------------------------------------------------


def is_near(ours: float, paper: float) -> bool:
    """Return whether our figure counts as the paper's."""
    return abs(ours / paper - 1) <= NEAR


def grade(holds: bool, otherwise: Verdict = "partly") -> Verdict:
    """Return "reproduced" if the claim holds."""
    return "reproduced" if holds else otherwise


def parse_range(text: str) -> tuple[float, float]:
    """Return the ends of a range such as "1.63-6.57"."""
    low, high = text.split("-")
    return float(low), float(high)


def same_trees(found: Found) -> Judged:
    """Judge by `checks.schedules` that schedules and other settings do not change the tree."""
    equal, trees = (sum(row[name] for row in found["rows"]) for name in ("equal", "trees"))
    settings = len(found["rows"])
    return f"{equal} of {trees} trees equal in {settings} settings", grade(equal == trees)
