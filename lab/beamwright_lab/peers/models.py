"""Checkpoints that all engines of a benchmark load: bundled ones, and random ones written once.

`qwen2.5-0.5b` and `qwen2.5-1.5b` are random weights in Qwen2.5's shapes and bfloat16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from zlib import crc32

import torch

from beamwright.models.hub import resolve_folder
from beamwright_lab.common import RESULTS, say

LARGE = "qwen2.5-0.5b"
_LARGE_SIZES = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
LARGER = "qwen2.5-1.5b"
_LARGER_SIZES = _LARGE_SIZES | {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "intermediate_size": 8960,
}
# Weight of the final norm. Random layers would give nearly equal logits; with this weight, the
# entropy of next tokens is about that of text (2 to 3 nats).
_FINAL_NORM = 8.0
_SPECIAL_WORDS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def model_folder(name: str) -> Path:
    """Return the folder of a model.

    name: "bundled", a random model (written at the first call, with a fixed seed) or a folder.
    """
    if name == "bundled":
        return resolve_folder("bundled", "generator")
    if name not in _SIZES:
        return Path(name)
    folder = RESULTS / "models" / name
    if not (folder / "done").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        facts = _write_large(folder, _SIZES[name])
        (folder / "done").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        say(f"written: {folder}, {facts}")
    return folder


def derived_path(folder: Path, ending: str) -> Path:
    """Return where a file or folder that is made from a model is kept, among the results.

    A checksum of the model's path tells apart models whose folders have the same name.
    """
    checksum = crc32(str(folder.resolve()).encode())
    return RESULTS / "models" / f"{folder.name}-{checksum:08x}-{ending}"


def int8_folder(folder: Path) -> Path:
    """Write the model with int8 projections, for vLLM's W8A8, into a folder of the results, once.

    Returns that folder.
    """
    from safetensors.torch import load_file, save_file

    place = derived_path(folder, "int8")
    if (place / "done").is_file():
        return place
    place.mkdir(parents=True, exist_ok=True)
    for file in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        shutil.copy(file, place)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _W8A8
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (place / "done").write_text("", encoding="utf-8")
    return place


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
}


def _write_large(folder: Path, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes, **_SPECIAL, tie_word_embeddings=True, rope_theta=1e6, rms_norm_eps=1e-6
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    torch.nn.init.constant_(model.model.norm.weight, _FINAL_NORM)
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_bpe(folder, sizes["vocab_size"])
    return {"parameters": sum(p.numel() for p in model.parameters())}


def _write_bpe(folder: Path, num_words: int) -> None:
    """Write a byte-level BPE tokenizer: all bytes, then words of up to four letters after a space.

    The files are those of Qwen2's tokenizer, whose class `transformers` uses for every Qwen2
    folder. The chat template adds the space before a text's first word.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    every_byte = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges, stems = [*_SPECIAL_WORDS.values(), *every_byte], [], ["\u0120"]
    while len(tokens) < num_words:
        longer = [(stem, letter) for stem in stems for letter in ascii_lowercase]
        merges += longer[: num_words - len(tokens)]
        stems = [stem + letter for stem, letter in longer[: num_words - len(tokens)]]
        tokens += stems
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **_SPECIAL_WORDS)
    tokenizer.chat_template = " {{ messages[-1]['content'] }}"
    tokenizer.save_pretrained(folder)


_SIZES = {LARGE: _LARGE_SIZES, LARGER: _LARGER_SIZES}
