"""Tiny random checkpoints of every verifier family, with stand-in tokenizers.

Each has its family's architecture, special tokens, chat template, and head under its published
tensor names. And a judge whose weights are set by hand, so that it does write a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

import fakes

SHAPE = {**fakes.SMALL, "num_key_value_heads": 2}

LLAMA_3 = (
    "{% for m in messages %}{% if loop.first %}<bos>{% endif %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHAT_ML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_3 = CHAT_ML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
)
LLAMA_3_TOKENS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHAT_ML_TOKENS = ["<|im_start|>", "<|im_end|>", "<extra_0>"]


def _save(
    folder: Path, tokenizer: Tokenizer, tokens: Sequence[str] = (), template: str | None = None
) -> int:
    """Write a tokenizer with special tokens of its own; returns its size."""
    wrapped = fakes.wrap(tokenizer)
    wrapped.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return len(wrapped)


def _byte_level(folder: Path, tokens: Sequence[str], template: str | None) -> int:
    merges = [*fakes.merges_after_e(), (".", "Ċ")]  # a newline may merge with a step's end
    return _save(folder, fakes.byte_level_bpe(merges), tokens, template)


def _begin_with_bos(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )


def _sentence_piece(folder: Path) -> int:
    """Blanks are `▁`, text starts with one, and bos is added: as Mistral's tokenizer does it."""
    letters = ["▁", *(chr(code) for code in range(33, 127)), "\n", "к", "и"]
    merges = [("к", "и"), ("▁", "ки"), ("▁", "+"), ("▁", "-"), ("e", "▁"), ("e", "e"), ("t", "h")]
    pieces = [*fakes.SPECIAL, *letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Replace("▁", " ")
    _begin_with_bos(tokenizer)
    return _save(folder, tokenizer)


def _cut_by_words(folder: Path, num_newlines: int, bos: bool = True) -> int:
    """Words, runs of newlines and signs stay apart, as Llama 3's and Qwen's tokenizers do it."""
    lines = [("Ċ" * n, "Ċ" * n) for n in (1, 2)]
    lines += [("ĊĊĊĊ", "Ċ" * (num_newlines - 4))] if num_newlines > 4 else []
    lines += [("Ġ", "Ċ" * num_newlines), ("Ġ", "ĊĊ"), ("Ġ", "+"), ("Ġ", "-")]
    tokenizer = fakes.byte_level_bpe([*lines, ("t", "h"), (".", "Ċ"), ("1", "2")])
    words = (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), tokenizer.pre_tokenizer]
    )
    if bos:
        _begin_with_bos(tokenizer)
    return _save(folder, tokenizer)


def _add_head(folder: Path, sizes: dict[str, tuple[int, int]], keep_lm_head: bool) -> None:
    """Put random linear layers beside the decoder's weights, under their published names."""
    generator = torch.Generator().manual_seed(5)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if not keep_lm_head:
            del tensors["lm_head.weight"]
        for name, (inputs, outputs) in sizes.items():
            tensors[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) / 3
            tensors[f"{name}.bias"] = torch.randn(outputs, generator=generator) / 3

    fakes.change_tensors(folder, change)


def _write_decoder(
    folder: Path,
    config: type,
    num_tokens: int,
    seed: int,
    noise: float = 0.1,
    kind: type = AutoModelForCausalLM,
    **more: object,
) -> None:
    shape = config(**{**SHAPE, "vocab_size": num_tokens, **more})
    fakes.write_checkpoint(folder, shape, seed, noise, kind)


def write_math_shepherd(folder: Path) -> None:
    _write_decoder(folder, MistralConfig, _sentence_piece(folder), 1, 0.15, sliding_window=None)


def write_rlhflow(folder: Path) -> None:
    _write_decoder(folder, LlamaConfig, _byte_level(folder, LLAMA_3_TOKENS, LLAMA_3), 2, 0.15)


def write_skywork(folder: Path) -> None:
    _write_decoder(folder, Qwen2Config, _byte_level(folder, CHAT_ML_TOKENS, CHAT_ML), 3)
    _add_head(folder, {"v_head.summary": (32, 1)}, keep_lm_head=True)


def write_qwen(folder: Path) -> None:
    _write_decoder(folder, Qwen2Config, _byte_level(folder, CHAT_ML_TOKENS, CHAT_ML), 4)
    _add_head(folder, {"score.0": (32, 32), "score.2": (32, 2)}, keep_lm_head=False)
    remote = {"AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig"}  # a file that is not there
    fakes.change_json(
        folder / "config.json", architectures=["Qwen2ForProcessRewardModel"], auto_map=remote
    )


OUTCOME = AutoModelForSequenceClassification


def write_outcome(folder: Path) -> None:
    num_tokens = _byte_level(folder, LLAMA_3_TOKENS, LLAMA_3)
    _write_decoder(folder, LlamaConfig, num_tokens, 5, kind=OUTCOME, num_labels=1)


def write_outcome_qwen3(folder: Path) -> None:
    num_tokens, more = _byte_level(folder, CHAT_ML_TOKENS, QWEN_3), {"head_dim": 8, "num_labels": 1}
    _write_decoder(folder, Qwen3Config, num_tokens, 5, kind=OUTCOME, **more)


def write_trl(folder: Path) -> None:
    num_tokens, kind = _byte_level(folder, [], None), AutoModelForTokenClassification
    _write_decoder(folder, Qwen2Config, num_tokens, 5, kind=kind, num_labels=2)


def write_reasonflux_small(folder: Path) -> None:
    _write_decoder(folder, Qwen2Config, _cut_by_words(folder, 4), 7)
    with torch.random.fork_rng():
        torch.manual_seed(8)
        torch.save(torch.nn.Linear(32, 1).state_dict(), folder / "reward_head.pt")


def write_versaprm(folder: Path) -> None:
    _write_decoder(folder, LlamaConfig, _cut_by_words(folder, 4), 9, 0.15)


def write_math_psa(folder: Path) -> None:
    _write_decoder(folder, Qwen2Config, _cut_by_words(folder, 5, bos=False), 10, 0.15)


# --- judges that are asked for one word -------------------------------------------------------

R1 = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)


def write_generative(folder: Path) -> None:
    """A random chat model with one token for each of the words that ThinkPRM and GenPRM end on."""
    words = [("Ġ", "y"), ("Ġy", "es"), ("n", "o"), ("Ġ", "no"), ("Y", "es"), ("N", "o")]
    merges = [*fakes.merges_after_e(), *words, (".", "Ċ")]
    wrapped = fakes.wrap(fakes.byte_level_bpe(merges))
    wrapped.add_tokens([AddedToken(t, special=True) for t in ("<|User|>", "<|Assistant|>")])
    wrapped.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
    wrapped.chat_template = R1
    wrapped.save_pretrained(folder)
    _write_decoder(folder, Qwen2Config, len(wrapped), 11, 0.2, max_position_embeddings=2048)


# --- judges ----------------------------------------------------------------------------------

FAULT = "~"  # what the judge with a hand-made mind looks for


def write_random_judge(folder: Path, template: str, ends: list[int]) -> None:
    """A random chat model. ends: ids that end its turn, so that critiques differ in length."""
    tokens = LLAMA_3_TOKENS if template == LLAMA_3 else CHAT_ML_TOKENS
    num_tokens = _byte_level(folder, tokens, template)
    _write_decoder(folder, LlamaConfig, num_tokens, 6, 0.2, eos_token_id=ends)


def write_made_judge(folder: Path) -> None:
    """A model that answers "Score: 3/10" where the prompt holds a `FAULT`, else "Score: 7/10".

    Its next token follows from the last one; only the digit also depends on what attention, which
    is uniform, has seen.
    """
    _byte_level(folder, LLAMA_3_TOKENS, LLAMA_3)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    vocab = len(tokenizer)
    flag = vocab + vocab % 2  # the hidden unit that says that there is a fault
    sizes = {"vocab_size": vocab, "hidden_size": flag + 2, "max_position_embeddings": 2048}
    sizes |= {"intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = LlamaConfig(**{**SHAPE, **sizes})
    answer = tokenizer.convert_tokens_to_ids([*"Score:", "Ġ", *"7/10", "<|eot_id|>"])
    blank, good = tokenizer.convert_tokens_to_ids(["Ġ", "7"])
    fault, bad = tokenizer.convert_tokens_to_ids([FAULT, "3"])
    with torch.random.fork_rng(), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        layer = model.model.layers[0].self_attn
        model.model.embed_tokens.weight.fill_diagonal_(1.0)
        layer.v_proj.weight[0, fault] = 1.0
        layer.o_proj.weight[flag, 0] = 160.0
        head = model.lm_head.weight
        head[answer[0]] = 100.0
        for last, token in zip([*answer, bad], [*answer[1:], answer[0], answer[8]], strict=True):
            head[:, last] = 0.0
            head[token, last] = 100.0
        head[:, flag] = 0.0
        head[bad, [blank, flag]] = torch.tensor([99.0, 0.5])
        assert answer[7] == good
    model.save_pretrained(folder)
