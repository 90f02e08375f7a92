"""The models that all sides load: the bundled ones, and a random Llama of 6.5 M parameters."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from beamwright.models.find import resolve_folder
from benchmarks.common import RESULTS, say

_SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 768,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
}


def model_folder(name: str) -> Path:
    """`bundled`, `llama-7m` (written once, from a fixed seed) or a folder."""
    if name == "bundled":
        return resolve_folder("bundled", "generator")
    if name == "llama-7m":
        folder = RESULTS / "models" / "llama-7m"
        if not (folder / "done").is_file():
            _write_random_llama(folder)
        return folder
    return Path(name)


def _write_random_llama(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**_SIZES, **special, tie_word_embeddings=False))
    model.save_pretrained(folder)
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, _SIZES["vocab_size"]))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    (folder / "done").write_text(json.dumps(_SIZES) + "\n", encoding="utf-8")
    say(f"written: {folder}, {sum(p.numel() for p in model.parameters()):,} parameters")
