"""Generates the tables of measured figures on pages, from the files `docs/figures/NAME.json`.

    python -m beamwright_lab.publish NAME...   copies results/NAME.json (or only its part `quoted`)
                                                to docs/figures; for NAME = gpu-CARD, the rows of
                                                results/NAME/*.jsonl (from gpu/check.py --out)
    python -m beamwright_lab.publish --write   rewrites the generated blocks of all pages
    python -m beamwright_lab.publish           lists pages whose blocks are out of date

Pages show figures only in generated blocks, between `<!-- figures: NAME -->` and `<!-- end -->`.
`tests/test_figures.py` fails while a block is out of date.
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
from beamwright_lab.gains import study
from beamwright_lab.gpu import costs, published
from beamwright_lab.gpu import tables as card_tables
from beamwright_lab.models import shown
from beamwright_lab.offload import predicted

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
# A generated block of a page: its name and its text.
BLOCK = re.compile(
    r"^<!-- figures: (?P<name>[\w.-]+) -->\n(?P<text>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL
)
Found = Mapping[str, Any]


def _claims(claims: Sequence[Claim]) -> str:
    return markdown(claims, read)


def _whole(rows: Callable[[Found], str], name: str) -> str:
    """Return a table of file `name`, with its command, date and commit."""
    found = read(name)
    return tables.with_origin(rows(found), found)


def _on_card(card: str, shown: Callable[[Found], str]) -> str:
    return shown(read(card))


# Measured GPUs: the prefix of their blocks' names, and the name of their file.
CARDS: Mapping[str, str] = {"gpu": "gpu-h100", "h200": "gpu-h200"}

# The claims of each paper, by the name of its page in docs/papers.
PAPERS: Mapping[str, Sequence[Claim]] = {
    "lbs": lbs.CLAIMS,
    "flashtts": flashtts.CLAIMS,
    "decoupled": decoupled.CLAIMS,
    "asyncspade": asyncspade.CLAIMS,
}

# Functions that make the markdown of each block, by the block's name.
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
    "gains": partial(_whole, study.block, "gains_small"),
    "gains-bundled": partial(_whole, study.block, "gains_bundled"),
    "hybrids": lambda: _whole(tables.hybrids, "hybrids"),
    "offload-measured": lambda: _whole(predicted.shown, "offload_measured"),
    "offload-predicted": lambda: _whole(predicted.shown, "offload_predicted"),
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
    """Return README and all pages of the site, except the log."""
    found = sorted(ROOT.glob("docs/**/*.md"))
    return [ROOT / "README.md", *(page for page in found if page.parent.name != "log")]


def regenerate(text: str) -> str:
    """Return a page's text with all blocks generated again.

    Raises:
        KeyError: for a block that is not in `BLOCKS`.
    """

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- figures: {name} -->\n\n{BLOCKS[name]().strip()}\n\n<!-- end -->"

    return BLOCK.sub(block, text)


def read(name: str) -> dict[str, Any]:
    """Return the content of docs/figures/NAME.json."""
    found: dict[str, Any] = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    return found


def as_text(found: Found) -> str:
    return json.dumps(found, indent=1) + "\n"


def find_outdated() -> list[str]:
    """Return a message for each page whose blocks are out of date."""
    return [
        f"{file.relative_to(ROOT)}: blocks are out of date: run with --write"
        for file in pages()
        if regenerate(text := file.read_text(encoding="utf-8")) != text
    ]


def copy_result(name: str) -> None:
    """Copy a result to docs/figures. For `gpu-...`, keep only the figures that pages show."""
    if name.startswith("gpu-"):
        found = published.figures(RESULTS / name)
    else:
        found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    facts = ("benchmark", "command", "commit", "machine")
    if "quoted" in found:
        found = {**{each: found[each] for each in facts}, **found["quoted"]}
    FIGURES.mkdir(exist_ok=True)
    (FIGURES / f"{name}.json").write_text(as_text(found), encoding="utf-8")


def write_pages() -> None:
    """Rewrite the blocks of all pages."""
    for page in pages():
        page.write_text(regenerate(page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of results to copy")
    parser.add_argument("--write", action="store_true", help="rewrite the blocks of pages")
    given = parser.parse_args()
    for name in given.names:
        copy_result(name)
    if given.write:
        write_pages()
    left = find_outdated()
    say("\n".join(left) or "all blocks are up to date")
    raise SystemExit(bool(left))


if __name__ == "__main__":
    main()
