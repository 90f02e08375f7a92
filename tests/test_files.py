"""Writing whole files."""

import errno
import os
import sys
import threading
from pathlib import Path

import pytest

from beamwright import files
from beamwright.errors import InputError
from beamwright.files import read_regular, write_whole


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="Linux's")
def test_a_file_without_a_size_is_not_read_for_ever():
    assert read_regular(Path("/proc/self/cmdline")) == b""


def test_writes_and_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "page.html"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="modes are of POSIX")
def test_a_new_file_is_its_users_alone_and_an_old_one_stays_whose_it_was(tmp_path):
    file = tmp_path / "a"
    write_whole(file, "x")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    write_whole(file, "y")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("y", 0o644)


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


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "null"
    path.symlink_to("/dev/null")
    write_whole(path, "gone")
    assert path.is_symlink()
    assert path.is_char_device()


def test_a_full_device_is_an_input_error():
    with pytest.raises(InputError, match="/dev/full: cannot be written \\(No space left on device"):
        write_whole(files.Path("/dev/full"), "text")


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    write_whole(path, "old")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"--tree .*page.html: cannot be written \(No space"):
        write_whole(path, "new", option="--tree ")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "checkpoint"
    errors = []

    def write(text):
        try:
            for _ in range(40):
                write_whole(path, text)
        except InputError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(letter * 5000,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert set(path.read_text()) < set("abcd")
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIPE_WAIT_S", 0.05)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InputError, match="nobody reads this pipe"):
        write_whole(path, "text")


def test_a_name_as_long_as_names_can_be(tmp_path):
    path = tmp_path / ("x" * 255)
    write_whole(path, "text")
    assert path.read_text() == "text"


def test_links_in_a_circle(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "a", "text")


# --- reading ---------------------------------------------------------------------------------


def test_what_may_never_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="not a regular file"):
            read_regular(tmp_path / name)
    with pytest.raises(OSError, match="Is a directory"):
        read_regular(tmp_path)
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file") == b"content"
    assert read_regular(tmp_path / "file", 4) == b"cont"


def test_a_pipe_that_the_shell_handed_over_is_read():
    ours, theirs = os.pipe()
    os.write(theirs, b"of a process substitution")
    os.close(theirs)
    try:
        assert read_regular(Path(f"/dev/fd/{ours}")) == b"of a process substitution"
    finally:
        os.close(ours)
