"""Everything worth measuring on a GPU, in one budget of ten minutes; resumable.

    python -m benchmarks.gpu.check                       # on cuda, then the table
    python -m benchmarks.gpu.check --report              # the table of what there is
    python -m benchmarks.gpu.check --smoke --device cpu  # the same code at a tiny scale
    python -m benchmarks.gpu.check --predict h200 --memory 24GiB

Each stage is a process with a time budget of its own, writes what it finds while it measures, and
is run again only if it has not finished with these settings and sources. See `docs/gpu.md`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import card, device_name, has_device, source_state, versions
from benchmarks.gpu.runner import OK, Plan, Stage, run_stages

FIGURES = ("figures-opt-6.7b", "figures-llama-2-7b", "figures-qwen1.5-7b", "figures-12gb")
# In order of value: name, seconds of ten minutes, the least that is worth starting.
STAGES = (
    ("link", 35, 12),
    ("parity", 50, 15),
    (FIGURES[0], 165, 25),
    ("roofline", 55, 15),
    ("kernels", 60, 15),
    ("speculation", 25, 10),
    ("peers", 60, 20),
    (FIGURES[1], 55, 20),
    (FIGURES[2], 40, 20),
    (FIGURES[3], 35, 20),
    ("simulator", 20, 5),
)
_READS = {"simulator": ("link", *FIGURES)}
_SMOKE_LEAST_S = 0.2
_FOLDER = Path(__file__).resolve().parents[1] / "results" / "gpu_check"


def stages(arguments: argparse.Namespace) -> list[Stage]:
    """The stages as commands of this very module, from the repository root."""
    common = ["--device", arguments.device, "--folder", str(arguments.folder)]
    if arguments.smoke:
        common.append("--smoke")
    if arguments.link_bandwidth is not None:
        common += ["--link-bandwidth", arguments.link_bandwidth]
    return [
        Stage(
            name,
            (sys.executable, "-m", "benchmarks.gpu.check", "--stage", name, *common),
            budget_s,
            _SMOKE_LEAST_S if arguments.smoke else least_s,
            _READS.get(name, ()),
        )
        for name, budget_s, least_s in STAGES
    ]


def parse() -> argparse.Namespace:
    names = [name for name, *_ in STAGES]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog=f"stages: {', '.join(names)}"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="of the stages' results")
    parser.add_argument("--budget", type=float, default=600, help="seconds for the whole run")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="STAGE")
    parser.add_argument("--again", nargs="*", choices=names, metavar="STAGE", help="none: all")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to try the code itself")
    parser.add_argument("--link-bandwidth", help="emulate a slower link, such as 12GB/s; labelled")
    parser.add_argument("--report", action="store_true", help="only print and write the table")
    parser.add_argument("--predict", metavar="GPU", help="simulate the figures for a named card")
    parser.add_argument("--memory", default="24GiB", help="of the card, for --predict")
    parser.add_argument("--quick", action="store_true", help="--predict: a few points")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--earlier", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the whole -------------------------------------------------------------------------------


def check(arguments: argparse.Namespace) -> int:
    """Run what is missing; 1 if a stage has failed, 2 if there is no such device."""
    if arguments.device != "cpu" and not has_device(arguments.device):
        print(
            f"--device {arguments.device}: no such device; --smoke --device cpu tries the code",
            file=sys.stderr,
        )
        return 2
    names = [name for name, *_ in STAGES]
    again = arguments.again
    plan = Plan(
        folder=arguments.folder,
        key={
            "device": arguments.device,
            "smoke": arguments.smoke,
            "link_bandwidth": _link_bandwidth(arguments),
            "machine": {"short": device_name(arguments.device), **card(arguments.device)},
            "versions": versions(),
            **source_state(),
        },
        budget_s=arguments.budget,
        only=frozenset(arguments.only),
        again=frozenset(names if again == [] else again or []),
    )
    found = run_stages(stages(arguments), plan, lambda line: print(line, file=sys.stderr))
    report(arguments)
    return 0 if all(result["status"] == OK for result in found.values()) else 1


def report(arguments: argparse.Namespace) -> None:
    """Print the table and write the JSON."""
    from benchmarks.gpu.report import write_report

    text, file = write_report(arguments.folder, [name for name, *_ in STAGES])
    print(text)
    if file is not None:
        print(f"written: {file}", file=sys.stderr)


def predict(arguments: argparse.Namespace) -> int:
    """Print the predictions and write them; 2 for a card or a memory that cannot be."""
    from beamwright.errors import InputError
    from beamwright.units import parse_size
    from benchmarks.common import finish, table
    from benchmarks.gpu.predict import COLUMNS, points, predictions

    try:
        memory_bytes = parse_size(arguments.memory)
        rows = predictions(arguments.predict, memory_bytes, points(quick=arguments.quick))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(rows, COLUMNS))
    name = f"gpu_predictions_{arguments.predict}_{arguments.memory}"
    finish(name, {"gpu": arguments.predict, "memory_bytes": memory_bytes, "points": rows})
    return 0


def _link_bandwidth(arguments: argparse.Namespace) -> int | None:
    from beamwright.units import parse_size

    if arguments.link_bandwidth is None:
        return None
    return parse_size(arguments.link_bandwidth.removesuffix("/s"))


# --- one stage -------------------------------------------------------------------------------


def run_stage(arguments: argparse.Namespace) -> int:
    """The process of one stage; its error, if any, is part of its result."""
    from benchmarks.gpu.context import Context, one_line

    context = Context(
        device=arguments.device,
        smoke=arguments.smoke,
        seconds=arguments.seconds,
        into=arguments.into,
        folder=arguments.folder,
        link_bandwidth=_link_bandwidth(arguments),
        earlier=_saved(arguments.earlier).get("data", {}) if arguments.earlier else {},
    )
    if context.on_gpu and not has_device(context.device):
        context.save({"error": f"--device {context.device}: no CUDA device is available here"})
        return 1
    module = importlib.import_module(f"benchmarks.gpu.{arguments.stage.partition('-')[0]}")
    extra = (arguments.stage,) if arguments.stage in FIGURES else ()
    try:
        data: dict[str, Any] = module.run(context, *extra)
    except Exception as error:
        traceback.print_exc()
        context.save({**_saved(context.into), "error": one_line(error)})
        return 1
    context.finish(data)
    return 1 if "error" in data else 0


def _saved(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def main() -> int:
    arguments = parse()
    if arguments.stage:
        return run_stage(arguments)
    if arguments.predict:
        return predict(arguments)
    if arguments.report:
        report(arguments)
        return 0
    return check(arguments)


if __name__ == "__main__":
    sys.exit(main())
