"""Load models one after the other in this process; print a JSON line for each.

    python -m beamwright_lab.models.load_file PLACE...

`outcome` is "loaded", "refused" (with a reason) or "error". `peak_bytes` is this process's peak
memory so far.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer  # noqa: F401 - imported before loading is timed

from beamwright.errors import BeamwrightError
from beamwright.models.load import load_model
from beamwright.sections import ModelSettings

_MOST_BYTES = 16 << 30


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def load(place: str) -> dict[str, Any]:
    start, said = time.perf_counter(), ""
    try:
        load_model(place, ModelSettings(model=place))
        outcome = "loaded"
    except BeamwrightError as error:
        outcome, said = "refused", str(error)
    except Exception as error:  # what a damaged file must not lead to
        outcome, said = "error", f"{type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - start, 3)
    return {"place": place, "outcome": outcome, "said": said[:500], "seconds": seconds}


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    before = peak_bytes()
    for place in sys.argv[1:]:
        found = load(place)
        facts = {**found, "peak_bytes": peak_bytes(), "before_bytes": before}
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
