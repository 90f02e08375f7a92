"""Write random checkpoints in the formats that people download, such as GGUF, AWQ and GPTQ."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from beamwright_lab.models.checkpoints import copy_tokenizer
from beamwright_lab.models.gguf_files import write_gguf
from beamwright_lab.models.packings import PACKINGS
from beamwright_lab.peers.models import LARGE, model_folder

GGUF = ("Q8_0", "Q4_K_M")
FORMATS = (*(f"GGUF {mix}" for mix in GGUF), *PACKINGS)
_PROJECTION = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.weight")
_EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(?:gate_up|down)_proj")
_SMALL = {
    **{"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 562},
    **{"num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": 512},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True},
}
_GPT_OSS = {
    **{"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
    **{"intermediate_size": 192, "tie_word_embeddings": False},
}
_GPT_OSS_LARGE = {  # 0.5B with its experts; published ones are larger
    **{"hidden_size": 896, "intermediate_size": 896, "num_hidden_layers": 6},
    **{"num_attention_heads": 14, "num_local_experts": 32, "num_experts_per_tok": 4},
}


def source_of(name: str, place: Path, *, large: bool) -> Path:
    """Return the bfloat16 checkpoint from which a format's is made, written the first time.

    large: half a billion parameters, in qwen2.5-0.5b's shape unless the format is for experts.
    """
    experts = name in PACKINGS and PACKINGS[name].experts
    if large and not experts:
        return model_folder(LARGE)
    folder = place / f"{'gpt_oss' if experts else 'qwen2'}-{'large' if large else 'small'}"
    if not (folder / "tokenizer.json").is_file():
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        fields: dict[str, Any] = {**_SMALL, **(_GPT_OSS if experts else {})}
        fields |= _GPT_OSS_LARGE if large else {}
        config = AutoConfig.for_model("gpt_oss" if experts else "qwen2", **fields)
        AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
        copy_tokenizer(folder)
    return folder


def write_format(name: str, source: Path, place: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
    """Write a checkpoint in a format; return its path, and its projections' float32 values.

    Values are missing for GGUF and for large checkpoints.
    """
    if name.startswith("GGUF "):
        file = place / f"{name.removeprefix('GGUF ')}.gguf"
        write_gguf(source, file, name.removeprefix("GGUF "))
        return file, {}
    from safetensors import safe_open
    from safetensors.torch import save_file

    packing, folder = PACKINGS[name], place / re.sub(r"\W+", "-", name)
    folder.mkdir()
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    with safe_open(source / "model.safetensors", framework="pt") as file:
        small = sum(file.get_slice(key).get_shape()[0] for key in file.keys()) < 1 << 16  # noqa: SIM118
        for key in file.keys():  # noqa: SIM118 - no mapping
            weight = file.get_tensor(key)
            found = (_EXPERTS if packing.experts else _PROJECTION).fullmatch(key)
            if found is None:
                stored[key] = weight
                continue
            stem = key if packing.experts else found[1]
            turned = weight.float().transpose(-1, -2) if packing.experts else weight.float()
            packed = packing.pack(turned.contiguous())
            join = "_" if packing.experts else "."
            stored |= {f"{stem}{join}{part}": value for part, value in packed.tensors.items()}
            if small:
                meant[key] = packed.values
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = dict(packing.config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in (*source.glob("tokenizer*"), *source.glob("*.jinja")):
        shutil.copy(path, folder)
    return folder, meant
