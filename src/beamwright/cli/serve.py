"""`beamwright serve`: searches for whoever speaks OpenAI's protocol."""

from __future__ import annotations

import logging
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from beamwright.cli.eval_ray import CoresOption, RayOption, ReplicasOption, find_cluster
from beamwright.cli.live import Status
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import complain, first_import, print_json, quiet_stdout
from beamwright.cli.views import Views
from beamwright.errors import InputError, UnavailableError, format_bytes
from beamwright.io import read_regular
from beamwright.search.defaults import resolved
from beamwright.verify.find import check_models

if TYPE_CHECKING:
    from beamwright.cluster.serving import Cluster
    from beamwright.cluster.solver import ClusterSolver
    from beamwright.config import Settings
    from beamwright.engine.timeline import Timeline
    from beamwright.serve.body import ServerLimits
    from beamwright.solver.solver import Solver

_HOST = "127.0.0.1"

_HostOption = Annotated[str, option("--host", "Address to listen at; 0.0.0.0: any.", "ADDRESS")]
_PortOption = Annotated[
    int, option("--port", "Port to listen at; 0: any free one.", "PORT", min=0, max=65535)
]
_KeysOption = Annotated[
    Path | None, option("--api-keys", "A key per line; whoever has none is refused.", "FILE")
]
_NameOption = Annotated[
    str | None, option("--name", "What the model is called (default: its folder's name).", "NAME")
]
_AllowOption = Annotated[
    list[str] | None,
    option("--allow-host", "A name that clients use for this machine, too; repeat it.", "NAME"),
]
_RequestsOption = Annotated[
    int, option("--max-requests", "Searches that run or wait at a time.", "N", min=1)
]
_KeyRequestsOption = Annotated[
    int | None,
    option(
        "--max-requests-per-key",
        "Of these, one key's (default: half of them where there are several keys).",
        "N",
        min=1,
    ),
]
_MostNOption = Annotated[int, option("--max-n", "Candidates of one search.", "N", min=1)]
_TokensOption = Annotated[
    int, option("--max-search-tokens", "Tokens that one search may generate.", "TOKENS", min=1)
]
_SecondsOption = Annotated[
    float, option("--max-seconds", "Of one search; then the best so far is the answer.", "S", min=1)
]
_DrainOption = Annotated[
    float, option("--drain", "Seconds that searches have to end after SIGTERM.", "S", min=0)
]
_TraceOption = Annotated[
    Path | None, option("--trace", "Write a timeline for Perfetto when it ends.", "FILE")
]
_LogOption = Annotated[
    bool, option("--log-json/--no-log-json", "A line of JSON on standard error per request.")
]


@with_settings()
def serve(
    invocation: Invocation,
    host: _HostOption = _HOST,
    port: _PortOption = 8000,
    api_keys: _KeysOption = None,
    name: _NameOption = None,
    allow_host: _AllowOption = None,
    max_requests: _RequestsOption = 64,
    max_requests_per_key: _KeyRequestsOption = None,
    max_n: _MostNOption = 512,
    max_search_tokens: _TokensOption = 1_000_000,
    max_seconds: _SecondsOption = 600.0,
    drain: _DrainOption = 30.0,
    trace: _TraceOption = None,
    log_json: _LogOption = False,
    ray: RayOption = None,
    replicas: ReplicasOption = None,
    replica_cores: CoresOption = None,
) -> None:
    """Serve an OpenAI-compatible API, a page that shows trees growing, and metrics.

    Models are NAME (with the settings given here), NAME:beam and so on, and NAME:plain, which
    samples once. Listens on this machine alone unless --host says otherwise.
    """
    keys, out = _read_keys(api_keys), sys.stdout
    spread = ray or ("local" if replicas or replica_cores else None)
    cluster = find_cluster(spread, replicas, replica_cores, invocation.plugins)
    if cluster is not None and trace is not None:
        raise InputError("--trace does not go with --replicas: a timeline is of one engine")
    views = Views(trace=trace)
    views.check()
    with quiet_stdout():
        check_models(invocation.settings.model)
        try:
            with first_import("torch"):
                from beamwright.serve.body import ServerLimits
                from beamwright.serve.server import bind
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f"serve needs {error.name}: pip install 'beamwright[serve]'"
            ) from error
        limits = ServerLimits(
            requests=max_requests,
            requests_per_key=max_requests_per_key or _share(max_requests, keys),
            n=max_n,
            tokens=max_search_tokens,
            seconds=max_seconds,
            drain_s=drain,
        )
        listening = bind(host, port)
        try:
            names = (name, ["localhost", host, *(allow_host or [])])
            _set_up_log(as_json=log_json)
            _serve(invocation, listening, keys, names, limits, out, views, cluster)
        finally:
            listening.close()


def _serve(
    invocation: Invocation,
    listening: Any,
    keys: list[str],
    names: tuple[str | None, list[str]],
    limits: ServerLimits,
    out: TextIO,
    views: Views,
    cluster: Cluster | None,
) -> None:
    """names: the model's, and those that requests may use. out: standard output."""
    name, hosts = names
    from beamwright.serve.app import make_app
    from beamwright.serve.guard import Guard
    from beamwright.serve.queue import RequestQueue
    from beamwright.serve.server import run
    from beamwright.solver.solver import Solver

    settings = resolved(invocation.settings)
    host, port = listening.getsockname()[:2]
    if not keys and not _is_loopback(host):
        complain(f"anybody who reaches {host}:{port} can use it: --api-keys FILE")
    status, timeline = Status(settings), views.timeline()
    with _engine(settings, cluster, timeline, status) as solver:
        named = name or _served_name(settings.model.model)
        seed = settings.search.seed if "seed" in invocation.given else None
        queue = RequestQueue(solver, named, limits, seed)
        app = Guard(make_app(queue), limits, hosts, keys)
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"

        def started() -> None:
            facts = {"url": url, "base_url": f"{url}/v1", "models": queue.reader.models()}
            if invocation.as_json:
                with redirect_stdout(out):
                    print_json(facts)
                out.flush()
            else:
                held = [each.budget_bytes for each in solver.usage().levels.values()]
                kv = f"; {format_bytes(held[0])} of KV" if held else ""
                if not isinstance(solver, Solver):
                    kv = f"; replicas: {solver.wanted}{kv}"
                complain(f"serving {named} at {url} (API: {url}/v1{kv}). Ctrl-C ends it.")

        run(app, queue, listening, started)
    if timeline is not None and views.trace is not None:
        from beamwright.evaluate.trace_file import write_trace

        write_trace(timeline, views.trace, named)


def _engine(
    settings: Settings, cluster: Cluster | None, timeline: Timeline | None, status: Status
) -> Solver | ClusterSolver:
    from beamwright.solver.solver import Solver

    if cluster is None:
        return Solver(settings, timeline=timeline, progress=status)
    if settings.model.runs_elsewhere:
        spec = settings.model.model
        raise InputError(f"--model {spec} runs elsewhere: it does not go with --replicas")
    from beamwright.cluster.solver import ClusterSolver

    return ClusterSolver.on(cluster, settings, progress=status)


def _read_keys(file: Path | None) -> list[str]:
    """Raises InputError for a file without keys."""
    if file is None:
        return []
    try:
        text = read_regular(file).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "is no text"
        raise InputError(f"--api-keys {file}: {why}") from error
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise InputError(f"--api-keys {file}: there is no key in it")
    return keys


def _served_name(model: str) -> str:
    if model.startswith("hf:"):
        model = model.removeprefix("hf:").partition("@")[0]
    return Path(model).name or model


def _share(requests: int, keys: list[str]) -> int:
    """Places of one key, so that none takes all of them from the others."""
    return max(1, requests // 2) if len(set(keys)) > 1 else requests


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def _set_up_log(*, as_json: bool) -> None:
    from beamwright.serve.guard import JsonLines

    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("beamwright: %(message)s"))
    logger = logging.getLogger("beamwright.serve")
    logger.handlers[:] = [handler]
    logger.propagate = False
    # Requests are told of in JSON only; what fails always is.
    logger.setLevel(logging.INFO if as_json else logging.WARNING)
    logging.getLogger("uvicorn").handlers[:] = [handler]
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
