"""Read and check the arguments of a call to `Solver`, and make requests of them.

A user may pass a strategy, a verifier or stop functions as objects instead of names. An object is
checked for the methods that it needs, and checkpoints record its identity. A class that a plugin
declared is replaced by its name in the settings. A request is a problem that waits or runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

from beamwright.config import Settings, option_sections, section_fields
from beamwright.counters import Counters
from beamwright.declare import VERIFIERS, load_plugins
from beamwright.engine.decisions import StopFunction, check_stops
from beamwright.engine.row import DecodingSettings
from beamwright.engine.tree_run import TreeRun
from beamwright.errors import InputError
from beamwright.models.load import LoadedModel
from beamwright.protocols import RoundCallback, Strategy, Verifier
from beamwright.registry import Table, flag_of
from beamwright.saved.checkpoint import OBJECT_PREFIX, CheckpointWriter, tree_settings
from beamwright.saved.identity import identity_of
from beamwright.schedule import ScheduleEntry, schedule_entry
from beamwright.schedule.declare import GROUPING_OPTIONS
from beamwright.search import DEFAULT_SEARCH, STRATEGIES, SearchPolicy, make_strategy
from beamwright.search.defaults import with_defaults
from beamwright.search.synthesis import Synthesis
from beamwright.sections import Reduction, SearchSettings, Section, SparseSettings, StopSettings
from beamwright.solver.options import SHARED, ProblemOptions
from beamwright.sparse.rule import parse_method
from beamwright.tree import Conversation, Problem, RawPrompt, SearchTree, Sees
from beamwright.verify.scorers import WITHOUT_MODEL, CallableVerifier, ObjectVerifier

if TYPE_CHECKING:
    from beamwright.remote.generator import RemoteGenerator

# A problem's text, or its id and text, or its id, text and own options.
GivenProblem = str | tuple[str | int, str] | tuple[str | int, str, ProblemOptions]


class ScoreOptions(TypedDict, total=False):
    """Options of a call that scores given steps.

    delimiter: text that is appended to each step of a path except the last, unless the step ends
        with this text. None: the solver's own delimiter; "": steps stay unchanged.
    aggregate, deadline, priority: the same as for a problem.
    """

    delimiter: str | None
    aggregate: Reduction | None
    deadline: str | float | None
    priority: int


# A time of `time.perf_counter`, and copies of all counters at this time (`Machinery.counted`).
Mark = tuple[float, Mapping[str, Counters]]

# Options about the generator's KV and computation, without effect on a remote generator.
_NOT_REMOTE = (
    "weights", "top_logprobs", "split", "schedule", *GROUPING_OPTIONS, "inter_beam", "prefetch",
    "reuse", "evict", "link_bandwidth", "batching", "speculation", "verify_ahead", "write_back",
    "graphs", "sparse", "drafts",
)  # fmt: skip

_BESIDE = ("stop", "plugins")  # options that may accompany a Settings object


@dataclass(frozen=True)
class UserParts:
    """Objects that the user passed instead of names. None, or no stops: the settings decide."""

    strategy: Strategy | None = None
    verifier: Verifier | None = None
    stops: tuple[StopFunction, ...] = ()

    def identities(self) -> dict[str, str]:
        """Return the identities of the objects that the tree depends on, for checkpoints."""
        parts = {"search": self.strategy, "verifier": self.verifier}
        return {
            option: f"{OBJECT_PREFIX}{identity_of(getattr(part, 'function', part))}"
            for option, part in parts.items()
            if part is not None
        }

    def strategy_for(self, search: SearchSettings) -> Strategy:
        """Return the user's strategy with these settings, or else the one that `search` names."""
        if isinstance(self.strategy, SearchPolicy):
            strategy: Strategy = type(self.strategy)(**{**dict(self.strategy), "search": search})
        else:
            strategy = self.strategy or make_strategy(search)
        return Synthesis(strategy, search) if search.choose == "synthesis" else strategy


@dataclass(frozen=True)
class ProblemSettings:
    """Settings, strategy and user objects with which one problem is solved.

    given: the settings as the user wrote them.
    settings: `given` with concrete values in place of defaults and `auto`.
    """

    given: Settings
    settings: Settings
    strategy: Strategy
    parts: UserParts

    @classmethod
    def of(cls, given: Settings, parts: UserParts) -> ProblemSettings:
        """Fill in defaults and the strategy; raise InputError if settings and objects conflict."""
        settings = with_defaults(
            given,
            own_scores=parts.verifier is not None or parts.strategy is not None,
            own_strategy=parts.strategy is not None,
        )
        check_options_used(settings, parts)
        check_stops(settings.stop, settings.search)
        return cls(given, settings, parts.strategy_for(settings.search), parts)

    @classmethod
    def of_call(cls, settings: Settings | None, options: dict[str, Any]) -> ProblemSettings:
        """Return the problem settings for the arguments of a call to `Solver`.

        options: flat options of the settings, `strategy`, `stop` and `plugins`.

        Raises:
            InputError: if two arguments contradict each other.
        """
        expect(settings, Settings | None, "Solver takes options by name, as in Solver(model=...)")
        beside = any(value is not None for name, value in options.items() if name not in _BESIDE)
        if settings is not None and beside:
            raise InputError("give Solver either settings or options, not both")
        load_plugins(options.pop("plugins", ()))
        parts = take_parts(options)
        if settings is None:
            settings = Settings.build(**options)
        return cls.of(settings, parts)

    def with_settings(self, settings: Settings) -> ProblemSettings:
        """Return a copy with the machinery's `settings`, in which `auto` is replaced."""
        given = self.given.model_copy(update={"model": settings.model})
        return replace(self, given=given, settings=settings)

    def changed(self, options: Mapping[str, Any]) -> ProblemSettings:
        """Return a copy in which a problem's own options replace the solver's.

        Raises:
            InputError: for a bad option, or an option that all problems of a solver share.
        """
        options = {name: value for name, value in options.items() if value is not None}
        if not options:
            return self
        for name in options:
            if option_sections().get(name) in SHARED:
                raise InputError(
                    f"{name}: is fixed for all problems of a Solver. Create another Solver"
                )
        parts, mine = self.parts, take_parts(options)
        if options.get("search") is not None or mine.strategy is not None:
            parts = replace(parts, strategy=mine.strategy)
        if mine.stops:
            parts = replace(parts, stops=mine.stops)
        new = ProblemSettings.of(self.given.changed(**options), parts)
        shared = {section: getattr(self.settings, section) for section in SHARED}
        return replace(new, settings=new.settings.model_copy(update=shared))

    def for_given_paths(
        self, num: int, most_steps: int, options: Mapping[str, Any]
    ) -> ProblemSettings:
        """Return the settings with which `num` given paths are scored.

        No path competes with another. No stop except a deadline ends the search.

        options: `aggregate` and `deadline`.

        Raises:
            InputError: for a bad option.
        """
        asked = self.changed(options).settings
        paths = {"search": "best-of-n", "n": num, "width": 1, "max_rounds": most_steps}
        every = {"verify_every": 1, "choose": "best"}  # independent of the strategy
        own = {name: getattr(asked.search, name) for name in SearchSettings.model_fields}
        search = SearchSettings(**{**own, **paths, **every})
        stop = StopSettings(deadline=asked.stop.deadline if options.get("deadline") else None)
        settings = asked.model_copy(update={"search": search, "stop": stop})
        parts = replace(self.parts, strategy=None, stops=())
        return ProblemSettings(self.given, settings, make_strategy(search), parts)

    def with_time(
        self, models: Iterable[LoadedModel | RemoteGenerator | None], now: str | None = None
    ) -> ProblemSettings:
        """Return a copy with a fixed time for chat templates, if a template of `models` reads it.

        A later rendering then gives the same text. The time is the setting `step.now` if given,
        else the argument `now`, else the current time.
        """
        codecs = (None if model is None else model.codec for model in models)
        settings = self.settings
        if settings.step.now or not any(codec and codec.reads_time for codec in codecs):
            return self
        now = now or datetime.now().isoformat(timespec="seconds")
        step = settings.step.model_copy(update={"now": now})
        return replace(self, settings=settings.model_copy(update={"step": step}))

    def decoding(self, sees: Sees) -> DecodingSettings:
        """Return the sampling and step settings for the engine.

        If the verifier scores answers only, a whole thought is one step, unless `--thought-steps`
        is set.
        """
        step = self.settings.step
        if step.thought_steps == "auto" and sees == "answer":
            step = step.model_copy(update={"thought_steps": "whole"})
        return DecodingSettings(self.settings.sampling, step, self.settings.search.seed)

    def tree_settings(self, dtype: str) -> dict[str, Any]:
        """Return the settings that the tree depends on.

        dtype: the generator's dtype.
        """
        return tree_settings(self.settings, dtype, self.parts.identities())


@dataclass(eq=False)
class Request:
    """One problem in the solver's queue or in flight."""

    make_tree: Callable[[], SearchTree]  # called again if the search is restarted alone
    problem: ProblemSettings
    asked: Problem | int  # the problem, or the number of tokens of a synthetic prompt
    on_round: RoundCallback | None = None
    save: CheckpointWriter | None = None  # writes the search's checkpoints; None: none are written
    # Called before the search begins, to restore a checkpoint or to insert the steps to score.
    prepare: Callable[[TreeRun], None] | None = None
    draws: bool = True  # False for a request that samples no steps, and therefore needs no slots
    priority: int = 0  # requests with a larger priority are admitted and decoded first
    # Time from which the deadline counts, on `time.perf_counter`; None: when the search begins.
    submitted_s: float | None = None
    begun: bool = False  # True once the search has begun
    cancelled: bool = False  # True to end the search; set by any thread
    ran_with_others: bool = False  # True if other searches were in flight at the same time
    since: Mark = (0.0, {})  # time and counters at the last admission of this request

    @property
    def waited_s(self) -> float:
        """Seconds in the queue that count against the deadline, at most the deadline.

        So a search that waited longer still has the executor's grace period to score some steps.
        """
        deadline_s = self.problem.settings.stop.deadline
        if self.submitted_s is None or deadline_s is None:
            return 0.0
        return min(deadline_s, time.perf_counter() - self.submitted_s)


def check_options_used(settings: Settings, parts: UserParts) -> None:
    """Check that every given option has an effect, and that the schedule is known.

    An option with its default value counts as not given.

    Raises:
        InputError: for an option without an effect, or an unknown schedule.
    """
    entry = schedule_entry(settings.schedule)
    entry.make_policy(settings.schedule)
    given = {
        name: value
        for section, fields in section_fields().items()
        for name, field in fields.items()
        if (value := getattr(getattr(settings, section), name)) != field.default
    }
    for why, names in _unused_options(settings, parts, entry).items():
        for name in (name for name in names if name in given):
            written = f"{flag_of(name)} {given[name]}"
            if isinstance(given[name], bool):
                written = flag_of(name if given[name] else f"no_{name}")
            raise InputError(f"{written} has no effect with {why}")


def _unused_options(
    settings: Settings, parts: UserParts, entry: ScheduleEntry
) -> dict[str, tuple[str, ...]]:
    """Return the options that have no effect, grouped by the reason, as text."""
    model, ignored = settings.model, entry.unused_options
    # with `--sparse-home host`, no schedule keeps KV on the device
    if settings.sparse.sparse_home == "host":
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
        unread = ("sparse_correct",) if parse_method(sparse).query == "own" else ()
    return {
        f"--schedule {settings.schedule.schedule}": ignored,
        f"--sparse {sparse}": unread,
        f"--verifier {model.verifier}, which has no model": needs_model if modelless else (),
        "--verifier none": ("verify_every",) if kind == "none" and not own else (),
        "--executor plain": ("verifiers",) if settings.schedule.executor == "plain" else (),
        f"--model {model.model}, whose KV is on a server": _NOT_REMOTE if elsewhere else (),
        "a --model that is not openai:...": () if elsewhere else ("tokenizer", "model_key"),
    }


# --- objects in the place of names -------------------------------------------------------------


def take_parts(options: dict[str, Any]) -> UserParts:
    """Remove the user's objects from the options, and return these objects.

    A class or function that a plugin declared is replaced by the setting that names it.

    Raises:
        InputError: if an object lacks a method, or if a part is given twice.
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
            raise InputError(f"stop: must be a function of a tree, not {type(function).__name__}")
    return UserParts(strategy, verifier, stops)


def _take_strategy(options: dict[str, Any]) -> Strategy | None:
    """Remove the strategy from the options; return it, or None if a setting replaces it.

    Raises:
        InputError: if the strategy has no method `select`, or if `search` is given, too.
    """
    strategy: Any = options.pop("strategy", None)
    if strategy is None:
        return None
    if options.get("search") is not None:
        raise InputError("give Solver either strategy= (an object) or search= (a name), not both")
    options["search"] = DEFAULT_SEARCH
    if isinstance(strategy, type):
        strategy = strategy()
    if not callable(getattr(strategy, "select", None)):
        raise InputError(f"strategy: {type(strategy).__name__} has no method select")
    return None if _name_declared(STRATEGIES, "search", strategy, options) else strategy


def _name_declared(table: Table[Any], option: str, part: Any, options: dict[str, Any]) -> bool:
    """If `part` is declared in `table`, set its name and options in `options` and return True."""
    for row in table.values():
        # A declared function or class, or an instance of a declared class.
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
    """Return the id, the text and the own options of each problem (`GivenProblem`).

    A plain text's id is its index, from 0.

    Raises:
        InputError: if `problems` is one text, or an entry has another form.
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
                    f"problem {place}: must be a text, (id, text) or (id, text, options), "
                    f"not {type(problem).__name__}"
                )
    return batch


def read_paths(paths: Any, delimiter: str) -> list[list[str]]:
    """Return the given paths as lists of step texts that end with the delimiter, except the last.

    delimiter: text to append to steps that do not end with it.

    Raises:
        InputError: if `paths` is not a list of lists of texts, or if a list is empty.
    """
    expect(delimiter, str, "delimiter: must be a text")
    expect(paths, Sequence, "paths: must be a list of paths")
    if not paths:
        raise InputError("paths: the list is empty")
    checked = []
    for number, path in enumerate(paths):
        if not isinstance(path, Sequence) or isinstance(path, str) or not path:
            raise InputError(f"path {number}: must be a list of at least one step")
        for step in path:
            expect(step, str, f"path {number}: a step must be a text")
        checked.append([step + delimiter * (not step.endswith(delimiter)) for step in path[:-1]])
        checked[-1].append(path[-1])
    return checked


def take_priority(options: dict[str, Any]) -> int:
    """Remove the priority from the options, and return it; 0 if it is not given.

    Raises:
        InputError: if it is not an int.
    """
    priority = options.pop("priority", None) or 0
    if type(priority) is not int:
        raise InputError(f"priority: must be an int, not {type(priority).__name__}")
    return priority


def check_problem(problem: Any, problem_id: Any, on_round: Any) -> None:
    """Raise InputError unless the arguments are a problem, an id, and a function or None."""
    expect(problem, str | Conversation | RawPrompt, "a problem must be a text")
    expect(problem_id, str | int, "problem_id must be a str or an int")
    expect(on_round, Callable | None, "on_round must be a function")


def expect(value: Any, kind: Any, words: str) -> None:
    """Raise InputError with a message that begins with `words` if `value` is not a `kind`."""
    if not isinstance(value, kind):
        raise InputError(f"{words}, not {type(value).__name__}")
