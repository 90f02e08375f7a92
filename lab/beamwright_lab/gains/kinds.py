"""Problems of four kinds, written by seeded code, that small models solve sometimes.

words: arithmetic in one to three sentences. units: unit conversions. data: a sentence to write as a
JSON object. code: a short Python function. Right answers are computed. A kind has three levels, and
worked examples that stand before each question (`kinds.toml`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from beamwright.evaluate.problems import load_problems
from beamwright.io import read_toml_beside
from beamwright_lab.gains.formats import FUNCTIONS, OBJECTS, function_called, functions


@dataclass(frozen=True)
class Task:
    """A problem and its right answer.

    problem: the examples of its kind, then the question. gold: an answer in the answer format
    `answers` (`--answers`): a number, a JSON object, or the source of a function.
    """

    problem: str
    gold: str
    level: int
    answers: str = "math"


_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jonas")
_THINGS = ("apples", "books", "coins", "stickers", "pencils", "marbles", "cards", "shells")


def _words(rng: Random, level: int) -> Task:
    """One step with small numbers; one with larger ones; two steps."""
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    largest = (9, 30, 15)[level - 1]
    total = rng.randint(3, largest)
    text = f"{name} has {total} {thing}."
    for _ in range(1 if level < 3 else 2):
        if total < 3 or rng.random() < 1 / 2:
            change = rng.randint(2, largest)
            text += f" Then {name} buys {change} more."
        else:
            change = -rng.randint(1, total - 1)
            text += f" Then {name} gives away {-change}."
        total += change
    text += f" How many {thing} does {name} have now?"
    return Task(text, str(total), level)


_UNITS = (
    ("hours", "minutes", 60), ("days", "hours", 24), ("weeks", "days", 7),
    ("minutes", "seconds", 60), ("kilometers", "meters", 1000), ("meters", "centimeters", 100),
    ("kilograms", "grams", 1000), ("feet", "inches", 12), ("yards", "feet", 3),
    ("liters", "milliliters", 1000), ("years", "months", 12), ("dollars", "cents", 100),
)  # fmt: skip


def _units(rng: Random, level: int) -> Task:
    large, small, factor = rng.choice(_UNITS)
    count = rng.randint(2, 30 if level == 2 else 9)
    if level < 3:
        text = f"How many {small} are in {count} {large}?"
        return Task(text, str(count * factor), level)
    rest = rng.randint(1, factor - 1)
    text = f"How many {small} are {count} {large} and {rest} {small} together?"
    return Task(text, str(count * factor + rest), level)


_CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Paris", "Quito", "Dublin")
_JOBS = ("teacher", "nurse", "baker", "pilot", "farmer", "painter")
_PETS = ("cat", "dog", "parrot", "rabbit")


def _data(rng: Random, level: int) -> Task:
    name, age, city = rng.choice(_NAMES), rng.randint(18, 80), rng.choice(_CITIES)
    record: dict[str, object] = {"name": name, "age": age, "city": city}
    text = f"{name} is {age} years old and lives in {city}."
    if level == 2:
        record["job"] = job = rng.choice(_JOBS)
        text += f" {name} works as a {job}."
    if level == 3:
        pets = rng.sample(_PETS, 2)
        record["pets"] = pets
        text += f" {name} has a {pets[0]} and a {pets[1]}."
    types = {"age": "age is a number", "pets": "pets is a list of words"}
    about = "; ".join(types[key] for key in record if key in types)
    text += f"\nWrite this as one JSON object with the keys {', '.join(record)} ({about})."
    return Task(text, json.dumps(record, sort_keys=True), level, OBJECTS)


def _code(rng: Random, level: int) -> Task:
    name = rng.choice([name for name, row in functions().items() if row["level"] == level])
    row = functions()[name]
    text = f"Write {function_called(name)} that {row['does']}."
    return Task(text, f"{name} = {row['reference']}", level, FUNCTIONS)


KINDS: dict[str, Callable[[Random, int], Task]] = {
    "words": _words, "units": _units, "data": _data, "code": _code,
}  # fmt: skip
LEVELS = (1, 2, 3)
BUNDLED = "bundled"


def tasks_of(kind: str, count: int, seed: int = 0) -> Sequence[Task]:
    """Return `count` different problems of one kind; the levels take turns.

    "bundled" are the problems of `bundled:test`, the only ones that the bundled models know.

    Raises:
        ValueError: if the kind has too few different problems.
    """
    if kind == BUNDLED:
        given = load_problems("bundled:test", count).problems
        return [Task(each.problem, each.answer or "", 1) for each in given]
    rng, found = Random(f"{kind} {seed}"), dict[str, Task]()
    for attempt in range(100 * count):
        task = KINDS[kind](rng, LEVELS[attempt % len(LEVELS)])
        found.setdefault(task.problem, task)
        if len(found) == count:
            shots = read_toml_beside(__file__)[kind]
            asked = {question: f"{shots}\n\nQ: {question}\nA:" for question in found}
            return [replace(task, problem=asked[task.problem]) for task in found.values()]
    raise ValueError(f"{kind}: only {len(found)} different problems")
