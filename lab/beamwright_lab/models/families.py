"""Check which architectures run: parity, equal trees, exactness, speed; refusals with reasons.

    python -m beamwright_lab.models.families [--only NAME...] [--limit-s 300]

Each architecture is a tiny random checkpoint that `transformers` writes. It runs in its own process
(`family.py`), so that a crash or hang costs one row. Paths have 192 tokens after the prompt, more
than any attention window (16 to 64).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from beamwright_lab.common import RESULTS, finish, say, write_json
from beamwright_lab.models.checkpoints import ARCHITECTURES
from beamwright_lab.models.family import report
from beamwright_lab.models.shown import family_rows, refusals, verdict

# Supported by our own decoder; each also runs with the `transformers` adapter.
OWN = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "opt")
_PROCESSES = get_context("forkserver")  # children begin with imports done
_PROCESSES.set_forkserver_preload(["beamwright_lab.models.family"])
# Rows of an unfinished run, which the next one continues.
PARTLY = RESULTS / "families-partly.json"


def run(name: str, decoder: str | None, limit_s: float, rounds: int) -> dict[str, Any]:
    """Check one architecture in a process; a crash or no result in `limit_s` becomes `error`."""
    facts: dict[str, Any] = {"architecture": name, "decoder": decoder or "auto"}
    here, there = _PROCESSES.Pipe(duplex=False)
    with TemporaryDirectory() as place:
        folder = Path(place) / name
        process = _PROCESSES.Process(
            target=_send_report, args=(there, name, folder, decoder, rounds)
        )
        process.start()
        there.close()  # so that recv sees EOF when the process ends
        try:
            if not here.poll(limit_s):
                return facts | {"error": f"no result in {limit_s:.0f} s"}
            found: dict[str, Any] = here.recv()
        except EOFError:
            process.join()
            return facts | {"error": f"the process ended, exit code {process.exitcode}"}
        finally:
            process.kill()
            process.join()
        return facts | found | {"error": error_reason(found, folder)}


def _send_report(there: Connection, *given: Any) -> None:
    there.send(report(*given))


def error_reason(found: Mapping[str, Any], folder: Path) -> str | None:
    """Return why an architecture does not run, without its checkpoint's path; None if it runs."""
    error: str | None = found.get("error")
    return (
        None if error is None else error.replace(f"model {folder}: ", "").replace(str(folder), "")
    )


def unfinished_rows(anew: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows of an unfinished run, without architectures that run again."""
    if not PARTLY.is_file():
        return []
    rows: list[dict[str, Any]] = json.loads(PARTLY.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["architecture"] not in anew]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, help="run only these, again")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    found = unfinished_rows(given.only or ())
    over = {(row["architecture"], row["decoder"]) for row in found}
    for name in given.only or ARCHITECTURES:
        for decoder in ("own", "transformers") if name in OWN else ("transformers",):
            if (name, decoder) not in over:
                found.append(run(name, decoder, given.limit_s, given.rounds))
                say(verdict(found[-1]), found[-1])
                write_json(PARTLY.stem, {"rows": found})
    order = list(ARCHITECTURES)
    found.sort(key=lambda row: (order.index(row["architecture"]), row["decoder"]))
    print(family_rows(found))
    print(refusals(found))
    kinds = [verdict(row) for row in found]
    counts = {kind: kinds.count(kind) for kind in ("runs", "refused", "wrong")}
    finish("families", {"counts": counts, "rows": found})
    if given.only is None:
        PARTLY.unlink()


if __name__ == "__main__":
    main()
