"""Digests of checkpoints: what counts, and what is named."""

import pytest

from beamwright.models.digest import digest_of, start_digest


@pytest.fixture
def folder(tmp_path):
    for name in ("model.safetensors", "config.json", "tokenizer.json", "verifier_head.safetensors"):
        (tmp_path / name).write_text('{"a": 1}' if name == "config.json" else name * 100)
    return tmp_path


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_one_byte_of_one_file_is_seen(folder, name):
    was = digest_of(folder)
    with open(folder / name, "ab") as file:
        file.write(b"x")
    now = digest_of(folder)
    assert was["sha256"] != now["sha256"]
    assert [n for n in now["files"] if was["files"].get(n) != now["files"][n]] == [name]


def test_what_nobody_reads_does_not_count(folder):
    was = digest_of(folder)
    others = ["README.md", "consolidated.safetensors", "pytorch_model.bin", "optimizer.pt"]
    for name in (*others, "model-00001-of-00002.safetensors"):
        (folder / name).write_text("x")
    (folder / "chat_template").mkdir()
    assert digest_of(folder) == was
    (folder / "model.safetensors").unlink()
    assert "pytorch_model.bin" in digest_of(folder)["files"]


def test_a_revision_of_the_hub_is_told(tmp_path):
    folder = tmp_path / "snapshots" / "abc123"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    assert digest_of(folder)["revision"] == "abc123"


def test_a_file_that_cannot_be_read_leaves_none(folder):
    assert start_digest(folder).result() == digest_of(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "nowhere")
    assert start_digest(folder).result() is None
