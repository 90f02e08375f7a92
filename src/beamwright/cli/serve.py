"""`beamwright serve`: a server that runs a search for each request in OpenAI's protocol."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import (
    needs_extra,
    pause_gc_for_import,
    print_error_line,
    print_json,
    quiet_stdout,
)
from beamwright.errors import InputError, format_bytes
from beamwright.io import read_text
from beamwright.verify.find import check_models

if TYPE_CHECKING:
    from beamwright.cluster.serving import Cluster
    from beamwright.cluster.solver import ClusterSolver
    from beamwright.config import Settings
    from beamwright.sections import ModelSettings
    from beamwright.solver.solver import Solver


@with_settings(cluster=True)
def serve(
    invocation: Invocation,
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0: all addresses.", "ADDRESS"),
    port: int = option(8000, "Port to listen at; 0: any free port.", "PORT", min=0, max=65535),
    api_keys: Path | None = option(
        None, "File with one API key per line; requests need a key.", "FILE"
    ),
    name: str | None = option(
        None, "Name of the served model (default: its folder's name).", "NAME"
    ),
    allow_host: list[str] | None = option(
        None, "Further host name that clients may use; repeat the option for several.", "NAME"
    ),
    max_requests: int = option(64, "Limit on searches that run or wait.", "N", min=1),
    max_n: int = option(512, "Limit on the candidates of a search.", "N", min=1),
    max_search_tokens: int = option(
        1_000_000, "Limit on the tokens that a search generates.", "TOKENS", min=1
    ),
    max_seconds: float = option(
        600.0, "Seconds until a search ends with its best candidate so far.", "S", min=1
    ),
    drain: float = option(
        30.0, "Grace period for running searches after SIGTERM, in seconds.", "S", min=0
    ),
    receipts: bool = option(
        True,
        "Add receipts to replies; they show system prompt, model paths and processor.",
        flag="--receipts/--no-receipts",
    ),
    log_json: bool = option(False, "Log each request as a line of JSON on standard error."),
) -> None:
    """Serve an OpenAI-compatible API, a live page of search trees, and metrics.

    Clients select a search by the model's name: NAME uses the settings given here, NAME:beam and so
    on use another strategy, and NAME:plain samples once. The server listens on this machine only,
    unless --host is given.
    """
    keys, out, model = _read_keys(api_keys), sys.stdout, invocation.settings.model
    with quiet_stdout(), ExitStack() as stack:
        check_models(model)
        with needs_extra("serve"), pause_gc_for_import("torch"):
            from beamwright.serve.app import make_app
            from beamwright.serve.body import ServerLimits
            from beamwright.serve.queue import RequestQueue
            from beamwright.serve.server import Guard, Server, bind
        limits = ServerLimits(
            requests=max_requests,
            requests_per_key=share_of_a_key(max_requests, keys),
            n=max_n,
            tokens=max_search_tokens,
            seconds=max_seconds,
            drain_s=drain,
        )
        listening = stack.enter_context(bind(host, port))
        _set_up_log(as_json=log_json)
        address, port = listening.getsockname()[:2]
        if not keys and address != "::1" and not address.startswith("127."):
            print_error_line(
                f"anyone who reaches {address}:{port} can use the server. Set --api-keys FILE."
            )
        solver = _engine(invocation.settings, invocation.cluster)
        stack.callback(solver.close)
        name = name or _called(model, solver)
        seed = invocation.settings.search.seed if "seed" in invocation.given else None
        queue = RequestQueue(solver, name, limits, seed, receipts=receipts)
        hosts = ["localhost", host, *(allow_host or [])]
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}"

        def started() -> None:
            if invocation.as_json:
                with redirect_stdout(out):
                    models = queue.reader.models()
                    print_json({"url": url, "base_url": f"{url}/v1", "models": models})
                out.flush()
                return
            held = [each.budget_bytes for each in solver.usage().levels.values()]
            kv = f"; {format_bytes(held[0])} of KV" if held else ""
            if solver.roster is not None:
                kv = f"; replicas: {solver.roster.wanted}{kv}"
            print_error_line(f"serving {name} at {url} (API: {url}/v1{kv}). Stop with Ctrl-C.")

        server = Server(Guard(make_app(queue), limits, hosts, keys), queue)
        started()
        asyncio.run(server.serve(sockets=[listening]))


def _called(model: ModelSettings, solver: Solver | ClusterSolver) -> str:
    """Return the default name of the served model.

    `hf:ORG/NAME@REVISION` and a folder NAME are called NAME. A model on a remote server keeps its
    name on that server.
    """
    if (remote := solver.remote) is not None:
        return str(model.model.partition("#")[2] or remote.name).removesuffix(":plain")
    called = model.model.partition("@")[0] if model.model.startswith("hf:") else model.model
    return Path(called).name or called


def _engine(settings: Settings, cluster: Cluster | None) -> Solver | ClusterSolver:
    from beamwright.solver.solver import Solver

    if cluster is None:
        return Solver(settings)
    if settings.model.runs_elsewhere:
        spec = settings.model.model
        raise InputError(f"--model {spec} runs on a server, so --ray and --replicas have no effect")
    from beamwright.cluster.solver import ClusterSolver

    return ClusterSolver(cluster, settings)


def _read_keys(file: Path | None) -> list[str]:
    """Read the API keys from a file, one per line. Raises InputError for a file without keys."""
    if file is None:
        return []
    keys = [line.strip() for line in read_text(file, "--api-keys ").splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise InputError(f"--api-keys {file}: contains no key")
    return keys


def share_of_a_key(requests: int, keys: list[str]) -> int:
    """Return the number of concurrent `requests` that one API key may have.

    With several keys the number is half of `requests`, so that no key can use up all of them.
    """
    return max(1, requests // 2) if len(set(keys)) > 1 else requests


def _set_up_log(*, as_json: bool) -> None:
    from beamwright.serve.server import JsonLines

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("beamwright: %(message)s"))
    logger = logging.getLogger("beamwright.serve")
    logger.handlers[:] = [handler]
    logger.propagate = False
    # Requests are logged at INFO, only with --log-json. Errors are always logged.
    logger.setLevel(logging.INFO if as_json else logging.WARNING)
    logging.getLogger("uvicorn").handlers[:] = [handler]
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
