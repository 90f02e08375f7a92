"""Damaged files of every format: one line that says so, or values; no crash, hang or gigabytes."""

import random
import resource
import shutil

import pytest
from transformers import LlamaConfig, Qwen2Config

import fakes
import gguf_files
import packed_files
from beamwright.errors import InputError
from beamwright.models.formats import open_checkpoint
from beamwright.models.hf_config import read_shape

TINY = {**fakes.SMALL, "num_hidden_layers": 1, "num_key_value_heads": 2}
SMALL = {**TINY, "hidden_size": 64, "intermediate_size": 128}
GGUFS = {"gguf-q8": {"*": "Q8_0"}, "gguf-k": {"*": "Q4_K", "attn_v": "Q6_K", "ffn_up": "IQ4_XS"}}
EACH = 31  # of 17 kinds of files


@pytest.fixture(scope="module", params=["plain", *packed_files.FORMATS, *GGUFS])
def whole(request, tmp_path_factory):
    """A whole folder of a format, and the files in it that may be damaged."""
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    fakes.write_tokenizer(folder)
    if name in GGUFS:
        sizes = {**TINY, "hidden_size": 256, "intermediate_size": 256}
        model = fakes.write_checkpoint(folder, LlamaConfig(**sizes))
        gguf_files.write_model(folder / "m.gguf", folder, model, "llama", GGUFS[name])
        (folder / "model.safetensors").unlink()
        return folder, ["m.gguf"]
    model = fakes.write_checkpoint(folder, Qwen2Config(**SMALL))
    if name != "plain":
        packed_files.quantise(folder, name, model)
    return folder, ["model.safetensors", "config.json"]


def damage(content, chance):
    """Bytes that differ: flipped, cut off, or a number that became another."""
    found, kind = bytearray(content), chance.choice(("flip", "cut", "number", "swap"))
    head = min(len(found), chance.choice((200, 4000, len(found)))) - 8
    if kind == "cut":
        del found[chance.randrange(len(found)) :]
    elif kind == "flip":
        for _ in range(chance.choice((1, 3, 30))):
            found[chance.randrange(head)] ^= 1 << chance.randrange(8)
    elif kind == "number":
        at, value = chance.randrange(head), chance.choice((0, 2**31, 2**40, 2**63, 2**64 - 1))
        found[at : at + 8] = value.to_bytes(8, "little")
    else:
        first, second = (chance.randrange(head) for _ in range(2))
        part = found[first : first + 8]
        found[first : first + 8] = found[second : second + 8]
        found[second : second + 8] = part
    return bytes(found)


def read_all(place):
    """What loading a model reads of it."""
    read_shape(place, 512)
    stored = open_checkpoint(place)
    for name in list(stored.sizes)[:200]:
        stored.quantised_linear(name.removesuffix(".weight"))
        stored.tensor(name)


def test_damaged_files_are_one_line_each(whole, tmp_path):
    folder, names = whole
    chance, said = random.Random(folder.name.rstrip("0123456789")), []
    read_all(folder / names[0] if names[0].endswith(".gguf") else folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(EACH):
        damaged = tmp_path / str(number)
        shutil.copytree(folder, damaged)
        name = names[number % 8 == 7 and len(names) > 1]
        (damaged / name).write_bytes(damage((folder / name).read_bytes(), chance))
        try:
            read_all(damaged / name if name.endswith(".gguf") else damaged)
        except InputError as error:
            said.append(str(error))
        shutil.rmtree(damaged)
    assert len(said) > EACH // 8
    assert not [
        line for line in said if "\n" in line or not (str(tmp_path) in line or "GGUF" in line)
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak - before < 200 << 10  # KiB
