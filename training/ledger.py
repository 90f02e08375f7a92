r"""The ledger: problems whose solution of thousands of tokens looks back at its own results.

A problem gives some keys a digit and lists statements; each adds to the digit of one earlier key,
mod 10, and writes a key of its own. The solution writes the statements out one after another, with
the digit looked up and the result:

    given      bako5 zuri3
    statements bako+4 lemo lemo+7 w ...
    solution   bako5+4 lemo9 lemo9+7 w6 ... .\boxed{...}

Keys are single tokens drawn anew for every problem; each is written once and looked up at most
once. So every statement needs two look-backs: one at its line in the prompt, which moves on
steadily, and one at the operand's digit, anywhere in the solution so far, under a key that has just
been written. In the `announced` variant every statement first names the operand of the next one.
The box holds the results of the last four statements, w to z.

    python training/ledger.py --out ledger.jsonl --tokens 2048 --num 20 --announced
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

NUM_KEYS = 1536
WAIT = 2
"""Statements before a result may be looked up."""
LAST = (" w", " x", " y", " z")
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
PLAIN, ANNOUNCED, BREAK, NONE, END, BOX = "plain", "announced", "\n", " end", ".", "\\boxed{"
# A key with the space before it; a digit; a digit to add; everything else that is a token.
PATTERN = r" [a-z]+|\+\d|\d|[a-z]+|\n|\.|\\boxed\{|\}"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] | trim }}\n{% endif %}"
    "{% endfor %}"
)


@cache
def key_names() -> tuple[str, ...]:
    """All keys, always the same: two syllables each."""
    syllables = [c + v for c in "bdfghjklmnprstvz" for v in "aeiou"]
    names = [f" {a}{b}" for a in syllables for b in syllables]
    return tuple(sorted(random.Random("ledger-keys").sample(names, NUM_KEYS)))


def vocabulary() -> list[str]:
    """Every token, in the order of the ids."""
    digits = [str(d) for d in range(10)]
    marks = [PLAIN, ANNOUNCED, BREAK, NONE, END, BOX, "}"]
    return [PAD, BOS, EOS, *marks, *digits, *(f"+{d}" for d in digits), *LAST, *key_names()]


@dataclass(frozen=True)
class Statement:
    """`target` is the digit of `operand` plus `add`, mod 10."""

    operand: str
    add: int
    target: str


@dataclass(frozen=True)
class Ledger:
    """A problem: keys with their digits, then statements in the order in which to work."""

    given: tuple[tuple[str, int], ...]
    statements: tuple[Statement, ...]
    announced: bool

    def values(self) -> dict[str, int]:
        """The digit of every key, in the order in which they become known."""
        found = dict(self.given)
        for each in self.statements:
            found[each.target] = (found[each.operand] + each.add) % 10
        return found

    def next_operands(self) -> list[str]:
        """What each statement announces."""
        return [each.operand for each in self.statements[1:]] + [NONE]


def make_ledger(
    rng: random.Random,
    num_statements: int,
    num_given: int,
    announced: bool,
    digits: Sequence[int] = range(10),
    adds: Sequence[int] = range(10),
) -> Ledger:
    """A random problem; operands are drawn evenly from the keys not looked up so far.

    Those written by the last two statements wait: an operand is known when it is announced.
    digits, adds: what the digits given and those to add are drawn from.
    """
    drawn = rng.sample(key_names(), num_given + num_statements - len(LAST))
    live = drawn[:num_given]
    given = tuple((key, rng.choice(digits)) for key in live)
    statements = []
    for target in (*drawn[num_given:], *LAST):
        fresh = {each.target for each in statements[-WAIT:]} if num_given > WAIT else set()
        place = rng.choice([i for i, key in enumerate(live) if key not in fresh])
        statements.append(Statement(live[place], rng.choice(adds), target))
        live[place] = target
    return Ledger(given, tuple(statements), announced)


def sizes(num_tokens: int, announced: bool) -> tuple[int, int]:
    """How many statements, and keys given, make at most so many tokens; half as many are given."""
    num = (num_tokens - 15) // (11 if announced else 9)
    if num < len(LAST):
        raise ValueError(f"no ledger has as few as {num_tokens} tokens")
    return num, num // 2


def ledgers(num_tokens: int, num: int, announced: bool, seed: int) -> list[Ledger]:
    """Problems of at most so many tokens, prompt and solution together."""
    rng = random.Random(f"ledger-{num_tokens}-{announced}-{seed}")
    return [make_ledger(rng, *sizes(num_tokens, announced), announced) for _ in range(num)]


Piece = tuple[str, str]
"""A token's text and its role; "|" before the role says that a group of tokens begins here."""


def prompt_pieces(ledger: Ledger) -> list[Piece]:
    """The tokens of the prompt as the chat template renders it."""
    pieces = [(BOS, ""), (ANNOUNCED if ledger.announced else PLAIN, "")]
    for key, digit in ledger.given:
        pieces += [(key, "|given"), (str(digit), "")]
    pieces.append((BREAK, "|"))
    if ledger.announced:
        pieces.append((ledger.statements[0].operand, ""))
    for index, (each, after) in enumerate(
        zip(ledger.statements, ledger.next_operands(), strict=True)
    ):
        start = "|line" if index else ""
        line = [(each.operand, ""), (f"+{each.add}", ""), (each.target, "")]
        line = [(after, ""), *line] if ledger.announced else line
        pieces += [(line[0][0], start), *line[1:]]
    return [*pieces, (END, ""), (BREAK, "|")]


def solution_pieces(ledger: Ledger) -> list[Piece]:
    """The tokens of the only right solution, the end-of-text token included.

    Roles: name, operand, look-up, add, target, sum, answer, and "mark" for the rest.
    """
    values = ledger.values()
    pieces: list[Piece] = []
    if ledger.announced:
        pieces.append((ledger.statements[0].operand, "name"))
    for index, (each, after) in enumerate(
        zip(ledger.statements, ledger.next_operands(), strict=True)
    ):
        statement = [
            (each.operand, "operand"),
            (str(values[each.operand]), "look-up"),
            (f"+{each.add}", "add"),
            (each.target, "target"),
            (str(values[each.target]), "sum"),
        ]
        statement = [(after, "name"), *statement] if ledger.announced else statement
        start = "|" if 0 < index <= len(ledger.statements) - len(LAST) else ""
        pieces += [(statement[0][0], start + statement[0][1]), *statement[1:]]
    pieces += [(END, "mark"), (BOX, "mark")]
    pieces += [(digit, "answer") for digit in answer(ledger)]
    return [*pieces, ("}", "mark"), (EOS, "mark")]


def answer(ledger: Ledger) -> str:
    """The digits of the last four keys."""
    values = ledger.values()
    return "".join(str(values[key]) for key in LAST)


def question_text(ledger: Ledger) -> str:
    """The problem as a user gives it."""
    return "".join(text for text, _ in prompt_pieces(ledger)[1:]).strip()


def solution_text(ledger: Ledger) -> str:
    """The only right solution."""
    return "".join(text for text, _ in solution_pieces(ledger)[:-1])


@dataclass(frozen=True)
class Verdict:
    """What is right in a solution.

    recall: of the statements that stand there, how many look up the digit that the prompt or the
    solution itself says of the key before it. The other shares are of all statements of the
    problem: looked_up, the same; copied, the statement that is due; added, the sum of the digits
    before it. right_tokens: the share of the solution before the first wrong token.
    """

    recall: float
    copied: float
    looked_up: float
    added: float
    right_tokens: float
    answered: bool
    complete: bool


def first_error(ledger: Ledger, text: str) -> int | None:
    """Where the first wrong character stands; None for the right solution and its beginnings."""
    right = solution_text(ledger)
    if right.startswith(text):
        return None
    differs = (i for i, (a, b) in enumerate(zip(text, right, strict=False)) if a != b)
    return next(differs, len(right))


def judge(ledger: Ledger, text: str) -> Verdict:
    """Check a solution, whole or not, against the problem and against itself."""
    tokens = re.findall(PATTERN, text)
    right = [piece for piece, _ in solution_pieces(ledger)[:-1]]
    same = [a == b for a, b in zip(tokens, right, strict=False)]
    begin, width = (1, 6) if ledger.announced else (0, 5)
    known = {key: str(digit) for key, digit in ledger.given}
    copied = looked_up = added = there = 0
    for index, each in enumerate(ledger.statements):
        at = begin + index * width + width - 5
        statement = tokens[at : at + 5]
        if len(statement) < 5:
            break
        there += 1
        operand, digit, add, target, result = statement
        copied += (operand, add, target) == (each.operand, f"+{each.add}", each.target)
        looked_up += known.get(operand) == digit
        if re.fullmatch(r"\d\+\d\d", digit + add + result):
            added += (int(digit) + int(add)) % 10 == int(result)
        if target.startswith(" "):  # a key, not a digit that is said again and again
            known.setdefault(target, result)
    num = len(ledger.statements)
    return Verdict(
        recall=looked_up / max(1, there),
        copied=copied / num,
        looked_up=looked_up / num,
        added=added / num,
        right_tokens=(same.index(False) if False in same else len(same)) / len(right),
        answered=text.rstrip().endswith(f"{BOX}{answer(ledger)}}}"),
        complete=text == solution_text(ledger),
    )


def mean_verdict(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The means of all that verdicts say."""
    return {
        each.name: sum(float(getattr(v, each.name)) for v in verdicts) / len(verdicts)
        for each in fields(Verdict)
    }


def rows(num_tokens: int, num: int, announced: bool, seed: int) -> Iterator[dict[str, object]]:
    """Problems as rows of a file that `beamwright eval` reads."""
    for index, ledger in enumerate(ledgers(num_tokens, num, announced, seed)):
        yield {
            "problem": question_text(ledger),
            "answer": answer(ledger),
            "solution": solution_text(ledger),
            "unique_id": f"{ANNOUNCED if announced else PLAIN}-{num_tokens}-{seed}-{index}",
            "level": len(ledger.statements),
        }


def make_tokenizer(context: int):  # type: ignore[no-untyped-def]
    """One token a piece; a `PreTrainedTokenizerFast`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def main() -> None:
    """Write problems to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048, help="prompt and solution together")
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--announced", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for row in rows(args.tokens, args.num, args.announced, args.seed):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
