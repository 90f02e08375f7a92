"""The tokenizer that both bundled models share: byte-level BPE, single digits, chat template."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from problems import make_problem, question_text, write_solution

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
VOCAB_SIZE = 640
CONTEXT = 512
STEP_END = ".\n\n"
# Words with the space before them, one digit at a time, punctuation with the newlines after it.
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+\n*|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] | trim }}\n\n{% endif %}"
    "{% endfor %}"
)


def prompt_text(problem_text: str) -> str:
    """What stands before a solution, as the chat template renders it."""
    return f"{BOS}{problem_text.strip()}\n\n"


def corpus(seed: int, num: int) -> Iterator[str]:
    """Training text for the merges."""
    rng = random.Random(f"tokenizer-{seed}")
    for _ in range(num):
        problem = make_problem(rng, rng.randint(2, 8), most_holders=3)
        yield f"{question_text(problem)}\n\n{write_solution(rng, problem)}"


def train(seed: int = 0, num: int = 8000) -> PreTrainedTokenizerFast:
    """Learn the merges and wrap them for transformers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, num), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    assert len(wrapped.encode(STEP_END)) == 1
    return wrapped


def main() -> None:
    """Train the tokenizer and save it as a Hugging Face folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train(args.seed).save_pretrained(args.out, save_jinja_files=False)
    config = args.out / "tokenizer_config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    content["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release reads
    config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
