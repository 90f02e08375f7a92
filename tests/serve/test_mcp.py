"""The one tool of `beamwright mcp`, asked by the protocol's own client."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("mcp")
import mcp

from beamwright.cli.mcp import make_server
from beamwright.errors import Cancelled, InputError
from beamwright.serve.body import ServerLimits
from beamwright.serve.queue import RequestQueue
from engines import assert_nothing_allocated
from served import ASKED, PATIENCE, held, until
from tables import beside

EGGS = (
    "Jack has 70 eggs. In April Jack gets 9 eggs. In May Jack sells 19 eggs. "
    "How many eggs does Jack have now?"
)
HALF = '{"jsonrpc": "2.0", "id": %s, "method": "tools/call", "params": {"name": "\\ud83d"}}'
ODD_LINES = [
    *((HALF % json.dumps(number), number) for number in (7, "a")),
    (HALF.replace("name", "\\udc00") % 8, 8),
    ('{"jsonrpc": "2.0", "id": 9, "method"', None),
    ('{"jsonrpc": "2.0", "id": 10}', 10),
]
"""What is no request, and whose error it is."""

COMMAND = [sys.executable, "-m", "beamwright", "mcp", "--n", "8", "--width", "4"]


@pytest.fixture
def queue(engine):
    with engine(search="beam", n=8, width=4, max_rounds=4, max_step_tokens=12) as solver:
        yield RequestQueue(solver, "tiny", ServerLimits(drain_s=5.0), seed=1)


def talk(load, conversation, **options):
    """What a client of this server has to say."""

    async def run():
        async with mcp.Client(make_server(load), **options) as client:
            return await asyncio.wait_for(conversation(client), PATIENCE)

    return asyncio.run(run())


def solve(client, problem=ASKED, **arguments):
    return client.call_tool("solve", {"problem": problem, **arguments})


# --- the command -----------------------------------------------------------------------------


def asked(server, **options):
    """The tools of a server, and its answers to the same problem, by 8 and by 16."""

    async def run():
        async with mcp.Client(server, **options) as client:
            tools = (await client.list_tools()).tools
            return tools, [await solve(client, EGGS, n=n, seed=1) for n in (8, 16)]

    (tool,), found = asyncio.run(run())
    assert (tool.name, tool.input_schema["required"]) == ("solve", ["problem"])
    one, other = (each.structured_content for each in found)
    assert one["answer"] == other["answer"] == "60"
    assert sum(one["answers"].values()) <= 8
    assert one["tree_hash"] != other["tree_hash"]
    assert found[0].content[0].text.startswith("Answer: 60\nScore ")


@pytest.mark.nightly
def test_a_client_starts_it_and_gets_an_answer():
    odd = []

    async def hear(message):
        odd.extend([message] if isinstance(message, Exception) else [])

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = mcp.StdioServerParameters(command=COMMAND[0], args=COMMAND[1:], env=env)
    asked(server, message_handler=hear)
    assert not odd, "standard output is the protocol's alone"


@pytest.mark.nightly
def test_it_is_had_by_http_too():
    command = [*COMMAND, "--http", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            asked(json.loads(server.stdout.readline())["url"])
        finally:
            server.terminate()


def test_ctrl_c_ends_it_at_once_and_only_the_protocol_is_printed():
    said = {"capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize"}
    hello["params"] = {"protocolVersion": "2025-06-18", **said}
    with subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        server.stdin.write(f"{json.dumps(hello)}\n")
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["result"]["serverInfo"]["name"] == "beamwright"
        for odd, number in ODD_LINES:
            server.stdin.write(f"{odd}\n")
            server.stdin.flush()
            reply = json.loads(server.stdout.readline())
            assert (reply["id"], reply["error"]["code"]) == (number, -32700)
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE) == -signal.SIGINT
        assert server.stdout.read() == ""


def test_without_the_extra_a_line_says_what_to_install(monkeypatch, capsys):
    from beamwright.cli import main

    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    assert main(["mcp"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "pip install 'beamwright[mcp]'" in captured.err


# --- the tool --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_every_round_is_told(queue, mode):
    told = []

    async def hear(progress, total, message):
        told.append((progress, message))

    async def conversation(client):
        arguments = {"problem": ASKED, "n": 4, "width": 2, "seed": 7, "deadline_s": 60}
        return await client.call_tool("solve", arguments, progress_callback=hear)

    found = talk(lambda: queue, conversation, mode=mode).structured_content
    assert [number for number, _ in told] == [*range(1, found["rounds"] + 1)]
    assert told[0][1].startswith("Round 1: 4 candidates")
    assert found["seed"] == 7
    same = queue.solver.solve(ASKED, n=4, width=2, seed=7)
    assert (found["tree_hash"], found["tokens"]) == (same.tree_hash, same.tokens.generated)


def test_what_is_wrong_is_a_line(queue):
    wrong = beside(__file__)["wrong"]
    wrong["This model's maximum context length is"] = {"problem": "many words " * 1000}

    async def conversation(client):
        results = [await solve(client, **arguments) for arguments in wrong.values()]
        return [*results, await client.call_tool("sovle", {})]

    results = talk(lambda: queue, conversation)
    assert all(result.is_error for result in results)
    lines = [result.content[0].text for result in results]
    for said, line in zip([*wrong, "unknown tool sovle"], lines, strict=True):
        assert said in line
        assert "\n" not in line


def test_one_that_is_cancelled_frees_its_kv(queue):
    handles = []

    async def conversation(client):
        with held(SimpleNamespace(queue=queue)) as gate:
            task = asyncio.create_task(solve(client))
            await asyncio.to_thread(until, lambda: gate.reached)
            handles.extend(job.handle for job in queue.jobs.values())
            task.cancel()
            await asyncio.wait([task])
        await asyncio.to_thread(until, lambda: not queue.jobs)
        return await solve(client)

    assert talk(lambda: queue, conversation, mode="legacy").structured_content
    with pytest.raises(Cancelled):
        handles[0].result(30)
    assert_nothing_allocated(queue.solver)


def test_models_that_cannot_be_loaded_are_told_of():
    def load():
        raise InputError("--memory 1GiB: too little")

    result = talk(load, solve)
    assert (result.is_error, result.content[0].text) == (True, "--memory 1GiB: too little")
