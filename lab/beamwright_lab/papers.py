"""Reproduces all results in the tables of docs/papers with the current code.

    python -m beamwright_lab.papers              runs the commands below the tables of docs/papers
                                                 and updates the pages
    python -m beamwright_lab.papers lbs          does so for one paper

The commands are those stored in the files of docs/figures. A stopped run continues: results that
this commit has produced already are kept. At the end it lists the results that changed by more than
2 %, and changed verdicts.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from beamwright_lab import publish
from beamwright_lab.common import RESULTS, commit, finish, say, table

# Largest relative difference at which a number counts as unchanged.
NEAR = 0.02

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def figure_files(papers: Sequence[str]) -> list[str]:
    """Return the files of docs/figures with the results of these papers."""
    claims = (claim for name in papers for claim in publish.PAPERS[name])
    return list(dict.fromkeys(claim.source for claim in claims if claim.source))


def reproduce(name: str) -> None:
    """Run the command of a file of docs/figures, unless this commit has its result already."""
    command = publish.read(name)["command"]
    file = RESULTS / f"{name}.json"
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        if (found["command"], found["commit"]) == (command, commit()):
            say(f"{name}: result of this commit exists")
            return
    say(f"{name}: {command}")
    _, *arguments = shlex.split(command)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def read_results(papers: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return our result and the verdict by "paper: mechanism"."""
    found = {}
    for name in papers:
        for claim in publish.PAPERS[name]:
            row = claim.row(publish.read(claim.source) if claim.source else None)
            found[f"{name}: {claim.mechanism}"] = row["our result"], row["verdict"]
    return found


def find_changes(
    before: Mapping[str, tuple[str, str]], after: Mapping[str, tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows whose verdict or numbers have changed."""
    for name, (old, verdict) in before.items():
        new, now = after[name]
        if verdict != now or not _alike(old, new):
            yield {"row": name, "before": f"{old}: {verdict}", "now": f"{new}: {now}"}


def _alike(old: str, new: str) -> bool:
    one, other = ([float(n.replace(",", "")) for n in _NUMBER.findall(t)] for t in (old, new))
    return len(one) == len(other) and all(
        abs(a - b) <= NEAR * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=", ".join(publish.PAPERS))
    papers = parser.parse_args().papers or list(publish.PAPERS)
    if unknown := set(papers) - set(publish.PAPERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    names, before = figure_files(papers), read_results(papers)
    for name in names:
        reproduce(name)
    for name in names:  # after the last command: until then no file of the commit changes
        publish.copy_result(name)
    publish.write_pages()
    rows = list(find_changes(before, read_results(papers)))
    say(table(rows, ["row", "before", "now"]) if rows else "no result has changed")
    finish("papers", {"changed": rows})


if __name__ == "__main__":
    main()
