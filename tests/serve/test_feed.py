"""The feed: what a live search appends, what readers get from any number on, what is forgotten."""

import asyncio
import json
import math

import pytest
from fastapi.testclient import TestClient

import feeding
from beamwright.engine.decisions import store_answers
from beamwright.errors import Cancelled, InputError
from beamwright.protocols import RoundReport
from beamwright.search.answers import Mathematics
from beamwright.serve import feed as feed_module
from beamwright.serve.body import ServerLimits
from beamwright.serve.feed import POLICY, Feed
from beamwright.tree import StopReason
from fakes import add_step, grow, new_tree
from tables import beside

HOSTILE = '</script><img src=x onerror="alert(1)"> \u2028 \ud800'


def job(number=0, **options):
    return feeding.Job(f"search-{number}", "What is 1+1?", options)


def report(tree):
    return RoundReport(tree, tree.rounds, (), (), (), (), 1.5 * tree.rounds)


def events(run, start=0):
    async def read():
        return b"".join([lines async for lines in run.follow(start)])

    return [json.loads(line) for line in asyncio.run(read()).splitlines() if line]


@pytest.fixture
def feed():
    return Feed()


@pytest.fixture
def grown(feed):
    """A search of two rounds in a feed, and its tree; it has not ended."""
    asked, tree = job(n=3), new_tree("search-0", text="What is 1+1?")
    feed.on_begun(asked)
    first, second, third = grow(tree, tree.root, ["Add. ", HOSTILE, "Wait. "])
    first.score, second.score, third.score = 0.9, 0.25, math.inf
    tree.keep(first)
    tree.prune(second)
    tree.prune(third)
    tree.rounds = 1
    (opened,) = tree.expand(first, 1)
    feed.on_round(asked, report(tree))
    add_step(tree, opened, "The answer is $2$.", (7, 8, 9), StopReason.EOS)
    opened.usage["speculated_kept"] = 2
    store_answers(Mathematics(), [opened])
    tree.finish(opened)
    tree.rounds = 2
    feed.on_round(asked, report(tree))
    return asked, tree


# --- what is appended ------------------------------------------------------------------------


def test_a_step_is_sent_once_and_then_what_has_changed(feed, grown):
    asked, _ = grown
    feed.on_ended(asked, Cancelled())
    run = feed.run(asked.id)
    begun, first, second, last = events(run)
    assert (events(run, 2), events(run, 99)) == ([second, last], []), "readers go on anywhere"
    assert (begun["event"], begun["problem"], begun["n"]) == ("begin", "What is 1+1?", 3)
    assert [node["lineage"] for node in first["nodes"]] == ["", "0", "0.0", "1", "2"]
    assert (first["round"], first["elapsed_s"]) == (1, 1.5)
    (answer,) = second["nodes"]
    assert answer["lineage"] == "0.0"
    assert (answer["state"], answer["text"], answer["tokens"]) == (
        "finished", "The answer is $2$.", 3,
    )  # fmt: skip
    assert (answer["answer"], answer["vote"], answer["ahead"]) == ("2", "2", 2)
    assert (last["event"], last["state"]) == ("end", "cancelled")
    nodes = {node["lineage"]: node for node in first["nodes"]}
    assert [nodes[name]["score"] for name in ("0", "1", "2")] == [0.9, 0.25, None]
    assert nodes["1"]["text"] == HOSTILE


@pytest.mark.parametrize(
    ("error", "shown"),
    [(InputError("too long"), "too long"), (RuntimeError("/etc"), "RuntimeError")],
)
def test_a_failure_says_only_what_is_fit_to_show(feed, error, shown):
    feed.on_begun(job())
    feed.on_ended(job(), error)
    last = events(feed.run("search-0"))[-1]
    assert (last["state"], last["error"]) == ("failed", shown)


# --- who reads -------------------------------------------------------------------------------


def test_a_reader_follows_what_another_thread_appends(feed, monkeypatch):
    monkeypatch.setattr(feed_module, "KEEP_ALIVE_S", 0.01)
    feed.on_begun(job())

    async def read():
        lines, silent = [], True
        async for part in feed.run("search-0").follow(0):
            if part == b"\n" and silent:  # nothing has happened for a while
                silent = False
                await asyncio.to_thread(feed.on_round, job(), report(new_tree("search-0")))
                await asyncio.to_thread(feed.on_ended, job(), Cancelled())
            lines += [json.loads(line) for line in part.splitlines() if line]
        return lines

    assert [line["event"] for line in asyncio.run(read())] == ["begin", "round", "end"]


# --- what is kept ----------------------------------------------------------------------------


def test_the_oldest_that_have_ended_are_forgotten():
    feed = Feed(most=2)
    for number in range(4):
        feed.on_begun(job(number))
        if number != 1:
            feed.on_ended(job(number), Cancelled())
    assert [run.begin["id"] for run in feed.runs()] == ["search-3", "search-1"]


# --- HTTP ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "content", "status", "said"), beside(__file__)["refused"])
def test_what_is_refused(served, monkeypatch, path, content, status, said):
    method = "GET" if content is None else "POST"
    monkeypatch.setattr(served.queue, "limits", ServerLimits(body_bytes=1000, depth=8))
    json_body = {"content-type": "application/json"}
    refused = served.http.request(method, path, content=content, headers=json_body)
    assert refused.status_code == status
    assert said in refused.text


def test_a_page_that_only_shows_takes_no_problem(feed):
    page = TestClient(feeding.make_app(feed))
    assert page.post("/feed/searches", json={"problem": "p"}).status_code == 405


@pytest.mark.parametrize(
    ("path", "parts"), [("/", {"main.js", "tree.js", "page.css"}), ("/docs", {"docs.js", "api.js"})]
)
def test_every_file_of_a_page_is_served_with_the_policy(served, path, parts):
    page = served.http.get(path)
    assert page.status_code == 200
    assert page.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert not [inline for inline in ("<style", " style=", "<script>") if inline in page.text]
    waiting, seen = [part.split('"')[0] for part in page.text.split('"/page/')[1:]], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        part = served.http.get(f"/page/{name}")
        assert part.status_code == 200, name
        assert part.headers["content-security-policy"] == POLICY
        waiting += [each.split('"')[0] for each in part.text.split('from "./')[1:]]
        assert "innerHTML" not in part.text
        assert "insertAdjacentHTML" not in part.text
    assert parts <= seen
