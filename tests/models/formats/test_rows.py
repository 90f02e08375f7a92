"""Rows of a table that stays in its file: those of the whole table, whatever the format."""

import os

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

import fakes
import gguf_files
from beamwright.errors import InputError
from beamwright.models import weights
from beamwright.models.formats import open_checkpoint
from beamwright.models.formats.plain_files import RowReader
from beamwright.models.load import load_model
from beamwright.sections import ModelSettings

WIDE = {**fakes.SMALL, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2}
IDS = torch.tensor([3, 0, 3, 7, 11, 1])
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def check(checkpoint, name):
    whole = checkpoint.tensor(name)
    for dtype in DTYPES:
        rows = checkpoint.row_reader(name, dtype)
        assert rows[IDS].dtype == dtype
        assert torch.equal(rows[IDS], whole.to(dtype)[IDS])


@pytest.mark.parametrize("size", ["5GB", "100KB"])
def test_rows_of_safetensors(tmp_path, size):
    fakes.write_checkpoint(tmp_path, LlamaConfig(**WIDE), max_shard_size=size)
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == (size == "100KB")
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint, "model.embed_tokens.weight")
    check(checkpoint, "model.layers.1.mlp.down_proj.weight")


def test_a_pickle_has_no_rows(tmp_path):
    torch.save({"a": torch.ones(4, 4)}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).row_reader("a", torch.float32) is None


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q6_K", "Q4_K", "Q2_K"])
def test_rows_of_gguf(tmp_path, kind):
    fakes.write_tokenizer(tmp_path)
    model, path = fakes.write_checkpoint(tmp_path, LlamaConfig(**WIDE)), tmp_path / "tiny.gguf"
    gguf_files.write_model(path, tmp_path, model, "llama", {} if kind == "F32" else {"*": kind})
    checkpoint = open_checkpoint(path)
    permuted = checkpoint.row_reader("model.layers.0.self_attn.q_proj.weight", torch.float32)
    assert permuted is None, "its rows are wanted in another order"
    name = "model.layers.0.mlp.down_proj.weight"
    if kind == "Q2_K":
        assert checkpoint.row_reader(name, torch.float32) is None, "transformers turns it back"
    else:
        check(checkpoint, name)


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_embedding_stays_in_its_file(tmp_path, monkeypatch, tied):
    fakes.write_tokenizer(tmp_path)
    fakes.write_checkpoint(tmp_path, Qwen2Config(**WIDE, tie_word_embeddings=tied))

    def load(**more):
        return load_model(str(tmp_path), ModelSettings(dtype="bfloat16"), **more).decoder

    plain, scorer = load(), load(reads_logits=False)
    monkeypatch.setattr(weights, "LARGE_TABLE_BYTES", 0)
    read, alone = load(), load(reads_logits=False)
    # A head that is multiplied as it is, for lack of bfloat16 products, has the table in memory.
    assert isinstance(read.weights.embedding, RowReader) == (
        plain.weights.lm_head.weight is not plain.weights.embedding
    )
    for one, other in ((plain, read), (scorer, alone)):
        assert torch.equal(one.embed_tokens(IDS), other.embed_tokens(IDS))
        assert (one.dtype, one.device) == (other.dtype, other.device)
    hidden = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(plain.logits(hidden), read.logits(hidden))
    assert alone.weights.lm_head.weight.numel() == 0


def test_a_file_that_has_become_shorter_is_named(tmp_path):
    fakes.write_checkpoint(tmp_path, LlamaConfig(**WIDE))
    rows = open_checkpoint(tmp_path).row_reader("model.embed_tokens.weight", torch.float32)
    os.truncate(tmp_path / "model.safetensors", 4096)
    with pytest.raises(InputError, match=r"model\.safetensors: the file is truncated"):
        rows[IDS]
