"""The log and the changelog: references resolve, lines are short."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MONTHS = sorted(file for file in DOCS.glob("log/*.md") if file.name != "index.md")
PAGES = [DOCS / "log" / "index.md", *MONTHS]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_every_month_is_in_the_index():
    index = (DOCS / "log" / "index.md").read_text(encoding="utf-8")
    assert LINK.findall(index) == [month.name for month in MONTHS]


@pytest.mark.parametrize("month", MONTHS, ids=lambda month: month.stem)
def test_references_to_log_entries_resolve(month):
    """Pages, code and records of decisions refer to entries by name."""
    entries = re.findall(r'<a id="([\w-]+)"></a>', month.read_text(encoding="utf-8"))
    assert len(set(entries)) == len(entries)
    referring = re.compile(rf"log/{month.stem}\.md#([\w-]+)")
    for file in (*ROOT.rglob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("lab/**/*.py")):
        assert set(referring.findall(file.read_text(encoding="utf-8"))) <= set(entries), file.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere_and_lines_are_short(page):
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), target
    assert not [x for x in text.splitlines() if len(x) > 120 and not x.startswith("|")]


def test_an_entry_of_the_changelog_is_one_line():
    lines = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
    for line, following in pairwise(lines):
        assert not line.startswith("- ") or following == "" or following.startswith("- "), line
