"""Checks of the problem maker, the exact checker, the splits and the tokenizer, in seconds.

python training/selfcheck.py
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import torch

import ledger
import words
from make_tokenizer import prompt_text, train
from model import Decoder, Shape, sample
from problems import (
    NAMES,
    THINGS,
    Problem,
    drill,
    extract_answer,
    final_answer,
    first_error,
    is_complete,
    make_problem,
    permitted_steps,
    problem_set,
    question_text,
    reworded,
    split_of,
    write_solution,
)
from train_verifier import cut_at_error
from verifier import encode_paths

EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


def some_problems(num: int) -> list[Problem]:
    """Problems of all levels, with one, two and three holders where there is room for them."""
    rng = random.Random(7)
    return [make_problem(rng, i % 9, "train", 1 + i % 3 if i % 9 > 1 else 1) for i in range(num)]


def holds(a: str, sign: str, b: str, c: str) -> bool:
    """Whether an equation is true."""
    x, y = int(a), int(b)
    return int(c) == {"+": x + y, "-": x - y, "*": x * y, "/": x / max(1, y)}[sign]


def check_solutions() -> None:
    """Right solutions pass, have true equations, as many as the level, and the stated answer."""
    rng = random.Random(1)
    for problem in some_problems(700):
        text = write_solution(rng, problem)
        assert first_error(problem, text) is None
        assert is_complete(problem, text)
        equations = EQUATION.findall(text)
        assert all(holds(*e) for e in equations), text
        assert len(equations) == problem.level, (text, problem.level)
        assert extract_answer(text) == final_answer(problem)
        cut = rng.randrange(len(text))
        assert first_error(problem, text[:cut]) is None
        assert len(text.split("\n\n")) == len(permitted_steps(problem))


def check_errors() -> None:
    """A changed character is found where it stands, a wrong name and a wrong digit alike."""
    rng = random.Random(2)
    for problem in filter(lambda problem: problem.events, some_problems(300)):
        text = write_solution(rng, problem)
        place = rng.choice([m.start() for m in re.finditer(r"\d", text)])
        digit = str((int(text[place]) + rng.randint(1, 9)) % 10)
        assert first_error(problem, text[:place] + digit + text[place + 1 :]) == place
        wrong = rng.choice([n for n in NAMES if n not in problem.names])
        named = text.replace(problem.names[problem.events[0].holder], wrong, 1)
        found = first_error(problem, named)
        assert found is not None
        assert found < len(text)
        assert first_error(problem, text + "\n\n") == len(text)
        skipped = "".join(styles[0] for styles in permitted_steps(problem)[1:])
        assert first_error(problem, skipped) is not None


def check_words() -> None:
    """Held-out words are not drawn for training; other words keep structure and answer."""
    rng = random.Random(8)
    known = {*NAMES, *THINGS, *words.TRAINED.names, *words.TRAINED.things}
    assert not known & {*words.HELD_OUT.names, *words.HELD_OUT.things}
    for problem in some_problems(300):
        other = reworded(rng, problem, words.TRAINED)
        text = write_solution(rng, other)
        assert (other.key(), other.level) == (problem.key(), problem.level)
        assert is_complete(other, text)
        assert extract_answer(text) == final_answer(problem)
        assert not {*other.names, other.thing} & {*words.HELD_OUT.names, *words.HELD_OUT.things}
        assert len(set(other.names)) == len(problem.names)


def check_splits() -> None:
    """No problem of one split is in another, whatever it is called and how it is worded."""
    keys = {s: {p.key() for p in problem_set(s, n, 0)} for s, n in (("test", 500), ("dev", 100))}
    rng = random.Random(3)
    keys["train"] = {make_problem(rng, 2).key() for _ in range(20000)}
    assert not keys["test"] & keys["dev"]
    assert not (keys["test"] | keys["dev"]) & keys["train"]
    problem = problem_set("test", 1, 0)[0]
    renamed = replace(problem, names=tuple(reversed(NAMES))[: len(problem.names)], thing="pens")
    assert split_of(renamed) == "test"
    assert len({question_text(p) for p in problem_set("test", 500, 0)}) == 500


def check_tokens() -> None:
    """Encoding is lossless and stable, labels fall on the right token, lengths fit."""
    tokenizer = train(num=1000)
    rng = random.Random(4)
    for problem in some_problems(100):
        question, text = question_text(problem), write_solution(rng, problem)
        (path,) = encode_paths(tokenizer, [question], [text])
        assert tokenizer.decode(path.ids) == prompt_text(question) + text
        assert path.ids[: path.num_prompt] == tokenizer.encode(prompt_text(question))
        assert path.ids[path.num_prompt :] == tokenizer.encode(text)
        assert len(path.ids) < 512
        place = rng.choice([m.start() for m in re.finditer(r"\d", text)])
        cut, right = cut_at_error(path, place)
        assert len(cut.ends) == right + 1
        assert tokenizer.decode(cut.ids[-1:]).strip()[0] == text[place]
        for style in permitted_steps(problem)[0] if problem.events else ():
            assert tokenizer.decode(tokenizer.encode(style)[-1:]) == ".\n\n"


def check_sampler() -> None:
    """Cached, left-padded greedy decoding gives what one whole forward pass gives."""
    torch.manual_seed(0)
    model = Decoder(Shape(100, hidden_size=32, intermediate_size=64)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    prompts = [[1, 5, 9], [1, 7, 8, 20, 31], [1, 2]]
    options = {"stops": frozenset[int](), "pad": 0, "max_new": 8, "temperature": 0.0}
    outputs = sample(model, prompts, generator=torch.Generator(), **options)  # type: ignore[arg-type]
    for prompt, new in zip(prompts, outputs, strict=True):
        logits = model.logits(model(torch.tensor([prompt + new])))[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new


def check_drills() -> None:
    """Drilled equations are true and stay in range."""
    for question, result in drill(random.Random(5), 5000):
        found = EQUATION.fullmatch(question + result)
        assert found, question
        assert holds(*found.groups()), question + result
        assert 0 < int(result) <= 999, question + result


def check_ledger() -> None:
    """Ledgers: the right solution passes, a change is found where it is, encoding is lossless."""
    rng = random.Random(6)
    for length, announced in ((128, False), (128, True), (1000, False), (1000, True)):
        (problem,) = ledger.ledgers(length, 1, announced, 3)
        assert [problem] == ledger.ledgers(length, 1, announced, 3)
        text = ledger.solution_text(problem)
        verdict = ledger.judge(problem, text)
        assert (verdict.copied, verdict.looked_up, verdict.added, verdict.right_tokens) == (1,) * 4
        assert verdict.answered
        assert verdict.complete
        assert extract_answer(text) == ledger.answer(problem)
        written = [key for key, _ in problem.given] + [s.target for s in problem.statements]
        read = [s.operand for s in problem.statements]
        assert len(set(written)) == len(written)
        assert len(set(read)) == len(read)
        after = zip(problem.statements, read[1:], read[2:], strict=False)
        assert not any(each.target in later for each, *later in after)
        place = rng.choice([m.start() for m in re.finditer(r"(?<=[a-z])\d(?=\+)", text)])
        changed = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
        assert ledger.first_error(problem, changed) == place
        assert ledger.first_error(problem, text[:place]) is None
        num = len(problem.statements)
        found = ledger.judge(problem, changed)
        assert [round(num * each) for each in (found.copied, found.looked_up, found.added)] == [
            num, num - 1, num - 1,
        ]  # fmt: skip
        assert not found.complete


def check_ledger_tokens() -> None:
    """One token a piece, in the prompt as the chat template renders it and in the solution."""
    tokenizer = ledger.make_tokenizer(4096)
    names = ledger.vocabulary()
    assert len(set(names)) == len(names) == len(tokenizer)
    for announced in (False, True):
        (problem,) = ledger.ledgers(1000, 1, announced, 4)
        chat = [{"role": "user", "content": ledger.question_text(problem)}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = (
            tokenizer(rendered)["input_ids"] + tokenizer(ledger.solution_text(problem))["input_ids"]
        )
        pieces = [*ledger.prompt_pieces(problem), *ledger.solution_pieces(problem)[:-1]]
        assert [names[i] for i in ids] == [text for text, _ in pieces]
        assert len(ids) < 1000
        assert tokenizer.decode(ids) == "".join(text for text, _ in pieces)


def main() -> None:
    """Run every check."""
    for check in (
        check_solutions,
        check_errors,
        check_words,
        check_splits,
        check_tokens,
        check_sampler,
        check_drills,
        check_ledger,
        check_ledger_tokens,
    ):
        check()
        print(f"{check.__name__}: ok")


if __name__ == "__main__":
    main()
