"""What pages take for granted: tiny random checkpoints by the names of large ones, and problems."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import LlamaConfig, Qwen2Config, Qwen3Config

import fakes
import prm_checkpoints as prm

OWN_MODEL = re.compile(r"\bmodels/([\w.-]*\w)")
PROBLEM_FILE = re.compile(r"\b[\w-]+\.(?:jsonl|txt)\b")
PROBLEMS = {
    "Ann has 12 apples. In May Ann sells 3 apples. How many apples does Ann have now?": "9",
    "Tom has 4 marbles. In July Tom finds 3 marbles. How many marbles does Tom have now?": "7",
}


def _write_generator(config: type, folder: Path) -> None:
    """A chat model whose first letters are as good as any: its paths end by chance."""
    num_tokens = prm._byte_level(folder, prm.CHAT_ML_TOKENS, prm.CHAT_ML)
    shape = {**prm.SHAPE, "vocab_size": num_tokens, "eos_token_id": [2, 30, 31]}
    fakes.write_checkpoint(folder, config(**shape), seed=3, noise=0.15)


_WRITERS: dict[str, Callable[[Path], None]] = {
    "skywork": prm.write_skywork,
    "qwen.*prm|my-prm": prm.write_qwen,
    "shepherd": prm.write_math_shepherd,
    "prm": prm.write_rlhflow,
    "reward|orm": prm.write_outcome,
    "qwen3": lambda folder: _write_generator(Qwen3Config, folder),
    "llama": lambda folder: _write_generator(LlamaConfig, folder),
    "": lambda folder: _write_generator(Qwen2Config, folder),
}
"""What is written for a name: the first that it holds."""


def write_model(name: str, folder: Path, kinds: Path) -> None:
    """Write `folder/NAME`: a copy of its kind, which is made once, in `kinds`."""
    number, write = next(
        (number, write)
        for number, (kind, write) in enumerate(_WRITERS.items())
        if re.search(kind, name, re.IGNORECASE)
    )
    original = kinds / str(number)
    if not original.is_dir():
        original.mkdir()
        write(original)
    shutil.copytree(original, folder / name)


def write_problems(name: str, folder: Path) -> None:
    """Word problems with their answers under the usual names, or the text of one."""
    rows = [json.dumps({"problem": text, "answer": to}) for text, to in PROBLEMS.items()]
    (folder / name).write_text("\n".join(rows) if name.endswith("l") else next(iter(PROBLEMS)))
