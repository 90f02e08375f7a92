"""Synthetic word problems: how they are made, written out, split and checked.

A problem is a few holders with a number of things each, some events that change the numbers, and
a question. Everything else - its text, its solutions, its split, the first wrong character of a
candidate solution - follows from that structure. `level` is the number of equations that a
solution works out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import words

MAX_VALUE = 999
HOLDERS = {1: (1.0,), 2: (0.6, 0.4), 3: (0.45, 0.4, 0.15)}  # how often 1, 2, 3 of at most that many
# fmt: off
NAMES = (
    "Tom", "Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Lea", "Tim", "Zoe", "Leo", "Ida", "Jack",
    "Rosa", "Omar", "Nina", "Paul", "Lily", "Hugo", "Emma",
)
THINGS = (
    "apples", "pears", "coins", "books", "cards", "shells", "stamps", "marbles", "pens", "eggs",
    "beads", "stones", "plums", "nuts", "stickers", "buttons",
)
# fmt: on
GAIN = ("buys {k} more {t}", "finds {k} {t}", "gets {k} {t}", "wins {k} {t}")
LOSE = ("loses {k} {t}", "sells {k} {t}", "gives away {k} {t}", "drops {k} {t}")
GAIN_PACKS = ("buys {a} bags of {b} {t}", "finds {a} boxes with {b} {t} each")
LOSE_PACKS = ("sells {a} bags of {b} {t}", "gives away {a} boxes with {b} {t} each")
SCALE = {2: "doubles the number of {t}", 3: "triples the number of {t}"}
HALF = ("loses half of the {t}", "sells half of the {t}")
TRANSFER = ("gives {k} {t} to {o}", "sells {k} {t} to {o}")
OPENERS = ("In {m} {c}.", "Then in {m} {c}.", "In {m} {c}.", "Later in {m} {c}.")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
SUBJECTS = ("one quantity", "two quantities", "three quantities")
LAST_WORDS = "The answer is \\boxed{{{0}}}."


@dataclass(frozen=True)
class Event:
    """One change: `kind` on `holder`, with operands `a` and `b`; `other` receives a transfer.

    `verb` below 4 is one of the shipped sets' verbs, from 4 on one of `words`.
    """

    kind: str
    holder: int
    other: int
    a: int
    b: int
    verb: int
    opener: int


@dataclass(frozen=True)
class Problem:
    """The structure of a problem; `asked` is single, together or difference.

    `months` has one for each event (0 is January); `phrasing` from 4 on is one of `words`.
    """

    names: tuple[str, ...]
    thing: str
    start: tuple[int, ...]
    events: tuple[Event, ...]
    asked: str
    about: tuple[int, int]
    phrasing: int
    months: tuple[int, ...]

    @property
    def level(self) -> int:
        """Number of equations that a solution works out."""
        return sum(num_equations(event.kind) for event in self.events) + self.final_equations

    @property
    def final_equations(self) -> int:
        """Number of equations in the last step."""
        return {"single": 0, "together": len(self.start) - 1, "difference": 1}[self.asked]

    def key(self) -> str:
        """Structure and numbers without names and wording: what decides the split."""
        events = [(e.kind, e.holder, e.other, e.a, e.b) for e in self.events]
        return repr((self.start, events, self.asked, self.about))


def num_equations(kind: str) -> int:
    """Number of equations that an event of this kind needs."""
    return 2 if kind in ("gain_packs", "lose_packs", "transfer") else 1


def split_of(problem: Problem) -> str:
    """The split that a problem belongs to, from a hash of its structure: no overlap possible."""
    bucket = int.from_bytes(hashlib.sha256(problem.key().encode()).digest()[:4], "big") % 100
    return {0: "test", 1: "test", 2: "dev"}.get(bucket, "train")


# --- making problems ---------------------------------------------------------------------------


def _operand(rng: random.Random, high: int) -> int:
    """A number from 2 to `high`, small ones more often than a uniform draw would have them."""
    if rng.random() < 0.25:
        high = min(high, 19)
    return rng.randint(2, max(2, high))


def _event(rng: random.Random, values: list[int], room: int) -> Event | None:
    """One possible event on `values` with at most `room` equations, or None if the draw fails."""
    kinds = ["gain"] * 4 + ["lose"] * 4 + ["scale", "half"]
    kinds += ["gain_packs", "lose_packs"] if room >= 2 else []
    kinds += ["transfer"] * 3 if room >= 2 and len(values) > 1 else []
    kind = rng.choice(kinds)
    holder = rng.randrange(len(values))
    value, other, a, b = values[holder], holder, 0, 0
    if kind == "gain":
        a = _operand(rng, 99)
    elif kind in ("lose", "transfer"):
        a = _operand(rng, min(99, value - 1))
    elif kind in ("gain_packs", "lose_packs"):
        a, b = rng.randint(2, 9), rng.randint(2, 9)
    elif kind == "scale":
        a = rng.choice((2, 2, 3))
    elif value % 2:
        return None
    if kind == "transfer":
        other = rng.choice([i for i in range(len(values)) if i != holder])
    event = Event(kind, holder, other, a, b, rng.randrange(4), rng.randrange(len(OPENERS)))
    after = apply(event, values)
    return event if all(1 <= v <= MAX_VALUE for v in after) and a != 1 else None


def apply(event: Event, values: list[int]) -> list[int]:
    """The quantities after an event."""
    after = list(values)
    change = {
        "gain": event.a,
        "lose": -event.a,
        "transfer": -event.a,
        "gain_packs": event.a * event.b,
        "lose_packs": -event.a * event.b,
    }
    if event.kind == "scale":
        after[event.holder] *= event.a
    elif event.kind == "half":
        after[event.holder] //= 2
    else:
        after[event.holder] += change[event.kind]
    if event.kind == "transfer":
        after[event.other] += event.a
    return after


def _draw(rng: random.Random, level: int, most: int) -> Problem | None:
    """One attempt at a problem of this level."""
    num = rng.choices(range(1, most + 1), HOLDERS[most])[0]
    asked = "single" if num == 1 else rng.choice(("single", "together", "difference"))
    names = tuple(rng.sample(NAMES, num))
    start = tuple(_operand(rng, rng.choice((99, 199))) for _ in range(num))
    i, j = rng.sample(range(num), 2) if num > 1 else (0, 0)
    about = {"single": (i, i), "together": (0, 0), "difference": (i, j)}[asked]
    problem = Problem(names, rng.choice(THINGS), start, (), asked, about, rng.randrange(4), ())
    room = level - problem.final_equations
    values, events = list(start), []
    while room > 0:
        event = _event(rng, values, room)
        if event is None:
            continue
        events.append(event)
        values = apply(event, values)
        room -= num_equations(event.kind)
    if room:
        return None
    if asked == "together" and sum(values) > MAX_VALUE:
        return None
    if asked == "difference" and values[about[0]] <= values[about[1]]:
        return None
    first = rng.randint(0, len(MONTHS) - len(events))
    months = tuple(range(first, first + len(events)))
    return replace(problem, events=tuple(events), months=months)


def make_problem(
    rng: random.Random, level: int, split: str = "train", most_holders: int = 1
) -> Problem:
    """A random problem with `level` equations from one split."""
    while True:
        problem = _draw(rng, level, most_holders)
        if problem is not None and split_of(problem) == split:
            return problem


def reworded(rng: random.Random, problem: Problem, vocabulary: words.Words) -> Problem:
    """The same structure with other names, things, verbs, months and phrases."""
    names: list[str] = []
    while len(names) < len(problem.names):
        name = words.draw_name(rng, vocabulary)
        names += [name] if name not in names else []
    months = problem.months
    if months and rng.random() < 0.5:
        months = tuple(sorted(rng.sample(range(12), len(months))))
    events = tuple(
        event if rng.random() < 0.4 else replace(event, verb=rng.randrange(4, 1000))
        for event in problem.events
    )
    return replace(
        problem,
        names=tuple(names),
        thing=words.draw_thing(rng, vocabulary),
        events=events,
        months=months,
        phrasing=problem.phrasing if rng.random() < 0.4 else rng.randrange(4, 1000),
    )


# --- writing them out --------------------------------------------------------------------------


def clause(problem: Problem, event: Event) -> str:
    """What happens in an event, as `Tom buys 12 more apples`."""
    scale = (SCALE.get(event.a, ""),)
    shipped, more = {
        "gain": (GAIN, words.GAIN),
        "lose": (LOSE, words.LOSE),
        "gain_packs": (GAIN_PACKS, words.GAIN_PACKS),
        "lose_packs": (LOSE_PACKS, words.LOSE_PACKS),
        "scale": (scale, scale),
        "half": (HALF, words.HALF),
        "transfer": (TRANSFER, TRANSFER),
    }[event.kind]
    table = shipped if event.verb < 4 else more
    phrase = table[event.verb % len(table)]
    other = problem.names[event.other]
    return f"{problem.names[event.holder]} " + phrase.format(
        k=event.a, a=event.a, b=event.b, t=problem.thing, o=other
    )


def question_text(problem: Problem) -> str:
    """The whole problem as a person reads it."""
    names, thing, start = problem.names, problem.thing, problem.start
    plain, single = problem.phrasing < 4, "How many {t} does {n} have now?"
    if not plain:
        single = words.ASKED[problem.phrasing // 4 % len(words.ASKED)]
        phrase = words.INTROS[problem.phrasing % len(words.INTROS)]
        intro = [phrase.format(n=n, v=v, t=thing) for n, v in zip(names, start, strict=True)]
    elif problem.phrasing % 2 and len(names) > 1:
        parts = [f"{n} has {v} {thing}" for n, v in zip(names, start, strict=True)]
        intro = [", ".join(parts[:-1]) + " and " + parts[-1] + "."]
    else:
        verb = "has" if problem.phrasing < 2 else "starts with"
        intro = [f"{n} {verb} {v} {thing}." for n, v in zip(names, start, strict=True)]
    told = [
        OPENERS[event.opener].format(m=MONTHS[problem.months[i]], c=clause(problem, event))
        for i, event in enumerate(problem.events)
    ]
    first, second = (names[i] for i in problem.about)
    asked = {
        "single": single.format(t=thing, n=first),
        "together": f"How many {thing} do they have together?",
        "difference": f"How many more {thing} does {first} have than {second}?",
    }[problem.asked]
    return " ".join([*intro, *told, asked])


def _event_styles(problem: Problem, index: int, values: list[int]) -> list[str]:
    """The permitted ways to write an event's step: terse, plain and wordy."""
    event, month = problem.events[index], MONTHS[problem.months[index]]
    after, thing = apply(event, values), problem.thing
    name, other = problem.names[event.holder], problem.names[event.other]
    old, new = values[event.holder], after[event.holder]
    told, before = clause(problem, event), ""
    if event.kind.endswith("_packs"):
        count = event.a * event.b
        sign = "+" if event.kind == "gain_packs" else "-"
        before, equation = f"{event.a}*{event.b}={count}", f"{old}{sign}{count}={new}"
    else:
        sign = {"gain": "+", "lose": "-", "transfer": "-", "scale": "*", "half": "/"}[event.kind]
        equation = f"{old}{sign}{event.a or 2}={new}"
    if event.kind == "transfer":
        second = f"{values[event.other]}+{event.a}={after[event.other]}"
        return [
            f"{month}: {name} {equation}, {other} {second}.",
            f"In {month} {name} has {equation} and {other} has {second} {thing}.",
            f"In {month} {told}, so {name} has {equation} and {other} has {second} {thing}.",
        ]
    lead = f"{before}, " if before else ""
    return [
        f"{month}: {lead}{name} {equation}.",
        f"In {month} {lead}{name} has {equation} {thing}.",
        f"In {month} {told}, {lead}so {name} has {equation} {thing}.",
    ]


def _last_styles(problem: Problem, values: list[int]) -> list[str]:
    """The permitted ways to write the last step."""
    thing, (i, j) = problem.thing, problem.about
    answer = answer_of(problem, values)
    last = LAST_WORDS.format(answer)
    if problem.asked == "single":
        return [last, f"So {problem.names[i]} has {answer} {thing}. {last}"]
    if problem.asked == "difference":
        equation = f"{values[i]}-{values[j]}={answer}"
        first, second = problem.names[i], problem.names[j]
        wordy = f"So {first} has {equation} more {thing} than {second}. {last}"
        return [f"The difference is {equation}. {last}", wordy]
    total, equations = values[0], []
    for value in values[1:]:
        equations.append(f"{total}+{value}={total + value}")
        total += value
    joined = ", ".join(equations)
    return [f"Together {joined}. {last}", f"So they have {joined} {thing} together. {last}"]


def answer_of(problem: Problem, values: list[int]) -> int:
    """The answer, given the final quantities."""
    i, j = problem.about
    if problem.asked == "together":
        return sum(values)
    return values[i] if problem.asked == "single" else values[i] - values[j]


def permitted_steps(problem: Problem) -> list[list[str]]:
    """For each step, every text that counts as right, with its closing blank line."""
    values, steps = list(problem.start), []
    for index, event in enumerate(problem.events):
        steps.append([s + "\n\n" for s in _event_styles(problem, index, values)])
        values = apply(event, values)
    return [*steps, _last_styles(problem, values)]


def final_answer(problem: Problem) -> str:
    """The answer as text."""
    values = list(problem.start)
    for event in problem.events:
        values = apply(event, values)
    return str(answer_of(problem, values))


def write_solution(rng: random.Random, problem: Problem) -> str:
    """One right solution, each step in a style drawn at random."""
    return "".join(rng.choice(styles) for styles in permitted_steps(problem))


# --- checking ----------------------------------------------------------------------------------


def common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


def first_error(problem: Problem, text: str) -> int | None:
    """Index of the first character that no right solution has there; None if all are right.

    A text that stops early is right as far as it goes. A name or thing copied wrongly is an error
    of the process, whatever becomes of the answer.
    """
    position = 0
    for styles in permitted_steps(problem):
        rest = text[position:]
        whole = [s for s in styles if rest.startswith(s)]
        if whole:
            position += len(max(whole, key=len))
            continue
        matched = max(common_prefix(rest, s) for s in styles)
        return None if matched == len(rest) else position + matched
    return None if position == len(text) else position


def is_complete(problem: Problem, text: str) -> bool:
    """Whether a text is one whole right solution."""
    last = LAST_WORDS.format(final_answer(problem))
    return first_error(problem, text) is None and text.endswith(last)


def extract_answer(text: str) -> str | None:
    """The content of the last box, or None."""
    start = text.rfind("\\boxed{")
    end = text.find("}", start)
    return text[start + 7 : end] if start >= 0 and end >= 0 else None


# --- drills ------------------------------------------------------------------------------------


def drill(rng: random.Random, num: int) -> list[tuple[str, str]]:
    """Independent equations as (question, result with its end) pairs."""
    return [_drill(rng) for _ in range(num)]


def _drill(rng: random.Random) -> tuple[str, str]:
    kind = rng.choice("++++-----*23/")
    high = rng.choice((99, 199, 199, 399, MAX_VALUE))
    value = rng.randint(1, high - 1)
    if kind == "*":
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        return f"{a}*{b}=", f"{a * b}"
    if kind in "23":
        value = rng.randint(1, min(high, MAX_VALUE // int(kind)))
        return f"{value}*{kind}=", f"{value * int(kind)}"
    if kind == "/":
        return f"{2 * (value // 2 + 1)}/2=", f"{value // 2 + 1}"
    operand = _operand(rng, 99) if rng.random() < 0.8 else rng.randint(1, high - 1)
    low, top = sorted((value, operand))
    if kind == "-":
        return f"{top + 1}-{low}=", f"{top + 1 - low}"
    if value + operand > MAX_VALUE:
        value = rng.randint(1, MAX_VALUE - operand)
    return f"{value}+{operand}=", f"{value + operand}"


# --- problem sets ------------------------------------------------------------------------------


def problem_set(split: str, num: int, seed: int, low: int = 2, high: int = 8) -> list[Problem]:
    """`num` different problems of a split, levels taking turns from `low` to `high`."""
    rng = random.Random(f"{split}-{seed}")
    found: dict[str, Problem] = {}
    while len(found) < num:
        level = low + len(found) % (high - low + 1)
        problem = make_problem(rng, level, split)
        found.setdefault(problem.key(), problem)
    return list(found.values())


def as_rows(split: str, problems: list[Problem], seed: int) -> Iterator[dict[str, str | int]]:
    """Problems as rows with MATH-500's field names."""
    rng = random.Random(f"rows-{split}-{seed}")
    for index, problem in enumerate(problems):
        yield {
            "problem": question_text(problem),
            "solution": write_solution(rng, problem),
            "answer": final_answer(problem),
            "subject": SUBJECTS[len(problem.start) - 1],
            "level": problem.level,
            "unique_id": f"{split}/{index:04d}",
        }


def typed_set(num_events: tuple[int, ...], unseen: bool, num: int, seed: int) -> list[Problem]:
    """Problems of the test split as a person types them; `unseen` puts held-out words in.

    Those without an event have a number and nothing else: there are too few to keep any apart.
    """
    rng = random.Random(f"typed-{num_events}-{seed}")
    found: dict[str, Problem] = {}
    while len(found) < num:
        wanted = num_events[len(found) % len(num_events)]
        level = min(8, wanted + rng.randrange(3) * (wanted > 1))
        problem = make_problem(rng, level, "test" if wanted else "train")
        if len(problem.events) == wanted:
            found.setdefault(problem.key(), problem)
    if not unseen:
        return list(found.values())
    return [
        replace(
            problem,
            names=(words.draw_name(rng, words.HELD_OUT),),
            thing=words.draw_thing(rng, words.HELD_OUT),
        )
        for problem in found.values()
    ]


def write_typed(folder: Path, seed: int) -> None:
    """Six sets of 40: none or one event, two, six; in shipped words and in held-out ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, num_events in (("easy", (0, 1)), ("two", (2,)), ("six", (6,))):
        for unseen in (False, True):
            problems = typed_set(num_events, unseen, 40, seed)
            rows = as_rows("test", problems, seed)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            file = folder / f"{name}-{'unseen' if unseen else 'known'}.jsonl"
            file.write_text(text, encoding="utf-8")


def main() -> None:
    """Write test.jsonl and dev.jsonl, or the sets of problems that people type."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--typed", action="store_true", help="six sets of 40 instead")
    args = parser.parse_args()
    if args.typed:
        return write_typed(args.out, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    keys: set[str] = set()
    for split, num in (("test", 500), ("dev", 100)):
        problems = problem_set(split, num, args.seed)
        new = {problem.key() for problem in problems}
        assert len(new) == num
        assert not new & keys
        assert all(split_of(problem) == split for problem in problems)
        keys |= new
        rows = as_rows(split, problems, args.seed)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (args.out / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
