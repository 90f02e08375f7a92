"""Runs stages as processes inside one time budget, and keeps what each of them found.

A stage is a command that gets `--seconds` (how long it may take), `--into` (the JSON file that it
keeps rewriting while it measures) and, where an earlier run has left something out, `--earlier`
(the result to go on from). Whatever ends it - success, a crash, the time limit - what it has
written by then is kept. Knows processes, clocks and files; no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, CRASHED, TIMED_OUT, NO_TIME = "ok", "failed", "crashed", "timed out", "no time left"
_LOG_TAIL = 400


@dataclass(frozen=True)
class Stage:
    """One command.

    budget_s: its share of the whole run. least_s: with less it is not worth starting.
    reads: stages whose results it uses; it runs again when one of them has.
    """

    name: str
    command: tuple[str, ...]
    budget_s: float
    least_s: float = 5.0
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    key: what results depend on; a finished stage with an equal key is not run again, unless its
        data name something under `not_run`.
    only: names of the stages to look at; empty means all. again: run these whatever is there.
    grace: a stage is stopped at its time times this, plus `grace_s`.
    """

    folder: Path
    key: Mapping[str, Any]
    budget_s: float = 600.0
    only: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()
    grace: float = 1.25
    grace_s: float = 15.0
    environment: Mapping[str, str] = field(default_factory=dict)


def result_file(folder: Path, name: str) -> Path:
    """Where a stage's result is kept."""
    return folder / f"{name}.json"


def read_result(folder: Path, name: str) -> dict[str, Any] | None:
    """A stage's result; None if there is none, or no whole one."""
    found = _read(result_file(folder, name))
    return found if found is not None and "status" in found else None


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """A reader sees the old file or the whole of the other."""
    partial = file.with_name(f"{file.name}.tmp")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)


def run_stages(
    stages: Sequence[Stage], plan: Plan, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Run what is missing, in order of value; results by stage, old ones included.

    The time left is shared among the stages to come by their budgets; what one leaves over goes
    to those behind it, and what does not fit at all is not started.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + plan.budget_s
    chosen = [stage for stage in stages if not plan.only or stage.name in plan.only]
    found: dict[str, dict[str, Any]] = {}
    for place, stage in enumerate(chosen):
        old, key = read_result(plan.folder, stage.name), _key(stage, plan)
        if old is not None and _finished(old, key) and stage.name not in plan.again:
            say(f"{stage.name}: kept, measured {old['date']}")
            found[stage.name] = old
            continue
        later = [s for s in chosen[place + 1 :] if not _is_kept(s, plan)]
        left_s = end_s - time.monotonic()
        given_s = _given_s(stage, later, left_s)
        if given_s is None:
            say(f"{stage.name}: {NO_TIME} ({max(0.0, left_s):.0f} s)")
            found[stage.name] = old or {"stage": stage.name, "status": NO_TIME, "data": {}}
            continue
        say(f"{stage.name}: {given_s:.0f} s of {left_s:.0f} s left")
        limit_s = _limit_s(plan, later, given_s, left_s)
        found[stage.name] = _run(stage, plan, key, given_s, limit_s)
        say(f"{stage.name}: {_line(found[stage.name])}")
    return found


# --- what is kept ----------------------------------------------------------------------------


def _key(stage: Stage, plan: Plan) -> dict[str, Any]:
    read = {name: read_result(plan.folder, name) for name in stage.reads}
    return {**plan.key, "reads": {name: old and old["finished"] for name, old in read.items()}}


def _finished(old: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    return old["status"] == OK and old.get("key") == key and not old["data"].get("not_run")


def _is_kept(stage: Stage, plan: Plan) -> bool:
    if stage.name in plan.again:
        return False
    old = read_result(plan.folder, stage.name)
    return old is not None and _finished(old, _key(stage, plan))


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


def _run(
    stage: Stage, plan: Plan, key: Mapping[str, Any], given_s: float, limit_s: float
) -> dict[str, Any]:
    into = plan.folder / f"{stage.name}.part.json"
    log = plan.folder / f"{stage.name}.log"
    into.unlink(missing_ok=True)
    command = [*stage.command, "--seconds", f"{given_s:.1f}", "--into", str(into)]
    old = read_result(plan.folder, stage.name)
    if old is not None and old.get("key") == key and stage.name not in plan.again:
        command += ["--earlier", str(result_file(plan.folder, stage.name))]
    start_s = time.monotonic()
    status, code = _wait(command, log, limit_s, plan.environment)
    data = _read(into) or {}
    result = {
        "stage": stage.name,
        "status": status,
        "exit_code": code,
        "given_s": round(given_s, 1),
        "took_s": round(time.monotonic() - start_s, 1),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "finished": time.time(),
        "key": dict(key),
        "error": None if status == OK else _error(status, code, limit_s, data, log),
        "data": data,
    }
    write_json(result_file(plan.folder, stage.name), result)
    into.unlink(missing_ok=True)
    return result


def _wait(
    command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str]
) -> tuple[str, int | None]:
    """Run a command in a session of its own, which is ended as a whole at the limit."""
    with log.open("wb") as stream:
        try:
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _error(
    status: str, code: int | None, limit_s: float, data: Mapping[str, Any], log: Path
) -> str:
    if status == TIMED_OUT:
        return f"stopped after {limit_s:.0f} s"
    if isinstance(data.get("error"), str):
        return str(data["error"])
    reason = "not started" if code is None else f"exit code {code}"
    if code is not None and code < 0:
        reason = f"signal {-code}"
    tail = log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()
    return f"{reason}: {tail.splitlines()[-1]}" if tail else reason


def _line(result: Mapping[str, Any]) -> str:
    line = f"{result['status']}, {result['took_s']} s"
    return f"{line}; {result['error']}" if result["error"] else line


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
