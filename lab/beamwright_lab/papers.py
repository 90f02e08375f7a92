"""Every figure of the four papers' tables, printed again by today's code, by one command.

    python -m beamwright_lab.papers              runs what stands under the tables of docs/papers,
                                                 and writes their blocks
    python -m beamwright_lab.papers lbs          of one paper

A command is the one that the file of docs/figures was made by. Stopped, it goes on: what this
commit has printed already is not run again. Then it says which of our figures are others than
those that stood there, by more than two in a hundred.
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

# A figure within this share of what stood there is the same.
NEAR = 0.02

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def sources(papers: Sequence[str]) -> list[str]:
    """Files of docs/figures that these papers' claims are judged by."""
    claims = (claim for name in papers for claim in publish.PAPERS[name])
    return list(dict.fromkeys(claim.source for claim in claims if claim.source))


def printed(name: str) -> None:
    """Have a file's command run by this commit, unless it was."""
    command = publish.read(name)["command"]
    file = RESULTS / f"{name}.json"
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        if (found["command"], found["commit"]) == (command, commit()):
            say(f"{name}: printed already")
            return
    say(f"{name}: {command}")
    _, *arguments = shlex.split(command)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def ours(papers: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What tables say by now: figure and verdict by paper and mechanism."""
    found = {}
    for name in papers:
        for claim in publish.PAPERS[name]:
            row = claim.row(publish.read(claim.source) if claim.source else None)
            found[f"{name}: {claim.mechanism}"] = row["our result"], row["verdict"]
    return found


def changed(
    before: Mapping[str, tuple[str, str]], after: Mapping[str, tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Rows whose verdict is another, or of whose figures one is."""
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
    names, before = sources(papers), ours(papers)
    for name in names:
        printed(name)
    for name in names:  # behind the last one: until then the checkout is its commit's
        publish.take_over(name)
    publish.write()
    rows = list(changed(before, ours(papers)))
    say(table(rows, ["row", "before", "now"]) if rows else "all figures are what they were")
    finish("papers", {"changed": rows})


if __name__ == "__main__":
    main()
