"""Figures of pages, and the files they come from: `docs/figures/NAME.json`, as a command wrote it.

    python -m beamwright_lab.publish NAME...   takes results/NAME.json over, whole or, where there
                                                is one, its `quoted`; of NAME = gpu-CARD the
                                                rows of results/NAME/*.jsonl (gpu/check.py --out)
    python -m beamwright_lab.publish --write   writes the blocks of pages
    python -m beamwright_lab.publish           only says what pages lack

A page has figures in blocks alone, between `<!-- figures: NAME -->` and `<!-- end -->`: tables made
of the files. Prints which are to be written anew (`tests/test_figures.py` fails until they are).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from beamwright_lab import pairs, tables
from beamwright_lab.claims import Claim, asyncspade, decoupled, flashtts, lbs, markdown
from beamwright_lab.common import RESULTS, say
from beamwright_lab.gpu import costs, published
from beamwright_lab.gpu import tables as card_tables
from beamwright_lab.models import shown

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
# A block of a page: its name and what it says.
BLOCK = re.compile(
    r"^<!-- figures: (?P<name>[\w.-]+) -->\n(?P<text>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL
)
Found = Mapping[str, Any]


def _claims(claims: Sequence[Claim]) -> str:
    return markdown(claims, read)


def _whole(rows: Callable[[Found], str], name: str) -> str:
    """A table and where it is from."""
    found = read(name)
    return tables.with_origin(rows(found), found)


def _on_card(card: str, shown: Callable[[Found], str]) -> str:
    return shown(read(card))


# Whose figures pages have, by how their blocks begin: of the folders of these names in results.
CARDS: Mapping[str, str] = {"gpu": "gpu-h100", "h200": "gpu-h200"}

# By name of a page of docs/papers, what the paper claims.
PAPERS: Mapping[str, Sequence[Claim]] = {
    "lbs": lbs.CLAIMS,
    "flashtts": flashtts.CLAIMS,
    "decoupled": decoupled.CLAIMS,
    "asyncspade": asyncspade.CLAIMS,
}

# By name of a block, its markdown, made of any files (`read`).
BLOCKS: Mapping[str, Callable[[], str]] = {
    "accuracy": lambda: tables.accuracy(read("accuracy")),
    "accuracy-all": lambda: _whole(partial(tables.accuracy, more=True), "accuracy"),
    "accuracy-paired": lambda: tables.paired(read("accuracy")),
    "speed-sentence": lambda: tables.speed_sentence(read("peers-search")),
    "speed-all": lambda: _whole(tables.speed, "peers-search"),
    **{
        name.replace("_", "-"): partial(_whole, tables.paths, name)
        for name in ("files", "paths", "small_paths", "kinds_half", "kinds_larger")
    },
    "frontier": lambda: _whole(tables.frontier, "frontier"),
    "frontier-shares": lambda: tables.frontier_shares(read("frontier")),
    "frontier-batching": lambda: tables.frontier_batching(read("frontier")),
    "frontier-levers": lambda: tables.frontier_levers(read("frontier")),
    "hybrids": lambda: _whole(tables.hybrids, "hybrids"),
    "pairs": lambda: pairs.block(read("pairs")),
    "lbs-figures": lambda: _whole(tables.lbs, "lbs_figures"),
    "families": lambda: _whole(lambda found: shown.family_rows(found["rows"]), "families"),
    "families-refused": lambda: shown.refusals(read("families")["rows"]),
    "formats": lambda: _whole(lambda found: shown.format_rows(found["rows"]), "formats"),
    "adapter-speed": lambda: _whole(lambda found: shown.speed_rows(found["rows"]), "adapter_speed"),
    "published": lambda: _whole(lambda found: shown.published_rows(found["rows"]), "published"),
    "gpu-costs": lambda: _whole(costs.block, "gpu_costs"),
    "plan": lambda: pairs.sample_block(read("pairs")),
    **{
        f"{begin}-{end}": partial(_on_card, card, shown)
        for begin, card in CARDS.items()
        for end, shown in card_tables.BLOCKS.items()
    },
    **{f"claims-{name}": partial(_claims, claims) for name, claims in PAPERS.items()},
}


def pages() -> list[Path]:
    """README and all pages of the site, without the log."""
    found = sorted(ROOT.glob("docs/**/*.md"))
    return [ROOT / "README.md", *(page for page in found if page.parent.name != "log")]


def rewritten(text: str) -> str:
    """A page with its blocks as the files have them.

    Raises:
        KeyError: for a block that nobody makes.
    """

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- figures: {name} -->\n\n{BLOCKS[name]().strip()}\n\n<!-- end -->"

    return BLOCK.sub(block, text)


def read(name: str) -> dict[str, Any]:
    """What a file says."""
    found: dict[str, Any] = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    return found


def as_text(found: Found) -> str:
    return json.dumps(found, indent=1) + "\n"


def lacking() -> list[str]:
    """Pages whose blocks are not what the files say."""
    return [
        f"{file.relative_to(ROOT)}: blocks to be written anew (--write)"
        for file in pages()
        if rewritten(text := file.read_text(encoding="utf-8")) != text
    ]


def take_over(name: str) -> None:
    """Put a result where blocks are made of it; of a check on a card (`gpu-...`), what it keeps."""
    if name.startswith("gpu-"):
        found = published.figures(RESULTS / name)
    else:
        found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    facts = ("benchmark", "command", "commit", "machine")
    if "quoted" in found:
        found = {**{each: found[each] for each in facts}, **found["quoted"]}
    FIGURES.mkdir(exist_ok=True)
    (FIGURES / f"{name}.json").write_text(as_text(found), encoding="utf-8")


def write() -> None:
    """The blocks of all pages."""
    for page in pages():
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a result, by its file")
    parser.add_argument("--write", action="store_true", help="write the blocks of pages")
    given = parser.parse_args()
    for name in given.names:
        take_over(name)
    if given.write:
        write()
    left = lacking()
    say("\n".join(left) or "all pages say what the files do")
    raise SystemExit(bool(left))


if __name__ == "__main__":
    main()
