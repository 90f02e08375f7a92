"""Figures on pages are those of files that commands wrote (`beamwright_lab.publish`)."""

import re
from pathlib import Path

import pytest
import yaml

from beamwright.config import section_fields
from beamwright.io import read_toml_beside
from beamwright_lab import publish
from beamwright_lab.claims import NONE

ROOT = Path(__file__).parent.parent
NOT_TEXT = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|arXiv [\d.]+", re.DOTALL)
FIGURE = re.compile(r"\d+\.\d+|\d+(?:,\d{3})+|\d+(?:x\b| %)")
_TABLE = read_toml_beside(__file__)
COMMON, OWN = set(_TABLE["common"]), _TABLE["own"]
FLAGS = {f"--{name.replace('_', '-')}" for part in section_fields().values() for name in part}
FLAGS |= {"--plugin"}

PAGES = [
    page
    for page in (str(each.relative_to(ROOT)) for each in publish.pages())
    if page != "docs/develop/decisions.md"
]


def test_pages_say_what_the_files_do():
    assert publish.find_outdated() == []


def test_what_is_allowed_is_of_pages_that_are():
    assert set(OWN) <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_stands_in_a_block(page):
    text = publish.BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    text = " ".join(text.split())
    assert set(FIGURE.findall(NOT_TEXT.sub("", text))) <= COMMON | {*OWN.get(page, ())}


def test_every_file_says_where_it_is_from():
    for file in publish.FIGURES.glob("*.json"):
        found = publish.read(file.stem)
        assert found["command"].startswith("python -m beamwright_lab.")
        assert found["machine"]["date"]


def test_a_claim_is_judged_by_what_its_file_says():
    found = publish.read("lbs_figures")
    for row in found["table"]:
        if row["figure"] == "10b":
            row["ours"] = row["ours"].replace(row["ours"].partition(" ")[0], "1.9")
    claim = next(each for each in publish.PAPERS["lbs"] if "Fig. 10b" in each.paper)
    assert claim.row(publish.read("lbs_figures"), "A")["verdict"] == "reproduced"
    assert claim.row(found, "A")["verdict"] == "partly"
    assert claim.row(found, "A")["our result"] == "1.9 / 1.9 / 1.9 times fewer bytes (A)"


ROWS = [(paper, claim) for paper, claims in publish.PAPERS.items() for claim in claims]


@pytest.mark.parametrize(("paper", "claim"), ROWS, ids=[f"{p}: {c.mechanism}" for p, c in ROWS])
def test_a_row_of_a_paper_names_what_there_is(paper, claim):
    """Every cell says something; file, recipe and test exist."""
    found = None if claim.source is None else publish.read(claim.source)
    row = claim.row(found, "A")
    assert all(row.values()), row
    assert (claim.source is None) == (claim.judge is None)
    names = {claim.file, claim.recipe, claim.test}
    if claim.verdict == "not built":
        assert names == {NONE}
        return
    assert NONE not in names
    below = "" if claim.file.startswith("lab/") else "src/beamwright/"
    assert (ROOT / below / claim.file).is_file(), claim.file
    file, _, name = claim.test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), claim.test
    if claim.recipe.startswith("--"):
        assert claim.recipe in FLAGS
    else:
        file, _, setting = claim.recipe.partition(": ")
        recipe = yaml.safe_load((ROOT / "recipes" / file).read_text(encoding="utf-8"))
        assert setting in {each["name"] for each in recipe["settings"]}, claim.recipe


def test_a_block_that_differs_is_found_and_written(monkeypatch, tmp_path):
    monkeypatch.setattr(publish, "BLOCKS", {"speed": lambda: "| 3 |"})
    text = "before\n<!-- figures: speed -->\n\n| 2 |\n\n<!-- end -->\nafter\n"
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr(publish, "pages", lambda: [page])
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    assert publish.find_outdated() == ["page.md: blocks are out of date: run with --write"]
    page.write_text(publish.regenerate(text))
    assert page.read_text() == text.replace("2", "3")
    assert publish.find_outdated() == []


def test_a_result_is_taken_over_whole_or_the_part_that_is_quoted(monkeypatch, tmp_path):
    origin = {"command": "python -m beamwright_lab.x", "commit": "1", "machine": {"date": "2026"}}
    monkeypatch.setattr(publish, "RESULTS", tmp_path)
    monkeypatch.setattr(publish, "FIGURES", tmp_path / "figures")
    for result, kept in (
        ({"rows": [1]}, {"rows": [1]}),
        ({"rows": [1], "quoted": {"a": 2}}, {"a": 2}),
    ):
        (tmp_path / "x.json").write_text(publish.as_text({"benchmark": "x", **result, **origin}))
        publish.copy_result("x")
        assert publish.read("x") == {"benchmark": "x", **kept, **origin}
