"""Writing whole files."""

import os
import threading

import pytest

from beamwright.errors import InputError
from beamwright.report.files import write_whole


def test_writes_and_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "page.html"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_what_was_there(tmp_path):
    path = tmp_path / "page.html"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\u00e9")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_goes_on_pointing_to_the_file(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_text()))
    reader.start()
    write_whole(path, "through")
    reader.join(timeout=10)
    assert found == ["through"]
    assert path.is_fifo()


@pytest.mark.parametrize("name", ["missing/page.html", "."])
def test_a_file_that_cannot_be_written_is_an_input_error(tmp_path, name):
    path = tmp_path / name
    with pytest.raises(InputError, match="cannot be written") as caught:
        write_whole(path, "text")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.parent.glob("*.partial"))
