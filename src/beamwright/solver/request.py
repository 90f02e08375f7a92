"""What a problem is solved with: settings, and parts that are the user's own; read and checked.

A part is an object in the place of a name: a strategy, a schedule, a verifier, stop rules. Each is
checked for what it has to have, and named in checkpoints by what it is; one that is declared
becomes a setting by its name. Knows no models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from beamwright.config import Settings, option_owners
from beamwright.declare import VERIFIERS, load_all
from beamwright.engine.decisions import StopFunction, StopRule, check_stops
from beamwright.engine.prompts import Prompts
from beamwright.engine.row import Decoding
from beamwright.engine.sampling import stats_read_by
from beamwright.errors import InputError
from beamwright.identity import identity_of
from beamwright.protocols import SchedulePolicy, Strategy, Verifier
from beamwright.registry import Table, TableRow
from beamwright.saved.checkpoint import OWN
from beamwright.schedule import schedule_row
from beamwright.search import DEFAULT_SEARCH, STRATEGIES, SearchPolicy, make_strategy
from beamwright.search.defaults import with_defaults
from beamwright.sections import SearchSettings, Section
from beamwright.solver.options import SHARED, ProblemOptions
from beamwright.tree import Conversation, RawPrompt
from beamwright.verify.scorers import WITHOUT_MODEL, CallableVerifier, ObjectVerifier

GivenProblem = str | tuple[str | int, str] | tuple[str | int, str, ProblemOptions]
"""A problem's text, or its id and its text, or these and options of its own."""

_GROUPING = ("planner", "balance")  # read by the locality schedule alone
IGNORED = {
    "in-gpu": (
        *_GROUPING, "inter_beam", "prefetch", "reuse", "evict", "victims", "link_bandwidth",
        "host_memory",
    ),
    "layerwise": _GROUPING,
    "prefix": (*_GROUPING, "inter_beam"),
}  # fmt: skip
"""Options that do nothing under a schedule: what is all on the device never leaves it."""

IN_ROUNDS = ("roofline", "offload")  # of --split: KV leaves the device between rounds
_BESIDE = ("stop", "plugins")  # go with whole settings, too


@dataclass(frozen=True)
class UserParts:
    """The user's own parts; None, or no stops, where settings say what to use."""

    strategy: Strategy | None = None
    schedule: SchedulePolicy | None = None
    verifier: Verifier | None = None
    stops: tuple[StopFunction, ...] = ()

    def identities(self) -> dict[str, str]:
        """What a checkpoint keeps of those that decide the tree, by the option they stand for."""
        parts = {"search": self.strategy, "verifier": self.verifier}
        return {
            option: f"{OWN}{identity_of(getattr(part, 'function', part))}"
            for option, part in parts.items()
            if part is not None
        }

    def strategy_for(self, search: SearchSettings) -> Strategy:
        """The user's strategy, given what every strategy is given, or that of the settings."""
        if isinstance(self.strategy, SearchPolicy):
            return type(self.strategy)(**{**dict(self.strategy), "search": search})
        return self.strategy or make_strategy(search)


@dataclass(frozen=True)
class ProblemSettings:
    """What one problem is solved with: whole settings, the strategy, what may stop it, own parts.

    given: as they were written; settings: with nothing left open.
    """

    given: Settings
    settings: Settings
    strategy: Strategy
    stops: tuple[StopFunction, ...]
    parts: UserParts

    @classmethod
    def of(cls, given: Settings, parts: UserParts) -> ProblemSettings:
        """Raises InputError if they do not go together."""
        settings = with_defaults(
            given,
            own_scores=parts.verifier is not None or parts.strategy is not None,
            own_strategy=parts.strategy is not None,
        )
        _check_meant(settings, parts)
        check_stops(settings.stop, settings.search)
        return cls(given, settings, parts.strategy_for(settings.search), parts.stops, parts)

    @classmethod
    def of_call(cls, settings: Settings | None, options: dict[str, Any]) -> ProblemSettings:
        """What a solver was called with.

        options: flat options of the settings, `strategy`, `stop` and `plugins`.

        Raises:
            InputError: if they do not go together.
        """
        if settings is not None and not isinstance(settings, Settings):
            kind = type(settings).__name__
            raise InputError(f"options have names: Solver(model=...), not Solver({kind})")
        beside = any(value is not None for name, value in options.items() if name not in _BESIDE)
        if settings is not None and beside:
            raise InputError("give Solver either settings or options, not both")
        load_all(options.pop("plugins", ()))
        parts = take_parts(options)
        if settings is None:
            settings = Settings.build(**options)
        return cls.of(settings, parts)

    def settled(self, settings: Settings) -> ProblemSettings:
        """With what `auto` stands for here."""
        given = self.given.model_copy(update={"model": settings.model})
        return replace(self, given=given, settings=settings)

    def changed(self, options: Mapping[str, Any]) -> ProblemSettings:
        """What a problem with options of its own is solved with, beside others with these.

        Raises:
            InputError: for an option that all problems of a solver share, or that is bad.
        """
        options = {name: value for name, value in options.items() if value is not None}
        if not options:
            return self
        for name in options:
            if option_owners().get(name) in SHARED:
                raise InputError(
                    f"{name}: is the same for all problems of a Solver; make another one"
                )
        parts, mine = self.parts, take_parts(options)
        if options.get("search") is not None or mine.strategy is not None:
            parts = replace(parts, strategy=mine.strategy)
        if mine.stops:
            parts = replace(parts, stops=mine.stops)
        new = ProblemSettings.of(self.given.changed(**options), parts)
        shared = {section: getattr(self.settings, section) for section in SHARED}
        return replace(new, settings=new.settings.model_copy(update=shared))

    def check_served(
        self, prompts: Prompts, *, probabilities: bool, kept: frozenset[str], whose: str
    ) -> None:
        """See that engines that are loaded can serve it.

        probabilities: every score of their verifier is one. kept: statistics that they keep of
        every token; whose: who does, and what to do about it.

        Raises:
            InputError: if they cannot.
        """
        search = self.settings.search
        check_stops(self.settings.stop, search, probabilities=probabilities)
        prompts.check_turns(self.strategy)
        missing = stats_read_by(self.strategy) - kept
        if missing:
            raise InputError(
                f"search {search.search}: reads {', '.join(sorted(missing))} of every token, "
                f"which {whose}"
            )

    @property
    def decoding(self) -> Decoding:
        """How its tokens are drawn and where its steps end."""
        return Decoding(self.settings.sampling, self.settings.step, self.settings.search.seed)

    def rule(self) -> StopRule:
        """What may stop the search early."""
        return StopRule(self.settings.stop, self.settings.search, self.stops)


# --- options that do not go together -----------------------------------------------------------


def _check_meant(settings: Settings, parts: UserParts) -> None:
    """Raises InputError for an option that would do nothing, or an unknown schedule."""
    schedule = settings.schedule
    _check_models(settings, parts)
    row = schedule_row(schedule)
    row.policy(schedule)
    given = {**_given(schedule), **_given(settings.memory)}
    ignored, named = IGNORED.get(schedule.schedule, ()), f"--schedule {schedule.schedule}"
    if parts.schedule is not None:
        ignored, named = _GROUPING, "a schedule of your own"
    if settings.sparse.sparse_home == "host":  # then no schedule keeps KV on the device
        ignored = ()
    if given.get("split") in IN_ROUNDS and (row.resident or row.streams_layers):
        raise InputError(f"--split {given['split']}: does nothing with {named}")
    for name in ignored:
        if name in given:
            raise InputError(f"{_written(name, given[name])}: does nothing with {named}")


def _check_models(settings: Settings, parts: UserParts) -> None:
    """The same for options of a generator or a verifier that is not of their kind."""
    model = settings.model
    kind = (model.verifier or "none").partition(":")[0]
    split = settings.memory.split if "split" in settings.memory.model_fields_set else None
    of_verifiers = {
        "verifier_weights": None if model.verifier_weights == "auto" else model.verifier_weights,
        "verifier_device": model.verifier_device,
        "split": split,
    }
    if parts.verifier is not None or kind in WITHOUT_MODEL or model.verifier in VERIFIERS:
        for name, value in of_verifiers.items():
            if value is not None:
                raise InputError(
                    f"{_written(name, value)}: --verifier {model.verifier} has no model"
                )
    if split is not None and model.verifier_device is not None:
        raise InputError(f"{_written('split', split)}: does nothing with --verifier-device")
    for name in ("tokenizer", "model_key"):
        value = getattr(model, name)
        if value is not None and not model.model.startswith("openai:"):
            raise InputError(f"{_written(name, value)}: does nothing without --model openai:...")


def _given(section: Section) -> dict[str, Any]:
    """The options that somebody has set, be it to their default."""
    values = {name: getattr(section, name) for name in section.model_fields_set}
    return {name: value for name, value in values.items() if value is not None}


def _written(name: str, value: Any) -> str:
    """An option as it stands on a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


# --- objects in the place of names -------------------------------------------------------------


def take_parts(options: dict[str, Any]) -> UserParts:
    """Take the objects out of a solver's options. What is declared becomes settings by its name.

    Raises:
        InputError: if one lacks what it has to have, or is given twice.
    """
    strategy = _strategy(options)
    schedule = options.get("schedule")
    if schedule is not None and not isinstance(schedule, str):
        _need(schedule, "schedule", "plan")
        options["schedule"] = "locality"
    else:
        schedule = None
    verifier = _verifier(options)
    return UserParts(strategy, schedule, verifier, stops=_stops(options))


def _strategy(options: dict[str, Any]) -> Strategy | None:
    strategy: Any = options.pop("strategy", None)
    if strategy is None:
        return None
    if options.get("search") is not None:
        raise InputError("give Solver either strategy= (an object) or search= (a name)")
    options["search"] = DEFAULT_SEARCH
    if isinstance(strategy, type):
        strategy = strategy()
    _need(strategy, "strategy", "select")
    declared = _declared(STRATEGIES, strategy)
    if declared is None:
        return strategy  # type: ignore[no-any-return]
    options.update({"search": declared.name, **_options_of(declared, strategy)})
    return None


def _verifier(options: dict[str, Any]) -> Verifier | None:
    verifier: Any = options.get("verifier")
    declared = _declared(VERIFIERS, verifier)
    if declared is not None:
        options.update({"verifier": declared.name, **_options_of(declared, verifier)})
        return None
    if callable(getattr(verifier, "score", None)):
        options["verifier"] = "none"
        return ObjectVerifier(verifier)
    if callable(verifier):
        options["verifier"] = "none"
        return CallableVerifier(verifier)
    return None


def _stops(options: dict[str, Any]) -> tuple[StopFunction, ...]:
    stop: Any = options.pop("stop", None)
    stops = () if stop is None else tuple(stop) if isinstance(stop, Sequence) else (stop,)
    for function in stops:
        if not callable(function):
            raise InputError(f"stop: {type(function).__name__} is no function of a tree")
    return stops


def _declared(table: Table[Any], part: Any) -> TableRow | None:
    """The declaration over this function or class, or over the class of a strategy or the like."""
    for row in table.values():
        if row.make is part or (row.make is type(part) and isinstance(part, Section)):
            return row  # type: ignore[no-any-return]
    return None


def _options_of(row: TableRow, part: Any) -> dict[str, Any]:
    """The options that an instance has."""
    return {} if row.make is part else {name: getattr(part, name) for name in row.options}


def _need(owner: Any, what: str, method: str) -> None:
    if not callable(getattr(owner, method, None)):
        raise InputError(f"{what}: {type(owner).__name__} has no method {method}")


# --- problems ----------------------------------------------------------------------------------


class BatchProblem(NamedTuple):
    """One of several problems: who it is, and what it is asked with but for its priority."""

    problem_id: str | int
    text: str
    options: dict[str, Any]
    priority: int


def batch_problems(
    problems: Iterable[GivenProblem], common: Mapping[str, Any]
) -> list[BatchProblem]:
    """What several problems are asked with; the id of a plain text is its place, from 0.

    common: options of all of them, before which those of one go.

    Raises:
        InputError: if it is one text, or holds something else than texts and such tuples.
    """
    if isinstance(problems, str) or not isinstance(problems, Iterable):
        kind = type(problems).__name__
        raise InputError(f"solve_many takes a list of problems, not {kind}; one goes to solve")
    batch = []
    for place, problem in enumerate(problems):
        problem_id, text, own_options = _with_id(place, problem)
        options = {**common, **own_options}
        batch.append(BatchProblem(problem_id, text, options, take_priority(options)))
    return batch


def _with_id(place: int, problem: Any) -> tuple[str | int, str, Mapping[str, Any]]:
    match problem:
        case str():
            return place, problem, {}
        case (str() | int() as problem_id, str() as text):
            return problem_id, text, {}
        case (str() | int() as problem_id, str() as text, dict() as options):
            return problem_id, text, options
        case _:
            kind = type(problem).__name__
            raise InputError(
                f"problem {place}: give a text or an (id, text) pair, with options or without, "
                f"not {kind}"
            )


def take_priority(options: dict[str, Any]) -> int:
    """Takes it out of the options; 0 where it is not given.

    Raises:
        InputError: if it is no int.
    """
    priority = options.pop("priority", None)
    if type(priority) is not int and priority is not None:
        raise InputError(f"priority: is an int, not {type(priority).__name__}")
    return priority or 0


def check_problem(problem: Any, problem_id: Any) -> None:
    """Raises InputError if they are not a text and an id."""
    if not isinstance(problem, str | Conversation | RawPrompt):
        raise InputError(f"a problem is one text, not {type(problem).__name__}")
    if not isinstance(problem_id, str | int):
        raise InputError(f"problem_id is a str or an int, not {type(problem_id).__name__}")


def check_callback(on_round: Callable[..., None] | None) -> None:
    """Raises InputError if it cannot be called."""
    if on_round is not None and not callable(on_round):
        raise InputError(f"on_round is called after every round; {on_round!r} cannot be called")


def as_path(value: str | os.PathLike[str], name: str) -> Path:
    """Raises InputError if `value`, an argument of this name, is no path."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{name}: a path is a str or a Path, not {type(value).__name__}")
    return Path(value)
