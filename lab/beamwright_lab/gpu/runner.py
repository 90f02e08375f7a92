"""Runs stages as processes inside one time budget, and keeps every row that they find.

A stage is a command that gets `--seconds`, how long it may take. Everything is kept in one file of
JSON lines that only grows (`Journal`), so whatever ends a stage, or this very process - a crash,
the time limit, SIGKILL - what was measured by then is there, and another run goes on from it.
Knows processes, clocks and files; no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

OK, FAILED, CRASHED, TIMED_OUT, NO_TIME = "ok", "failed", "crashed", "timed out", "no time left"
KILLED, SKIPPED = "killed", "skipped"
_LOG_TAIL = 400
_SET_DEATH_SIGNAL = 1  # prctl's


class Journal:
    """A file of JSON lines, each of one stage: that it begins, a part of its data, or its end.

    A part is a value by name, or one row of a list of that name; a later line replaces an earlier
    one. Lines are appended whole; one that was cut off is no line.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def begin(self, stage: str, facts: Mapping[str, Any], *, goes_on: bool) -> None:
        """goes_on: what the stage has found before still counts."""
        self._add({"stage": stage, "begin": dict(facts), "goes_on": goes_on})

    def part(self, stage: str, name: str, value: Any, row: int | None = None) -> None:
        """row: its number, where the value is a row of a list."""
        where = {} if row is None else {"row": row}
        self._add({"stage": stage, "part": name, **where, "value": value})

    def save(self, stage: str, data: Mapping[str, Any], old: Mapping[str, Any]) -> None:
        """Whatever of the data is not in `old`: rows that are new or have changed, and values."""
        for name, value in data.items():
            known = old.get(name)
            if value == known:
                continue
            if not isinstance(value, list) or len(value) < len(known or []):
                self.part(stage, name, value)
                continue
            for row, each in enumerate(value):
                if known is None or row >= len(known) or each != known[row]:
                    self.part(stage, name, each, row)

    def end(self, stage: str, facts: Mapping[str, Any]) -> None:
        """facts: at least a `status`."""
        self._add({"stage": stage, "end": dict(facts)})

    def results(self) -> dict[str, dict[str, Any]]:
        """By stage: facts of its begin and end, and its data; without an end it was killed."""
        found: dict[str, dict[str, Any]] = {}
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        for line in text.splitlines():
            with suppress(ValueError, KeyError, TypeError):
                _read(json.loads(line), found)
        return found

    def _add(self, line: Mapping[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab+") as stream:
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                torn = stream.read(1) != b"\n"
                stream.write(b"\n" * torn)
            stream.write(json.dumps(line).encode() + b"\n")


def _read(line: Mapping[str, Any], found: dict[str, dict[str, Any]]) -> None:
    stage = line["stage"]
    old = found.setdefault(stage, {"stage": stage, "status": KILLED, "error": None, "data": {}})
    if "begin" in line:
        data = old["data"] if line["goes_on"] else {}
        found[stage] = {"stage": stage, "status": KILLED, "error": None, "data": data}
        found[stage] |= line["begin"]
    elif "end" in line:
        old |= line["end"]
    elif "row" in line:
        rows = old["data"].setdefault(line["part"], [])
        rows[line["row"] :] = [line["value"], *rows[line["row"] + 1 :]]
    else:
        old["data"][line["part"]] = line["value"]


@dataclass(frozen=True)
class Stage:
    """One command.

    budget_s: its share of the whole run. least_s: with less it is not worth starting.
    reads: stages whose results it uses; it runs again when one of them has.
    missing: what it needs and is not here; it is not started then.
    """

    name: str
    command: tuple[str, ...]
    budget_s: float
    least_s: float = 5.0
    reads: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    key: what results depend on; a finished stage with an equal key is not run again, unless its
        data name something under `not_run`. facts: what else is known of this run.
    only: names of the stages to look at; empty means all. again: run these whatever is there.
    grace: a stage is stopped at its time times this, plus `grace_s`. after: called behind each.
    """

    journal: Journal
    log: Path
    key: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    budget_s: float = 500.0
    only: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()
    grace: float = 1.25
    grace_s: float = 15.0
    environment: Mapping[str, str] = field(default_factory=dict)
    after: Callable[[], None] = lambda: None


def run_stages(
    stages: Sequence[Stage], plan: Plan, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Run what is missing, in order of value; results by stage, old ones included.

    The time left is shared among the stages to come by their budgets; what one leaves over goes
    to those behind it, and what does not fit at all is not started.
    """
    end_s = time.monotonic() + plan.budget_s
    chosen = [stage for stage in stages if not plan.only or stage.name in plan.only]
    found: dict[str, dict[str, Any]] = {}
    for place, stage in enumerate(chosen):
        results = plan.journal.results()
        old, key = results.get(stage.name), _key(stage, plan, results)
        if _is_kept(stage, plan, results):
            assert old is not None
            say(f"{stage.name}: kept, measured {old['date']}")
            found[stage.name] = old
            continue
        if stage.missing:
            say(f"{stage.name}: {SKIPPED}, {stage.missing}")
            found[stage.name] = _unfinished(stage, SKIPPED, stage.missing)
            continue
        later = [s for s in chosen[place + 1 :] if not s.missing and not _is_kept(s, plan, results)]
        left_s = end_s - time.monotonic()
        given_s = _given_s(stage, later, left_s)
        if given_s is None:
            say(f"{stage.name}: {NO_TIME} ({max(0.0, left_s):.0f} s)")
            found[stage.name] = old or _unfinished(stage, NO_TIME, None)
            continue
        say(f"{stage.name}: {given_s:.0f} s of {left_s:.0f} s left")
        goes_on = old is not None and old.get("key") == key and stage.name not in plan.again
        facts = {"key": key, **plan.facts, "given_s": round(given_s, 1)}
        plan.journal.begin(stage.name, {**facts, "date": _now()}, goes_on=goes_on)
        ended = _run(stage, plan, given_s, _limit_s(plan, later, given_s, left_s))
        plan.journal.end(stage.name, ended)
        found[stage.name] = plan.journal.results()[stage.name]
        say(f"{stage.name}: {_line(found[stage.name])}")
        plan.after()
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M")


def _unfinished(stage: Stage, status: str, error: str | None) -> dict[str, Any]:
    return {"stage": stage.name, "status": status, "error": error, "data": {}}


# --- what is kept ----------------------------------------------------------------------------


def _key(stage: Stage, plan: Plan, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {**plan.key, "reads": {s: results.get(s, {}).get("finished") for s in stage.reads}}


def _is_kept(stage: Stage, plan: Plan, results: Mapping[str, Mapping[str, Any]]) -> bool:
    old = results.get(stage.name)
    if old is None or stage.name in plan.again or old["data"].get("not_run"):
        return False
    return bool(old["status"] == OK and old.get("key") == _key(stage, plan, results))


def _given_s(stage: Stage, later: Sequence[Stage], left_s: float) -> float | None:
    """The stage's share of the time left, at least what it needs; None if that is not there."""
    share = stage.budget_s / (stage.budget_s + sum(each.budget_s for each in later))
    given_s = max(stage.least_s, left_s * share)
    return None if given_s > left_s else given_s


def _limit_s(plan: Plan, later: Sequence[Stage], given_s: float, left_s: float) -> float:
    """When a stage is stopped: some time after its own, but not in what later ones need."""
    wanted_s = given_s * plan.grace + plan.grace_s
    reserved_s = sum(stage.least_s for stage in later)
    return min(left_s, max(given_s, min(wanted_s, left_s - reserved_s)))


# --- one stage -------------------------------------------------------------------------------


def _run(stage: Stage, plan: Plan, given_s: float, limit_s: float) -> dict[str, Any]:
    command = [*stage.command, "--seconds", f"{given_s:.1f}"]
    start_s = time.monotonic()
    log_start = plan.log.stat().st_size if plan.log.exists() else 0
    status, code = _wait(command, plan.log, limit_s, plan.environment)
    error = None
    if status != OK:
        data = plan.journal.results()[stage.name]["data"]
        error = _error(status, code, limit_s, data, plan.log.read_bytes()[log_start:])
    return {
        "status": status,
        "exit_code": code,
        "took_s": round(time.monotonic() - start_s, 1),
        "finished": time.time(),
        "error": error,
    }


def _wait(
    command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str]
) -> tuple[str, int | None]:
    """Run a command in a session of its own, which is ended as a whole at the limit.

    It ends with this process, too, even where that is killed.
    """
    with log.open("ab") as stream:
        try:
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_dies_with_parent(),  # noqa: PLW1509 (no threads here)
                env={**os.environ, **environment},
            )
        except OSError as error:
            stream.write(str(error).encode())
            return FAILED, None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, None
        finally:
            _end(process)
    if code < 0:
        return CRASHED, code
    return (OK if code == 0 else FAILED), code


def _dies_with_parent() -> Callable[[], object] | None:
    """For a new process: SIGKILL when the one that started it ends; None where that is unknown."""
    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, _SET_DEATH_SIGNAL, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _error(
    status: str, code: int | None, limit_s: float, data: Mapping[str, Any], log: bytes
) -> str:
    if status == TIMED_OUT:
        return f"stopped after {limit_s:.0f} s"
    if isinstance(data.get("error"), str):
        return str(data["error"])
    reason = "not started" if code is None else f"exit code {code}"
    if code is not None and code < 0:
        reason = f"signal {-code}"
    tail = log[-_LOG_TAIL:].decode(errors="replace").strip()
    return f"{reason}: {tail.splitlines()[-1]}" if tail else reason


def _line(result: Mapping[str, Any]) -> str:
    line = f"{result['status']}, {result['took_s']} s"
    return f"{line}; {result['error']}" if result["error"] else line
