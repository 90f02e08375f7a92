"""The log and the changelog: references resolve, lines are short."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MONTHS = sorted(file for file in DOCS.glob("log/*.md") if file.name != "index.md")
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


def test_an_entry_of_the_changelog_is_one_line():
    lines = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    for line, following in pairwise(lines):
        assert not line.startswith("- ") or following == "" or following.startswith("- "), line
