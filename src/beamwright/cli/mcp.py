"""`beamwright mcp`: one tool, `solve`, for agents that use the Model Context Protocol.

Searches use the request queue of `serve`, with the queue's limits and one-line errors. Standard
output carries only the protocol's messages.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

import beamwright
from beamwright.cli.options import Invocation, option, with_settings
from beamwright.cli.output import (
    needs_extra,
    one_line,
    pause_gc_for_import,
    print_error_line,
    print_json,
    quiet_stdout,
)
from beamwright.errors import BeamwrightError, InputError
from beamwright.io import nonfinite_as_null
from beamwright.verify.find import check_models

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext as Context
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult

    from beamwright.serve.queue import RequestQueue
    from beamwright.solver.solution import Solution

    # The task that loads the models and returns the queue; done once they are loaded.
    Loading = asyncio.Task[RequestQueue]

_HOST = "127.0.0.1"
_ABOUT = (
    "Solve one hard problem with a short, checkable answer by tree search: a local model writes "
    "many attempts step by step, a verifier keeps the best. Takes seconds to minutes. Give the "
    "whole problem in words. Doubt an answer that comes with warnings or a low score."
)

_GIVEN: dict[str, dict[str, Any]] = {
    "problem": {"type": "string", "minLength": 1, "description": "The whole problem."},
    "n": {"type": "integer", "minimum": 1, "description": "Candidates; a multiple of width."},
    "width": {"type": "integer", "minimum": 1, "description": "Children per survivor."},
    "search": {"type": "string", "description": "The strategy, such as beam or majority."},
    "seed": {"type": "integer", "description": "Equal seeds give equal trees."},
    "deadline_s": {
        "type": "number",
        "description": "Limit on the search in seconds.",
    },
}
# JSON schema of the tool's arguments. If a call omits an argument, the server's setting applies.
# The request queue checks the limits.
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": _GIVEN,
    "required": ["problem"],
    "additionalProperties": False,
}

# JSON types of the tool's result. answers: the number of candidates for each answer, the most
# frequent answer first.
_RETURNED: dict[str, Any] = {
    **{"answer": ["string", "null"], "text": "string", "score": ["number", "null"]},
    **{"tree_hash": "string", "seed": "integer", "rounds": "integer", "warnings": "array"},
    **{"tokens": "integer", "seconds": "number", "answers": "object"},
}


@with_settings()
def mcp(
    invocation: Invocation,
    http: bool = option(False, f"Use streamable HTTP at {_HOST} instead of standard input."),
    port: int = option(8001, "Port of --http; 0: any free port.", "PORT", min=0, max=65535),
) -> None:
    """Serve one tool, `solve`, over the Model Context Protocol, on standard input and output.

    The MCP client starts this command. The models are loaded once, while the client connects.
    """
    if invocation.as_json and not http:
        raise InputError("--json needs --http: without it, standard output carries the protocol")
    with quiet_stdout():
        check_models(invocation.settings.model)
        with needs_extra("mcp", "mcp"):
            from mcp.server.stdio import stdio_server

            from beamwright.serve.body import ServerLimits
            from beamwright.serve.server import bind, run_app
        listening = bind(_HOST, port) if http else None

    def load() -> RequestQueue:
        with pause_gc_for_import("torch"):
            from beamwright.serve.queue import RequestQueue
            from beamwright.solver.solver import Solver
        seed = invocation.settings.search.seed if "seed" in invocation.given else None
        solver = Solver(invocation.settings)
        return RequestQueue(solver, "beamwright", ServerLimits(), seed)

    server = make_server(load)

    async def serve() -> None:
        # The protocol uses file descriptor 1, so all other output goes to standard error.
        async with stdio_server() as (read, write):
            with quiet_stdout():
                options = server.create_initialization_options()
                await server.run(_answered(read, write), write, options)

    if listening is None:
        # With Python's own handler, Ctrl-C would wait for the thread that reads standard input.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        asyncio.run(serve())
        return
    url = f"http://{_HOST}:{listening.getsockname()[1]}/mcp"
    if invocation.as_json:
        print_json({"url": url})
        sys.stdout.flush()
    else:
        print_error_line(f"MCP server at {url}. Stop with Ctrl-C.")
    run_app(server.streamable_http_app(), listening, "critical")


async def _answered(read: Any, write: Any) -> AsyncIterator[Any]:
    """Yield a client's valid messages, and answer each invalid message with an error.

    Without this, the SDK would drop an invalid message without a reply.
    """
    from mcp.shared.message import SessionMessage
    from mcp_types import ErrorData, JSONRPCError

    async with read:
        async for message in read:
            if not isinstance(message, ValidationError):
                yield message
                continue
            first, number = message.errors()[0], None
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                # The SDK rejects JSON with lone surrogates; Python's parser accepts it.
                given = first["input"]
                number = (given if isinstance(given, dict) else json.loads(given))["id"]
            number = number if type(number) in (int, str) else None
            said = ErrorData(code=-32700, message=first["msg"])
            await write.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=number, error=said)))


def make_server(load: Callable[[], RequestQueue]) -> Server[Loading]:
    """Build a server with the tool `solve`.

    load: loads the models and returns the queue of the searches; called in a thread.
    """
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

    from beamwright.serve.body import ApiError

    returned = {name: {"type": kind} for name, kind in _RETURNED.items()}
    output = {"type": "object", "properties": returned, "required": [*returned]}
    tool = Tool(name="solve", description=_ABOUT, input_schema=_SCHEMA, output_schema=output)

    async def tools(ctx: Context[Loading], params: object) -> ListToolsResult:
        del ctx, params
        return ListToolsResult(tools=[tool])

    async def call(ctx: Context[Loading], params: CallToolRequestParams) -> CallToolResult:
        try:
            if params.name != tool.name:
                raise InputError(f"unknown tool {params.name}. The only tool is {tool.name}")
            result = _result_fields(await _solve(ctx, params.arguments or {}))
        except (ApiError, BeamwrightError) as error:
            line = one_line(str(error)).removeprefix("search.")
            return CallToolResult(content=[TextContent(text=line)], is_error=True)
        return CallToolResult(
            content=[TextContent(text=_result_text(result))], structured_content=result
        )

    @asynccontextmanager
    async def lifespan(server: Server[Loading]) -> AsyncIterator[Loading]:
        del server
        loading = asyncio.create_task(asyncio.to_thread(load))
        try:
            yield loading
        finally:  # the client has disconnected, so its searches are cancelled and end at once
            with suppress(BeamwrightError):  # every call has reported a failed loading already
                queue = await loading
                await queue.drain()
                await asyncio.to_thread(queue.solver.close)

    return Server(
        "beamwright",
        version=beamwright.__version__,
        lifespan=lifespan,
        on_list_tools=tools,
        on_call_tool=call,
    )


async def _solve(ctx: Context[Loading], given: Mapping[str, Any]) -> Solution:
    """Run the search that a tool call requests, and report every round to the client.

    Raises:
        ApiError, BeamwrightError: for wrong arguments or a failed search.
    """
    options = dict(given)
    for name in options.keys() - _SCHEMA["properties"]:
        raise InputError(f"unknown argument {name:.40}")
    problem = options.pop("problem", None)
    if not isinstance(problem, str) or not problem.strip():
        raise InputError("problem: must be a text that is not empty")
    seconds = options.pop("deadline_s", None)
    if seconds is not None and not (type(seconds) in (int, float) and seconds > 0):
        raise InputError("deadline_s: must be a positive number of seconds")
    options["deadline"] = seconds
    # `shield`, because a call that is cancelled while it waits must not stop the loading of models.
    queue: RequestQueue = await asyncio.shield(ctx.lifespan_context)
    job = await queue.begin_search(problem, options)
    try:
        async for _ in job.changes():
            rounds, job.rounds = job.rounds, []
            for each in rounds:
                await ctx.session.report_progress(each.number, message=str(each).strip())
        return await job.solution()
    finally:  # free the KV if the call was cancelled; an ended search is not changed
        job.cancel()


def _result_fields(solution: Solution) -> dict[str, Any]:
    answers = Counter(each.answer for each in solution.candidates if each.answer is not None)
    result = {name: getattr(solution, name) for name in _RETURNED if hasattr(solution, name)}
    result |= {"warnings": list(solution.warnings), "tokens": solution.tokens.generated}
    result |= {"seconds": round(solution.time.total_s, 3), "answers": dict(answers.most_common())}
    return dict(nonfinite_as_null(result))


def _result_text(result: Mapping[str, Any]) -> str:
    """Return the result of a search as text for the calling model."""
    answer, score = result["answer"], result["score"]
    votes = ", ".join(f"{one_line(each)} ({n})" for each, n in list(result["answers"].items())[:5])
    lines = [
        f"No answer was stated. {result['text']}" if answer is None else f"Answer: {answer}",
        f"Score {'-' if score is None else f'{score:.3g}'}; answers: {votes or 'none'}.",
        *(f"Warning: {warning}" for warning in result["warnings"]),
    ]
    return "\n".join(lines)
