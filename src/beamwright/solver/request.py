"""What a problem is solved with: settings, and parts that are the user's own; read and checked.

A part is an object in the place of a name: a strategy, a verifier, stop rules. Each is
checked for what it has to have, and named in checkpoints by what it is; one that is declared
becomes a setting by its name. A request is a problem on its way. Knows no models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

from beamwright.config import Settings, option_owners, section_fields
from beamwright.counters import Counters
from beamwright.declare import VERIFIERS, load_all
from beamwright.engine.decisions import StopFunction, check_stops
from beamwright.engine.row import Decoding
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import InputError
from beamwright.models.load import LoadedModel
from beamwright.protocols import RoundCallback, Strategy, Verifier
from beamwright.registry import Table, flag_of
from beamwright.saved.checkpoint import OWN, CheckpointWriter, tree_settings
from beamwright.saved.identity import identity_of
from beamwright.schedule import ScheduleRow, schedule_row
from beamwright.schedule.declare import GROUPING
from beamwright.search import DEFAULT_SEARCH, STRATEGIES, SearchPolicy, make_strategy
from beamwright.search.defaults import with_defaults
from beamwright.sections import Reduction, SearchSettings, Section, SparseSettings, StopSettings
from beamwright.solver.options import SHARED, ProblemOptions
from beamwright.sparse.rule import method_of
from beamwright.tree import Conversation, Problem, RawPrompt, SearchTree, Sees
from beamwright.verify.scorers import WITHOUT_MODEL, CallableVerifier, ObjectVerifier

if TYPE_CHECKING:
    from beamwright.remote.generator import RemoteGenerator

GivenProblem = str | tuple[str | int, str] | tuple[str | int, str, ProblemOptions]
"""A problem's text, or its id and its text, or these and options of its own."""


class ScoreOptions(TypedDict, total=False):
    """Of steps that are given.

    delimiter: ends every step of a path but its last, where it does not stand there; None for the
    solver's own, "" to leave steps as they are. aggregate, deadline, priority: as of a problem.
    """

    delimiter: str | None
    aggregate: Reduction | None
    deadline: str | float | None
    priority: int


Mark = tuple[float, Mapping[str, Counters]]
"""A moment, and all counters at it, see `Machinery.counted`."""

_NOT_REMOTE = (
    "weights", "top_logprobs", "split", "schedule", *GROUPING, "inter_beam", "prefetch", "reuse",
    "evict", "link_bandwidth", "batching", "speculation", "verify_ahead", "write_back",
    "graphs", "sparse", "drafts",
)  # fmt: skip
"""Options that are of the generator's KV, or of what it computes."""

_BESIDE = ("stop", "plugins")  # go with whole settings, too


@dataclass(frozen=True)
class UserParts:
    """The user's own parts; None, or no stops, where settings say what to use."""

    strategy: Strategy | None = None
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
    """What one problem is solved with: whole settings, the strategy, the user's own parts.

    given: as they were written; settings: with nothing left open.
    """

    given: Settings
    settings: Settings
    strategy: Strategy
    parts: UserParts

    @classmethod
    def of(cls, given: Settings, parts: UserParts) -> ProblemSettings:
        """Raises InputError if they do not go together."""
        settings = with_defaults(
            given,
            own_scores=parts.verifier is not None or parts.strategy is not None,
            own_strategy=parts.strategy is not None,
        )
        check_meant(settings, parts)
        check_stops(settings.stop, settings.search)
        return cls(given, settings, parts.strategy_for(settings.search), parts)

    @classmethod
    def of_call(cls, settings: Settings | None, options: dict[str, Any]) -> ProblemSettings:
        """What a solver was called with.

        options: flat options of the settings, `strategy`, `stop` and `plugins`.

        Raises:
            InputError: if they do not go together.
        """
        expect(settings, Settings | None, "options have names: Solver(model=...)")
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

    def of_given(self, num: int, most_steps: int, options: Mapping[str, Any]) -> ProblemSettings:
        """What so many paths that are written already are scored with: none competes, no stop but
        a deadline ends them.

        options: aggregate and deadline. Raises InputError for a bad one.
        """
        asked = self.changed(options).settings
        paths = {"search": "best-of-n", "n": num, "width": 1, "max_rounds": most_steps}
        every = {"verify_every": 1, "choose": "best"}  # of no strategy's
        own = {name: getattr(asked.search, name) for name in SearchSettings.model_fields}
        search = SearchSettings(**{**own, **paths, **every})
        stop = StopSettings(deadline=asked.stop.deadline if options.get("deadline") else None)
        settings = asked.model_copy(update={"search": search, "stop": stop})
        parts = replace(self.parts, strategy=None, stops=())
        return ProblemSettings(self.given, settings, make_strategy(search), parts)

    def dated(
        self, models: Iterable[LoadedModel | RemoteGenerator | None], now: str | None = None
    ) -> ProblemSettings:
        """With the time that chat templates see, where one of them reads it: what is asked, `now`,
        or that of this moment, so that no later render looks at the clock."""
        codecs = (None if model is None else model.codec for model in models)
        settings = self.settings
        if settings.step.now or not any(codec and codec.reads_time for codec in codecs):
            return self
        now = now or datetime.now().isoformat(timespec="seconds")
        step = settings.step.model_copy(update={"now": now})
        return replace(self, settings=settings.model_copy(update={"step": step}))

    def decoding(self, sees: Sees) -> Decoding:
        """How its tokens are drawn and where its steps end: a thought is one, unless it is said how
        it is cut, or the verifier sees it."""
        step = self.settings.step
        if step.thought_steps == "auto" and sees == "answer":
            step = step.model_copy(update={"thought_steps": "whole"})
        return Decoding(self.settings.sampling, step, self.settings.search.seed)

    def decisive(self, dtype: str) -> dict[str, Any]:
        """What the tree depends on. dtype: the generator's."""
        return tree_settings(self.settings, dtype, self.parts.identities())


@dataclass(eq=False)
class Request:
    """One problem on its way.

    make_tree: called once more where the tree did not fit beside others. asked: what the problem
    is, or the tokens of a synthetic prompt.
    save: writes its checkpoints. prepare: gives a run what there is already: rounds of an earlier
    process, or the steps of given paths. draws: it takes rows; one that does not needs no place.
    priority: a larger one goes first. submitted_s: on `time.perf_counter`: what its deadline counts
    from; None: from where its search starts.
    begun: it is, or was, in flight. cancelled: is to be given up; set by any thread.
    had_company: others were in flight beside it. since: when it was admitted last.
    """

    make_tree: Callable[[], SearchTree]
    problem: ProblemSettings
    asked: Problem | int
    on_round: RoundCallback | None = None
    save: CheckpointWriter | None = None
    prepare: Callable[[TreeRun], None] | None = None
    draws: bool = True
    priority: int = 0
    submitted_s: float | None = None
    begun: bool = False
    cancelled: bool = False
    had_company: bool = False
    since: Mark = (0.0, {})

    @property
    def waited_s(self) -> float:
        """Seconds that its deadline counts so far; no more than all of them, so that scores still
        have the time that an executor gives them."""
        deadline_s = self.problem.settings.stop.deadline
        if self.submitted_s is None or deadline_s is None:
            return 0.0
        return min(deadline_s, time.perf_counter() - self.submitted_s)


def check_meant(settings: Settings, parts: UserParts) -> None:
    """Raises InputError for an option that would do nothing, or an unknown schedule.

    One that has its default counts as not given.
    """
    row = schedule_row(settings.schedule)
    row.policy(settings.schedule)
    given = {
        name: value
        for section, fields in section_fields().items()
        for name, field in fields.items()
        if (value := getattr(getattr(settings, section), name)) != field.default
    }
    for why, names in _idle(settings, parts, row).items():
        for name in (name for name in names if name in given):
            written = f"{flag_of(name)} {given[name]}"
            if isinstance(given[name], bool):
                written = flag_of(name if given[name] else f"no_{name}")
            raise InputError(f"{written}: does nothing with {why}")


def _idle(settings: Settings, parts: UserParts, row: ScheduleRow) -> dict[str, tuple[str, ...]]:
    """Options that do nothing, by what they do nothing with."""
    model, ignored = settings.model, row.idle
    if settings.sparse.sparse_home == "host":  # then no schedule keeps KV on the device
        ignored = ()
    kind = (model.verifier or "none").partition(":")[0]
    own = parts.verifier is not None
    modelless = own or kind in WITHOUT_MODEL or model.verifier in VERIFIERS
    elsewhere, sparse = model.runs_elsewhere, settings.sparse.sparse
    needs_model = ("verifier_weights", "split", "verifiers")
    unread: tuple[str, ...] = tuple(SparseSettings.model_fields)
    if sparse == "auto":
        unread = ("sparse_correct", "sparse_home")
    elif sparse != "off":
        unread = ("sparse_correct",) if method_of(sparse).query == "own" else ()
    return {
        f"--schedule {settings.schedule.schedule}": ignored,
        f"--sparse {sparse}": unread,
        f"--verifier {model.verifier}, which has no model": needs_model if modelless else (),
        "--verifier none": ("verify_every",) if kind == "none" and not own else (),
        "--executor plain": ("verifiers",) if settings.schedule.executor == "plain" else (),
        f"--model {model.model}, whose KV is not here": _NOT_REMOTE if elsewhere else (),
        "a --model that is not openai:...": () if elsewhere else ("tokenizer", "model_key"),
    }


# --- objects in the place of names -------------------------------------------------------------


def take_parts(options: dict[str, Any]) -> UserParts:
    """Takes the user's own parts out of a solver's options. What is declared becomes settings by
    its name.

    Raises:
        InputError: if one lacks what it has to have, or is given twice.
    """
    strategy, stop = _take_strategy(options), options.pop("stop", None)
    given: Any = options.get("verifier")
    verifier: Verifier | None = None
    if not _name_declared(VERIFIERS, "verifier", given, options):
        if callable(getattr(given, "score", None)):
            verifier = ObjectVerifier(given)
        elif callable(given):
            verifier = CallableVerifier(given)
        if verifier is not None:
            options["verifier"] = "none"
    stops = () if stop is None else tuple(stop) if isinstance(stop, Sequence) else (stop,)
    for function in stops:
        if not callable(function):
            raise InputError(f"stop: {type(function).__name__} is no function of a tree")
    return UserParts(strategy, verifier, stops)


def _take_strategy(options: dict[str, Any]) -> Strategy | None:
    strategy: Any = options.pop("strategy", None)
    if strategy is None:
        return None
    if options.get("search") is not None:
        raise InputError("give Solver either strategy= (an object) or search= (a name)")
    options["search"] = DEFAULT_SEARCH
    if isinstance(strategy, type):
        strategy = strategy()
    if not callable(getattr(strategy, "select", None)):
        raise InputError(f"strategy: {type(strategy).__name__} has no method select")
    return None if _name_declared(STRATEGIES, "search", strategy, options) else strategy


def _name_declared(table: Table[Any], option: str, part: Any, options: dict[str, Any]) -> bool:
    """Put the name and the options of a declared part into the options; False for another one."""
    for row in table.values():
        # A function or class that is declared, or an instance of a strategy or the like.
        if row.make is part:
            options[option] = row.name
            return True
        if row.make is type(part) and isinstance(part, Section):
            options.update(
                {option: row.name}, **{name: getattr(part, name) for name in row.options}
            )
            return True
    return False


# --- problems ----------------------------------------------------------------------------------


def read_problems(problems: Iterable[GivenProblem]) -> list[tuple[str | int, str, dict[str, Any]]]:
    """Ids, texts and own options of several problems; the id of a plain text is its place, from 0.

    Raises:
        InputError: if it is one text, or holds something else than texts and such tuples.
    """
    if isinstance(problems, str) or not isinstance(problems, Iterable):
        raise InputError(f"solve_many takes a list of problems, not {type(problems).__name__}")
    batch: list[tuple[str | int, str, dict[str, Any]]] = []
    for place, problem in enumerate(problems):
        match problem:
            case str():
                batch.append((place, problem, {}))
            case (str() | int() as problem_id, str() as text):
                batch.append((problem_id, text, {}))
            case (str() | int() as problem_id, str() as text, dict() as options):
                batch.append((problem_id, text, options))
            case _:
                raise InputError(
                    f"problem {place}: give a text or an (id, text) pair, with options or without, "
                    f"not {type(problem).__name__}"
                )
    return batch


def read_paths(paths: Any, delimiter: str) -> list[list[str]]:
    """Given paths, each a list of its steps' texts. delimiter: see `ScoreOptions`.

    Raises:
        InputError: if these are no such lists, or one is empty.
    """
    expect(delimiter, str, "delimiter: is a text")
    expect(paths, Sequence, "paths: a list of paths")
    if not paths:
        raise InputError("paths: there are none")
    found = []
    for number, path in enumerate(paths):
        if not isinstance(path, Sequence) or isinstance(path, str) or not path:
            raise InputError(f"path {number}: a path is a list of steps, one at least")
        for step in path:
            expect(step, str, f"path {number}: a step is a text")
        found.append([step + delimiter * (not step.endswith(delimiter)) for step in path[:-1]])
        found[-1].append(path[-1])
    return found


def take_priority(options: dict[str, Any]) -> int:
    """Takes it out of the options; 0 where it is not given.

    Raises:
        InputError: if it is no int.
    """
    priority = options.pop("priority", None) or 0
    if type(priority) is not int:
        raise InputError(f"priority: is an int, not {type(priority).__name__}")
    return priority


def check_problem(problem: Any, problem_id: Any, on_round: Any) -> None:
    """Raises InputError if they are not a text, an id, and a function or None."""
    expect(problem, str | Conversation | RawPrompt, "a problem is one text")
    expect(problem_id, str | int, "problem_id is a str or an int")
    expect(on_round, Callable | None, "on_round is a function that is called after every round")


def expect(value: Any, kind: Any, words: str) -> None:
    """Raises InputError with these words if it is of another kind."""
    if not isinstance(value, kind):
        raise InputError(f"{words}, not {type(value).__name__}")
