"""Notebooks run from top to bottom, and what is asserted in them holds; they are stored small."""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMED = [pytest.param(file, id=file.stem) for file in NOTEBOOKS]


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("file", NAMED)
def test_it_runs_and_what_it_asserts_holds(file, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    book = nbformat.reads(file.read_text(), as_version=4)
    stored = list(map(printed, book.cells))
    client = nbclient.NotebookClient(book, timeout=600, kernel_name="python3")
    client.execute(cwd=str(tmp_path))
    assert list(map(printed, book.cells)) == stored, "what is stored is what it prints"
    shown = json.dumps(book.cells)
    assert "text/html" in shown
    assert "done | " in shown, "progress is a line in the cell"


def printed(cell):
    return [out.text for out in cell.get("outputs", []) if out.output_type == "stream"]


@pytest.mark.parametrize("file", NAMED)
def test_it_is_stored_small(file):
    text = file.read_text()
    assert len(text) < 60_000
    assert "<iframe" not in text
