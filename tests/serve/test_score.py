"""`POST /v1/score`: scores of steps that clients give, beside searches."""

import json
import shlex

import pytest

import documents
from beamwright.serve.body import ServerLimits
from served import PATIENCE, held, until
from tables import beside

CASES = beside(__file__)


def lengths(problem, steps):
    if "fail" in steps[-1]:
        raise ValueError("as it says")
    return None if "silent" in steps[-1] else 1 / (1 + len(steps[-1]))


@pytest.fixture
def server(serve):
    return serve({"verifier": lengths, "delimiter": "\n"})


def score(server, steps, **fields):
    return server.http.post("/v1/score", json={"problem": "1+1", "steps": steps, **fields})


def test_a_path_has_a_score_a_step_and_one_of_its_own(server):
    reply = score(server, ["one", "", "three"], aggregate="min").json()
    assert reply["data"] == [
        {"index": 0, "object": "score", "score": 1 / 6, "scores": [1 / 5, None, 1 / 6]}
    ]
    assert (reply["object"], reply["model"], reply["warnings"]) == ("list", "tiny", [])
    (doubt,) = score(server, [["silent"], ["silent", "one"]]).json()["warnings"]
    assert doubt.startswith("2 of 3 steps got no score from the verifier")
    assert reply["id"].startswith("score-")
    several = score(server, [["one", "three"], ["three"]], delimiter="").json()
    assert [each["scores"] for each in several["data"]] == [[1 / 4, 1 / 6], [1 / 6]]
    messages = [{"role": "user", "content": "1+1"}]
    body = {"model": "tiny", "messages": messages, "steps": ["one"], "user": "me"}
    assert server.http.post("/v1/score", json=body).json()["data"] == [
        {"index": 0, "object": "score", "score": 1 / 4, "scores": [1 / 4]}
    ]


def test_the_guides_request_is_one(server):
    page = documents.ROOT / "docs" / "guides" / "serve.md"
    (shown,) = (fence.text for fence in documents.fences(page) if "/v1/score" in fence.text)
    reply = server.http.post("/v1/score", json=json.loads(shlex.split(shown)[-1]))
    assert len(reply.json()["data"][0]["scores"]) == 2


def test_tokens_that_the_verifier_read_are_counted(serve, verifier_folder):
    server = serve({"verifier": str(verifier_folder)})
    paths = [["one", "two"], ["one", "three"]]
    apart = [score(server, [path]).json() for path in paths]
    together = score(server, paths).json()
    assert [each["data"][0]["scores"] for each in apart] == [
        each["scores"] for each in together["data"]
    ]
    read = [each["usage"]["prompt_tokens"] for each in (*apart, together)]
    assert 0 < max(read[:2]) < read[2] < sum(read[:2])
    assert together["usage"]["total_tokens"] == read[2]
    seen = server.http.get("/metrics").text
    assert f'beamwright_tokens_total{{kind="verifier"}} {float(sum(read))}' in seen
    assert 'beamwright_scores_total{outcome="done"} 3.0' in seen
    assert "beamwright_search_seconds_count 0.0" in seen
    assert "beamwright_goodput_tokens_per_second_count 0.0" in seen
    (shown, *_) = server.http.get("/feed/searches").json()["searches"]
    assert (shown["method"], shown["n"], shown["state"]) == ("score", 2, "done")
    events = server.http.get(f"/feed/searches/{shown['id']}").text
    assert "three" in events


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        *CASES["wrong"],
        ({"steps": [["one"]] * 513}, "steps", "513 paths exceed the limit 512"),
        ({"steps": ["one"] * 1025}, "steps", "at most 1024 items"),
        ({"steps": ["x" * 100_000]}, "steps", "maximum context length is"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(server, fields, param, words):
    reply = score(server, **{"steps": ["one"], **fields})
    error = reply.json()["error"]
    assert reply.status_code == (404 if "model" in fields else 400)
    assert error["param"] == param
    assert words in error["message"]
    assert "\n" not in error["message"]


def test_scores_come_while_a_search_is_under_way_and_are_bounded_like_it(serve):
    server = serve({"verifier": lengths}, limits=ServerLimits(requests=3))
    with held(server) as gate:
        searches = [server.later(seed=1) for _ in range(2)]
        until(lambda: gate.reached and len(server.queue.jobs) == 2)
        scored = server.threads.submit(score, server, ["one"])
        until(lambda: len(server.queue.jobs) == 3)
        refused = score(server, ["one"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert scored.result(PATIENCE).json()["data"][0]["score"] == 1 / 4
    assert {search.result(PATIENCE).status_code for search in searches} == {200}
