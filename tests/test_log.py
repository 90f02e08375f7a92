"""The indexes of the log and of decisions list what there is; lines end before column 121."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
NOTES = sorted(file for file in DOCS.glob("log/*.md") if file.name != "index.md")
PAGES = [DOCS / "log" / "index.md", *NOTES, *DOCS.glob("develop/decisions/*.md")]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_every_note_is_in_the_index_with_its_title_and_date():
    index = (DOCS / "log" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| \[(.*)\]\((\S+)\) \| (.*) \|$", index, re.MULTILINE)
    listed = []
    for note in NOTES:
        title, empty, date = note.read_text(encoding="utf-8").splitlines()[:3]
        assert not empty
        assert note.name.startswith(date.removeprefix("Date: "))
        listed.append((date.removeprefix("Date: "), title.removeprefix("# "), note.name))
    assert sorted(row[:3] for row in rows) == sorted(listed)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert not [found for *_, found in rows if len(found.split()) > 15]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere_and_lines_are_short(page):
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), target
    assert not [x for x in text.splitlines() if len(x) > 120 and not x.startswith("|")]


DECISIONS = sorted(DOCS.glob("develop/decisions/0*.md"))
SUPERSEDED = re.compile(r"superseded by \[(\d{4})\]\((\1-[\w-]+\.md)\)")


def test_the_table_of_decisions_says_what_the_records_say():
    index = DOCS / "develop" / "decisions" / "index.md"
    rows = [line.split(" | ") for line in index.read_text(encoding="utf-8").splitlines()[6:]]
    told = []
    for record in DECISIONS:
        title, _, state = record.read_text(encoding="utf-8").splitlines()[:3]
        number, _, named = title.removeprefix("# ").partition(". ")
        date, _, status = state.removeprefix("Date: ").rstrip(".").partition(". Status: ")
        later = SUPERSEDED.fullmatch(status)
        assert later or status == "accepted", record.name
        assert not later or (record.parent / later[2]).is_file()
        status = f"superseded by {later[1]}" if later else status
        told.append([f"[{number}]({record.name})", date, named, status])
    assert rows == told
    assert sum(len(page.read_text().split()) for page in [index, *DECISIONS]) <= 3_500


def test_an_entry_of_the_changelog_is_one_line():
    lines = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
    for line, following in pairwise(lines):
        assert not line.startswith("- ") or following == "" or following.startswith("- "), line
