"""Which architectures run: parity, equal trees, exactness, speed; a table, refusals with reasons.

    python -m beamwright_lab.models.families [--only NAME...] [--limit-s 300]

Each architecture is a tiny random checkpoint that `transformers` writes, in a process of its own
(`family.py`), so that one that crashes or hangs costs its own row. Searches of paths of 192 tokens
behind a prompt, windows of 16 to 64.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from beamwright_lab.common import finish, say, table
from beamwright_lab.models.checkpoints import ARCHITECTURES
from beamwright_lab.models.family import report

OWN = ("llama", "mistral", "qwen2", "qwen3", "opt")
"""What the own decoder knows: each of them with `transformers`' modules, too."""
_TOLERANCE = 1e-4
_PROCESSES = get_context("forkserver")  # each begins where the imports are over
_PROCESSES.set_forkserver_preload(["beamwright_lab.models.family"])
COLUMNS = ("architecture", "decoder", "log-probabilities", "locality", "resumed", "exact")
SPEED = ("tok/s", "generate's")


def run(name: str, decoder: str | None, limit_s: float, rounds: int) -> dict[str, Any]:
    """What a process says of an architecture; `error` where it says nothing in time."""
    facts: dict[str, Any] = {"architecture": name, "decoder": decoder or "auto"}
    here, there = _PROCESSES.Pipe(duplex=False)
    with TemporaryDirectory() as place:
        folder = Path(place) / name
        process = _PROCESSES.Process(target=_say, args=(there, name, folder, decoder, rounds))
        process.start()
        there.close()  # so that the end of the process is the end of what it says
        try:
            if not here.poll(limit_s):
                return facts | {"error": f"not done in {limit_s:.0f} s"}
            found: dict[str, Any] = here.recv()
        except EOFError:
            process.join()
            return facts | {"error": f"the process ended, exit code {process.exitcode}"}
        finally:
            process.kill()
            process.join()
        return facts | found | {"error": reason(found, folder)}


def _say(there: Connection, *given: Any) -> None:
    there.send(report(*given))


def reason(found: Mapping[str, Any], folder: Path) -> str | None:
    """Why an architecture does not run, without where its checkpoint lies."""
    error: str | None = found.get("error")
    return (
        None if error is None else error.replace(f"model {folder}: ", "").replace(str(folder), "")
    )


def verdict(row: Mapping[str, Any]) -> str:
    """ "runs", "refused" or "wrong": a failure, a tree that differs, log-probabilities too far."""
    if row.get("refused"):
        return "refused"
    same = row.get("resumed") and row.get("locality") and row.get("parity", 1.0) <= _TOLERANCE
    return "runs" if same and not row.get("error") else "wrong"


def rows_of(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table, of what runs or is wrong."""
    words = {True: "yes", False: "no", None: "-"}
    return [
        {
            "architecture": each["architecture"],
            "decoder": each["decoder"],
            "log-probabilities": f"{each['parity']:.0e}" if "parity" in each else "-",
            **{name: words[each.get(name)] for name in ("locality", "resumed", "exact")},
            "tok/s": each.get("tok_s"),
            "generate's": each.get("generate_tok_s"),
        }
        for each in found
        if verdict(each) != "refused"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in given.only:
        for decoder in ("own", "transformers") if name in OWN else ("transformers",):
            found.append(run(name, decoder, given.limit_s, given.rounds))
            say(verdict(found[-1]), found[-1])
    shown = [row for row in found if verdict(row) != "refused"]
    print(table(rows_of(shown), (*COLUMNS, *SPEED)))
    refused = [
        {"architecture": row["architecture"], "reason": row["error"]}
        for row in found
        if verdict(row) == "refused"
    ]
    print(table(refused, ("architecture", "reason")))
    counts = {
        kind: [verdict(row) for row in found].count(kind) for kind in ("runs", "refused", "wrong")
    }
    finish("families", {"counts": counts, "rows": found})


if __name__ == "__main__":
    main()
