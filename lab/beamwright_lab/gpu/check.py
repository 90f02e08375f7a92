"""Run all GPU measurements within one time budget (below ten minutes); resumable.

    python -m beamwright_lab.gpu.check                       # measure on cuda, then print a table
    python -m beamwright_lab.gpu.check --report              # only print the table
    python -m beamwright_lab.gpu.check --smoke --device cpu  # the same code with tiny sizes

Each stage is a process with its own time budget, and every row is saved as soon as it is measured.
Needs no network, pip or make; missing packages are reported (`docs/develop/gpu-check.md`).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from beamwright_lab.gpu import compiled
from beamwright_lab.gpu.context import (
    ENGINE,
    TESTS,
    Context,
    card,
    device_name,
    has_device,
    missing_vllm,
    missing_wheels,
    one_line,
    source_state,
    versions,
)
from beamwright_lab.gpu.runner import OK, Journal, Plan, Stage, run_stages

FIGURES = ("figures-opt-6.7b", "figures-llama-2-7b", "figures-qwen1.5-7b", "figures-12gb")
# Most informative first: name, budget in seconds, fewest seconds worth starting with, function.
STAGES: tuple[tuple[str, int, int, str], ...] = (
    ("graphs", 20, 8, "graphs.run"),
    ("roofline", 70, 20, "roofline.run"),
    ("search", 75, 20, "search.run"),
    ("split", 55, 25, "split.run"),
    ("peers", 60, 15, "peers.run"),
    ("kernels", 25, 15, "attention_kernels.run"),
    ("narrow", 50, 20, "narrow.run"),
    ("tests", 70, 15, "graphs.run_tests"),
    ("search-7b", 150, 45, "search.run_large"),
    ("link", 35, 12, "link.run"),
    ("parity", 30, 10, "parity.run"),
    (FIGURES[0], 60, 25, "figures.run"),
    ("speculation", 20, 10, "speculation.run"),
    (FIGURES[1], 20, 20, "figures.run"),
    (FIGURES[2], 20, 20, "figures.run"),
    (FIGURES[3], 20, 20, "figures.run"),
    ("simulator", 10, 5, "simulator.run"),
    ("vllm", 200, 60, "vllm_side.run"),
    ("vllm-7b", 200, 60, "vllm_side.run_large"),
)
_READS = {"simulator": ("link", *FIGURES)}
_SMOKE_LEAST_S = 0.2
_OUT = Path(__file__).resolve().parents[1] / "results" / "gpu_check"
_TORCH_ALONE = ("link",)  # its ceilings need torch only
_WITH_VLLM = ("vllm", "vllm-7b")  # skipped without vLLM, unless named in --only


def stages(arguments: argparse.Namespace) -> list[Stage]:
    """Return the stages as commands of this module, in the order of `--only` if given."""
    common = ["--device", arguments.device, "--out", str(arguments.out)]
    if arguments.smoke:
        common.append("--smoke")
    if arguments.link_bandwidth is not None:
        common += ["--link-bandwidth", arguments.link_bandwidth]
    return [
        Stage(
            name,
            (sys.executable, "-m", "beamwright_lab.gpu.check", "--stage", name, *common),
            budget_s,
            _SMOKE_LEAST_S if arguments.smoke else least_s,
            _READS.get(name, ()),
            _missing(name),
        )
        for name, budget_s, least_s, _ in sorted(STAGES, key=partial(_place, arguments.only))
        if name in arguments.only or name not in _WITH_VLLM or not missing_vllm()
    ]


def _place(only: Sequence[str], stage: tuple[str, int, int, str]) -> int:
    return only.index(stage[0]) if stage[0] in only else len(only)


def _missing(stage: str) -> str:
    if stage in _WITH_VLLM and (why := missing_vllm()):
        return why
    needed = {} if stage in _TORCH_ALONE else ENGINE
    found = missing_wheels({**needed, **(TESTS if stage == "tests" else {})})
    return f"missing wheels: {', '.join(found)}" if found else ""


def parse() -> argparse.Namespace:
    names = [name for name, *_ in STAGES]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog=f"stages: {', '.join(names)}"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=_OUT, help="folder for results")
    parser.add_argument("--budget", type=float, default=500, help="seconds for the whole run")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="STAGE")
    parser.add_argument("--again", nargs="*", choices=names, metavar="STAGE", help="rerun (all)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to test the code")
    parser.add_argument("--link-bandwidth", help="emulate a slower link, such as 12GB/s")
    parser.add_argument("--report", action="store_true", help="only print and save the table")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the whole run ---------------------------------------------------------------------------


def check(arguments: argparse.Namespace) -> int:
    """Run unfinished stages; return 1 if a stage failed, 2 without torch or the device, else 0."""
    say = partial(print, file=sys.stderr, flush=True)
    if missing := missing_wheels({"torch": "torch", **ENGINE, **TESTS, "triton": "triton"}):
        say(f"missing wheels: {', '.join(missing)}")
    if missing_wheels({"torch": "torch"}):
        return 2
    if arguments.device != "cpu" and not has_device(arguments.device):
        say(f"--device {arguments.device}: no such device; --smoke --device cpu tests the code")
        return 2
    names = [name for name, *_ in STAGES]
    again = arguments.again
    arguments.out.mkdir(parents=True, exist_ok=True)
    journal = _journal(arguments)
    key = {
        "device": arguments.device,
        "smoke": arguments.smoke,
        "link_bandwidth": arguments.link_bandwidth,
        "machine": device_name(arguments.device),
    }
    facts = {
        "versions": versions(),
        "card": card(arguments.device),
        "python": platform.python_version(),
        "missing": missing,
        "command": shlex.join(["python", "-m", "beamwright_lab.gpu.check", *sys.argv[1:]]),
        **source_state(),
    }
    journal.begin("environment", {"key": key, **facts}, goes_on=False)
    journal.end("environment", {"status": OK})
    with tempfile.TemporaryDirectory() as cache:
        travelling = arguments.out / "triton_cache.tar.gz"
        compiled.unpack(travelling, Path(cache))

        def after() -> None:
            report(arguments)
            compiled.pack(Path(cache), travelling)

        plan = Plan(
            journal=journal,
            log=arguments.out / "log.txt",
            key=key,
            facts=facts,
            budget_s=arguments.budget,
            only=frozenset(arguments.only),
            again=frozenset(names if again == [] else again or []),
            environment={"PYTHONUNBUFFERED": "1", "TRITON_CACHE_DIR": cache},
            after=after,
        )
        found = run_stages(stages(arguments), plan, say)
    print(report(arguments))
    return 0 if all(result["status"] == OK for result in found.values()) else 1


def _journal(arguments: argparse.Namespace) -> Journal:
    return Journal(arguments.out / "results.jsonl")


def report(arguments: argparse.Namespace) -> str:
    """Return the table of all results so far, and write it to `summary.md`."""
    results = _journal(arguments).results()
    for name, *_ in STAGES:
        results.setdefault(name, {"stage": name, "status": "not run", "data": {}})
    if missing_wheels({"torch": "torch", **ENGINE}):
        lines = (
            f"{name}: {each['status']} {each.get('error') or ''}" for name, each in results.items()
        )
        text = "\n".join([*map(str.rstrip, lines), "rows: results.jsonl"])
    else:
        from beamwright_lab.gpu.report import render

        text = render(results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "summary.md").write_text(text + "\n", encoding="utf-8")
    return text


def _link_bandwidth(arguments: argparse.Namespace) -> int | None:
    if arguments.link_bandwidth is None:
        return None
    from beamwright.units import parse_size

    return parse_size(arguments.link_bandwidth.removesuffix("/s"))


# --- one stage -------------------------------------------------------------------------------


def run_stage(arguments: argparse.Namespace) -> int:
    """Run one stage in this process; return 1 if its result has an error."""
    journal = _journal(arguments)
    context = Context(
        stage=arguments.stage,
        device=arguments.device,
        smoke=arguments.smoke,
        seconds=arguments.seconds,
        journal=journal,
        link_bandwidth=_link_bandwidth(arguments),
        earlier=journal.results().get(arguments.stage, {}).get("data", {}),
    )
    if context.on_gpu and not has_device(context.device):
        context.save({"error": f"--device {context.device}: no CUDA device is available here"})
        return 1
    module, function = {name: where for name, *_, where in STAGES}[arguments.stage].split(".")
    extra = (arguments.stage,) if arguments.stage in FIGURES else ()
    try:
        run = getattr(importlib.import_module(f"beamwright_lab.gpu.{module}"), function)
        gc.freeze()  # as the CLI does: garbage collection skips library objects
        data: dict[str, Any] = run(context, *extra)
    except Exception as error:
        traceback.print_exc()
        context.save({"error": one_line(error)})
        return 1
    context.finish(data)
    return 1 if "error" in data else 0


def main() -> int:
    arguments = parse()
    if arguments.stage:
        return run_stage(arguments)
    if arguments.report:
        print(report(arguments))
        return 0
    return check(arguments)


if __name__ == "__main__":
    sys.exit(main())
