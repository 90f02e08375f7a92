"""Run stages as processes within one time budget, and keep every row that they measure.

A stage is a command that gets `--seconds`, its time. Results go to one append-only file of JSON
lines (`Journal`). Whatever ends a stage or this process (a crash, the time limit, SIGKILL), rows
measured by then are kept, and the next run continues from them. Needs no torch.
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
_SET_DEATH_SIGNAL = 1  # of prctl


class Journal:
    """Append-only file of JSON lines: a stage's begin, a part of its data, or its end.

    A part is a named value, or one row of a named list; later lines replace earlier ones. Truncated
    lines are ignored.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def begin(self, stage: str, facts: Mapping[str, Any], *, goes_on: bool) -> None:
        """Record that a stage begins. goes_on: its earlier data still count."""
        self._add({"stage": stage, "begin": dict(facts), "goes_on": goes_on})

    def part(self, stage: str, name: str, value: Any, row: int | None = None) -> None:
        """Record a value. row: its index, if it is a row of the list `name`."""
        where = {} if row is None else {"row": row}
        self._add({"stage": stage, "part": name, **where, "value": value})

    def save(self, stage: str, data: Mapping[str, Any], old: Mapping[str, Any]) -> None:
        """Record the values and rows of `data` that differ from `old`."""
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
        """Record that a stage ended. facts: at least a `status`."""
        self._add({"stage": stage, "end": dict(facts)})

    def results(self) -> dict[str, dict[str, Any]]:
        """Read each stage's facts and data; a stage without an end was killed."""
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
    """A command to run.

    budget_s: its weight when the time left is divided. least_s: fewest seconds worth starting with.
    reads: stages whose results it uses; it runs again when one of them has. missing: what this
    machine lacks; the stage is then skipped.
    """

    name: str
    command: tuple[str, ...]
    budget_s: float
    least_s: float = 5.0
    reads: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Plan:
    """Settings of a run.

    key: what results depend on; a finished stage with an equal key is not run again, unless its
    data have a `not_run`. facts: recorded with each stage. only: stages to run; empty means all.
    again: stages to run even if finished. grace: a stage is killed after its time times this, plus
    `grace_s`. after: called after each stage.
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
    """Run unfinished stages in order; return results by stage, kept ones included.

    The time left is divided among the remaining stages by their budgets, so a stage's unused time
    goes to later ones. A stage that does not fit is not started.
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
    """Return the stage's share of the time left, at least `least_s`; None if less is left."""
    share = stage.budget_s / (stage.budget_s + sum(each.budget_s for each in later))
    given_s = max(stage.least_s, left_s * share)
    return None if given_s > left_s else given_s


def _limit_s(plan: Plan, later: Sequence[Stage], given_s: float, left_s: float) -> float:
    """Return when to kill a stage: after its time plus grace, if later stages can spare it."""
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
    """Run a command in its own session; kill the session at the limit.

    The kernel kills the command if this process dies.
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
    """Return a preexec function that makes a child die with its parent; None outside Linux."""
    if sys.platform != "linux":
        return None
    return partial(ctypes.CDLL(None).prctl, _SET_DEATH_SIGNAL, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its descendants."""
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
