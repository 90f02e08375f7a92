"""What a user gives a solver as objects: a strategy, a schedule, a verifier, stop rules.

Each is checked for what it has to have, and named in checkpoints by what it is (solver room).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.config import SearchSettings, Section, Settings
from beamwright.errors import InputError
from beamwright.identity import identity_of
from beamwright.plugins import load_all
from beamwright.protocols import SchedulePolicy, Strategy, Verifier
from beamwright.report.checkpoint import OWN
from beamwright.runtime.limits import StopFunction
from beamwright.schedule import schedule_row
from beamwright.search import DEFAULT_SEARCH, STRATEGIES, SearchPolicy, make_strategy
from beamwright.search.defaults import with_defaults
from beamwright.tree import Node
from beamwright.verify import CallableVerifier
from beamwright.verify.confidence import WITHOUT_MODEL

_GROUPING = ("planner", "balance")  # read by the locality schedule alone
IGNORED = {
    "in-gpu": (
        *_GROUPING, "inter_beam", "prefetch", "reuse", "evict", "link_bandwidth", "host_memory",
    ),
    "layerwise": _GROUPING,
}  # fmt: skip
"""Options that do nothing under a schedule: what is all on the device never leaves it."""

_BESIDE = ("stop", "plugins")  # go with whole settings, too


@dataclass(frozen=True)
class OwnParts:
    """The user's own parts; None, or no stops, where settings say what to use."""

    strategy: Strategy | None = None
    schedule: SchedulePolicy | None = None
    verifier: Verifier | None = None
    stops: tuple[StopFunction, ...] = ()

    def identities(self) -> dict[str, str]:
        """What a checkpoint keeps of those that decide the tree, by the option they stand for."""
        found = {"search": self.strategy, "verifier": self.verifier}
        owners = {
            option: getattr(part, "function", part)
            for option, part in found.items()
            if part is not None
        }
        return {option: f"{OWN}{identity_of(part)}" for option, part in owners.items()}

    def strategy_for(self, search: SearchSettings) -> Strategy | None:
        """The strategy, told what every strategy is told."""
        if isinstance(self.strategy, SearchPolicy):
            return type(self.strategy)(**{**dict(self.strategy), "search": search})
        return self.strategy


def settle(
    settings: Settings | None, options: dict[str, Any]
) -> tuple[Settings, Strategy, OwnParts]:
    """What a solver was called with, as whole settings, its strategy, and the user's own parts.

    options: flat options of the settings, `strategy`, `stop` and `plugins`.

    Raises:
        InputError: if they do not go together.
    """
    if settings is not None and not isinstance(settings, Settings):
        kind = type(settings).__name__
        raise InputError(f"options have names: Solver(model=...), not Solver({kind})")
    if settings is not None and any(v is not None for k, v in options.items() if k not in _BESIDE):
        raise InputError("give Solver either settings or options, not both")
    load_all(options.pop("plugins", ()))
    own = take_own(options)
    found = with_defaults(
        settings or Settings.build(**options),
        own_scores=own.verifier is not None or own.strategy is not None,
        own_strategy=own.strategy is not None,
    )
    _check_meant(found, own)
    return found, own.strategy_for(found.search) or make_strategy(found.search), own


def _check_meant(settings: Settings, own: OwnParts) -> None:
    """Raises InputError for an option that would do nothing, or an unknown schedule."""
    model, schedule = settings.model, settings.schedule
    kind = (model.verifier or "none").partition(":")[0]
    if model.verifier_weights != "auto" and (own.verifier is not None or kind in WITHOUT_MODEL):
        raise InputError(f"--verifier-weights: --verifier {model.verifier} has no weights")
    if settings.stop.stop_score is not None and own.verifier is None and kind == "none":
        raise InputError("--stop-score: with --verifier none there are no scores to reach it")
    schedule_row(schedule).policy(schedule)
    given = {**_given(schedule), **_given(settings.memory)}
    ignored, named = IGNORED.get(schedule.schedule, ()), f"--schedule {schedule.schedule}"
    if own.schedule is not None:
        ignored, named = _GROUPING, "a schedule of your own"
    for name in ignored:
        if name in given:
            raise InputError(f"{_written(name, given[name])}: does nothing with {named}")


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


def take_own(options: dict[str, Any]) -> OwnParts:
    """Take the objects out of a solver's options. What is declared becomes settings by its name.

    Raises:
        InputError: if one lacks what it has to have, or is given twice.
    """
    strategy = _strategy(options)
    schedule, verifier, stop = options.get("schedule"), options.get("verifier"), None
    if schedule is not None and not isinstance(schedule, str):
        _need(schedule, "schedule", "plan")
        options["schedule"] = "locality"
    else:
        schedule = None
    verifier = _verifier(options)
    stop = options.pop("stop", None)
    stops = () if stop is None else tuple(stop) if isinstance(stop, Sequence) else (stop,)
    for each in stops:
        if not callable(each):
            raise InputError(f"stop: {type(each).__name__} is no function of a tree")
    return OwnParts(strategy, schedule, verifier, stops)


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
    for row in STRATEGIES.values():
        if row.make is type(strategy):
            given = {name: getattr(strategy, name) for name in row.options}
            options.update({"search": row.name, **given})
            return None
    return strategy  # type: ignore[no-any-return]


def _verifier(options: dict[str, Any]) -> Verifier | None:
    verifier: Any = options.get("verifier")
    if callable(getattr(verifier, "score", None)):
        options["verifier"] = "none"
        return ObjectVerifier(verifier)
    if callable(verifier):
        options["verifier"] = "none"
        return CallableVerifier(verifier)
    return None


def _need(owner: Any, what: str, method: str) -> None:
    if not callable(getattr(owner, method, None)):
        raise InputError(f"{what}: {type(owner).__name__} has no method {method}")


class ObjectVerifier:
    """A verifier of the user's own, with the usual answers to what it does not say."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name = str(getattr(function, "name", type(function).__name__))
        self.default_aggregate: str = getattr(function, "default_aggregate", "last")
        self.probabilities = bool(getattr(function, "probabilities", False))
        self.token_stats: frozenset[str] = frozenset(getattr(function, "token_stats", ()))

    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """See `protocols.Verifier`.

        Raises:
            InputError: if it raises.
        """
        try:
            return list(self.function.score(nodes))
        except Exception as error:  # whatever a user's object raises
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(f"verifier {self.name}: it raised {line}") from error

    def release(self, nodes: Sequence[Node]) -> None:
        """See `protocols.Verifier`."""
        release: Callable[[Sequence[Node]], None] | None = getattr(self.function, "release", None)
        if release is not None:
            release(nodes)
