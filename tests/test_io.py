"""Whole files, and YAML of bounded size; anything else is one line that names the file."""

import errno
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from beamwright.config import Settings, load_recipe
from beamwright.errors import InputError
from beamwright.evaluate.recipes import read_recipe
from beamwright.io import MOST_BYTES, read_regular, read_yaml, write_atomically
from beamwright.verify.family import load_spec


def test_writes_and_replaces_and_leaves_nothing_else(tmp_path):
    """A new file is its user's alone, an old one stays whose it was, a link goes on pointing."""
    file, link = tmp_path / "page.html", tmp_path / "link"
    write_atomically(file, "old")
    assert sys.platform == "win32" or file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    link.symlink_to("page.html")
    write_atomically(link, "new")
    assert link.is_symlink()
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o644)
    assert sorted(tmp_path.iterdir()) == [link, file]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_text()))
    reader.start()
    write_atomically(path, "through")
    reader.join(timeout=10)
    assert found == ["through"]
    assert path.is_fifo()


@pytest.mark.parametrize("name", ["missing/page.html", ".", "circle", "/dev/full"])
def test_a_file_that_cannot_be_written_is_an_input_error(tmp_path, name):
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(InputError, match="cannot be written") as caught:
        write_atomically(tmp_path / name, "text")
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.parent.glob("*.partial"))


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    write_atomically(path, "old")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"--tree .*page.html: cannot be written \(No space"):
        write_atomically(path, "new", option="--tree ")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "checkpoint"

    def write(letter):
        for _ in range(40):
            write_atomically(path, letter * 5000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, "abcd"))
    assert len(path.read_text()) == 5000
    assert len(set(path.read_text())) == 1
    assert list(tmp_path.iterdir()) == [path]


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
    no_size = Path("/proc/self/cmdline")  # Linux's: without a size, and not read for ever
    assert not no_size.exists() or read_regular(no_size) == b""


def test_a_pipe_that_the_shell_handed_over_is_read():
    ours, theirs = os.pipe()
    os.write(theirs, b"of a process substitution")
    os.close(theirs)
    try:
        assert read_regular(Path(f"/dev/fd/{ours}")) == b"of a process substitution"
    finally:
        os.close(ours)


# --- YAML ------------------------------------------------------------------------------------


def bomb(levels=12, width=10):
    """Aliases of aliases: 10^12 values in a few hundred bytes."""
    lines = ["a0: &a0 [x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines) + "\n"


@pytest.fixture
def write(tmp_path):
    def call(text, name="file.yaml"):
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return call


BAD = {
    "aliases": (bomb(), "more than 20,000 values"),
    "circle": ("a: &a [*a]", "refers to a value that contains it"),
    "list": ("[" + "1, " * 30_000 + "]", "more than 20,000 values"),
    "long": ("a: " + "x" * MOST_BYTES, "larger than 256 KiB"),
    "deep": ("[" * 20_000, "nested too deeply"),
    "date": ("a: 2024-13-45", "month must be in"),
    "number": ("a: " + "9" * 5000, "not YAML"),
    "tag": ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "bytes": (b"a: \xff", "cannot be read"),
    "key": ("search: {on: 1}", "the key True is not text"),
    "list as key": ("? [1, 2]\n: 3", "not YAML"),
    "two documents": ("a: 1\n---\nb: 2", "not YAML"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_file_that_is_refused(write, text, message):
    file = write(text)
    with pytest.raises(InputError, match=message) as caught:
        read_yaml(file, "recipe")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_aliases_within_reason_and_a_mark_at_the_front(write):
    file = write("\ufeffa: &a {n: 4}\nb: {<<: *a, width: 2}\n")
    assert read_yaml(file, "recipe")["b"] == {"n": 4, "width": 2}
    assert read_yaml(write(""), "recipe") is None


def test_recipes_grids_and_verifiers_are_read_by_it(write):
    recipe = write(bomb() + "search: {n: *a8}\n")
    for read in (load_recipe, lambda file: read_recipe(file, {}), Settings.build):
        with pytest.raises(InputError, match="aliases count in full"):
            read(recipe)
    write("{}", "config.json")
    verifier = write(bomb() + "family: *a9\n", "verifier.yaml")
    with pytest.raises(InputError, match="aliases count in full"):
        load_spec(verifier.parent)


def test_a_grid_of_more_runs_than_anybody_means(write):
    numbers = ", ".join(map(str, range(1, 30)))
    file = write(f"grid:\n  n: [{numbers}]\n  seed: [{numbers}]\n  max_rounds: [{numbers}]\n")
    with pytest.raises(InputError, match="24,389 combinations"):
        read_recipe(file, {})


def test_a_value_of_any_length_is_shown_short(write):
    file = write(f"search: {{n: {'x' * 5000}}}\n")
    with pytest.raises(InputError, match="--n") as caught:
        Settings.build(file)
    assert len(str(caught.value)) < 600


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with names")
def test_a_pipe_that_nobody_reads_is_not_waited_for_without_end(tmp_path, monkeypatch):
    os.mkfifo(pipe := tmp_path / "pipe")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(InputError, match="no process reads this pipe"):
        write_atomically(pipe, "text")
