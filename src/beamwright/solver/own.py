"""What a user gives a solver as objects: a strategy, a schedule, a verifier, stop rules.

Each is checked for what it has to have, and named in checkpoints by what it is; one that is
declared becomes a setting by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from beamwright.config import SearchSettings, Section, Settings
from beamwright.declare import STOPS, VERIFIERS, make_stops
from beamwright.errors import InputError
from beamwright.identity import identity_of
from beamwright.plugins import load_all
from beamwright.protocols import SchedulePolicy, Strategy, Verifier
from beamwright.registry import Table, TableRow
from beamwright.runtime.limits import StopFunction
from beamwright.saved.checkpoint import OWN
from beamwright.schedule import schedule_row
from beamwright.search import DEFAULT_SEARCH, STRATEGIES, SearchPolicy, make_strategy
from beamwright.search.defaults import with_defaults
from beamwright.verify import CallableVerifier, ObjectVerifier, declared_verifier
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
    """The user's own parts; None, or no stops, where settings say what to use.

    scorer: the verifier, or the declared one that the settings name. stops: those, too.
    """

    strategy: Strategy | None = None
    schedule: SchedulePolicy | None = None
    verifier: Verifier | None = None
    scorer: Verifier | None = None
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
        """The strategy, given what every strategy is given."""
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
    if settings is None:
        settings = Settings.build(**options)
    elif options.get("stop"):
        named = (*(settings.stop.stop or ()), *options["stop"])
        stopped = settings.stop.model_copy(update={"stop": named})
        settings = settings.model_copy(update={"stop": stopped})
    found = with_defaults(
        settings,
        own_scores=own.verifier is not None or own.strategy is not None,
        own_strategy=own.strategy is not None,
    )
    _check_meant(found, own)
    scorer = declared_verifier(found.model)
    stops = (*make_stops(found.stop), *own.stops)
    own = replace(own, scorer=own.verifier or scorer, stops=stops)
    return found, own.strategy_for(found.search) or make_strategy(found.search), own


def _check_meant(settings: Settings, own: OwnParts) -> None:
    """Raises InputError for an option that would do nothing, or an unknown schedule."""
    model, schedule = settings.model, settings.schedule
    kind = (model.verifier or "none").partition(":")[0]
    declared = model.verifier in VERIFIERS
    weightless = own.verifier is not None or kind in WITHOUT_MODEL or declared
    if model.verifier_weights != "auto" and weightless:
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
    schedule = options.get("schedule")
    if schedule is not None and not isinstance(schedule, str):
        _need(schedule, "schedule", "plan")
        options["schedule"] = "locality"
    else:
        schedule = None
    verifier = _verifier(options)
    return OwnParts(strategy, schedule, verifier, stops=_stops(options))


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
    """Takes the functions out; names stay, and those of what is declared."""
    stop: Any = options.get("stop")
    if isinstance(stop, str):
        stop = stop.split(",")
    given = () if stop is None else stop if isinstance(stop, Sequence) else (stop,)
    names, functions = [], []
    for each in given:
        declared = _declared(STOPS, each)
        if isinstance(each, str):
            names.append(each.strip())
        elif declared is not None and (declared.make is each or not declared.options):
            names.append(declared.name)
        elif callable(each):
            functions.append(each)
        else:
            raise InputError(f"stop: {type(each).__name__} is no function of a tree")
    options["stop"] = names or None
    return tuple(functions)


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
