"""Which architectures run: parity, equal trees, exactness, speed; a table, refusals with reasons.

    python -m beamwright_lab.models.families [--only NAME...] [--limit-s 300]

Each architecture is a tiny random checkpoint that `transformers` writes, in a process of its own
(`family.py`), so that one that crashes or hangs costs its own row. Searches of paths of 192 tokens
behind a prompt, windows of 16 to 64.
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

# What the own decoder knows: each of them with `transformers`' modules, too.
OWN = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "opt")
_PROCESSES = get_context("forkserver")  # each begins where the imports are over
_PROCESSES.set_forkserver_preload(["beamwright_lab.models.family"])
# Rows of a run that is not over: it goes on from there.
PARTLY = RESULTS / "families-partly.json"


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


def kept(anew: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of an earlier run that is not over, but those of architectures to run anew."""
    if not PARTLY.is_file():
        return []
    rows: list[dict[str, Any]] = json.loads(PARTLY.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["architecture"] not in anew]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, help="these alone, anew")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    found = kept(given.only or ())
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
