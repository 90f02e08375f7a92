"""llama-server's own protocol: what it is asked, and what its replies mean."""

import threading
import time

import pytest

import engines
from beamwright import Solver
from beamwright.errors import InputError, UnavailableError
from beamwright.remote.dialects import CROWDED
from beamwright.sections import SamplingSettings
from scripted_server import PROPS, answered, drawn, llama_server, question, refuses, waited
from tables import beside

TABLES = beside(__file__)


def test_it_is_found_by_what_it_says_of_itself_and_all_that_changes_a_draw_is_said(
    codec, source_of
):
    with llama_server(codec, lambda body: (200, drawn(codec, "x"))) as server:
        source = source_of(server)
        assert (source.name, source.most, source.context) == ("m.gguf", 3, 512)
        assert (source.token_ids, source.dialect.streams) == (True, False)
        assert server.paths == ["/completion"]
        answered(source, question(codec, stops=()))
        sampling = SamplingSettings(temperature=0.5, top_k=7, min_p=0.1, top_p=0.9)
        more = {"count": 1, "sampling": sampling, "ignore_eos": True, "stops": tuple("abcdef")}
        answered(source, question(codec, **more))
    plain, full = server.asked
    del plain["response_fields"]
    assert plain == {**TABLES["asked"], "prompt": codec.encode("one two")}
    wanted = {"temperature": 0.5, "top_k": 7, "min_p": 0.1, "top_p": 0.9, "ignore_eos": True}
    assert {name: full[name] for name in wanted} == wanted
    assert full["stop"] == list("abcdef"), "all of them: it has no bound"


ENDS = [("c\n\n", "word", "\n\n", "stop"), ("a", "limit", "", "length"), ("b", "eos", "", "eos")]


def test_siblings_are_one_question_and_come_in_their_order_with_their_ends(codec, source_of):
    def answer(body):
        texts = zip((2, 0, 1), ENDS, strict=True)
        return 200, [drawn(codec, text, i, kind, word) for i, (text, kind, word, _) in texts]

    with llama_server(codec, answer) as server:
        reply = answered(source_of(server), question(codec, count=3))
    assert [body["n_cmpl"] for body in server.asked] == [3]
    assert (reply.prompt_tokens, reply.cached_tokens) == (7, 5)
    for written, (text, _, word, ended) in zip(reply.written, (*ENDS[1:], ENDS[0]), strict=True):
        ids = tuple(codec.encode(text))
        assert (written.ended, written.text, written.token_ids) == (ended, text, ids)
        assert written.logprobs == (-0.25,) * (len(ids) - len(codec.encode(word)))


@pytest.mark.parametrize("options", [{"verifier": "none"}, {"stop_strings": ("a", "qq")}])
def test_trees_are_those_of_the_model_here(codec, far, generator_folder, options):
    """An imitation that has its texts of a real model, at temperature 0."""

    def answer(body):
        same = ("prompt", "temperature", "seed", "stop")
        asked = {name: body[name] for name in same} | {"model": "tiny:plain", "logprobs": 1}
        asked |= {"max_tokens": body["n_predict"], "return_token_ids": True}
        found = far.http.post("/v1/completions", json=asked).json()["choices"][0]
        ids, text = found["token_ids"], found["text"]
        stop = next((s for s in body["stop"] if codec.decode(ids).startswith(text + s)), "")
        kind = "limit" if found["finish_reason"] == "length" else "word" if stop else "eos"
        values = found["logprobs"]["token_logprobs"]
        probs = [{"id": i, "logprob": value} for i, value in zip(ids, values, strict=True)]
        fields = {"tokens": ids, "completion_probabilities": probs}
        return 200, drawn(codec, text + stop, 0, kind, stop, **fields)

    given = {"temperature": 0.0, "n": 4, "width": 2, "max_rounds": 4, "max_step_tokens": 12}
    given |= {"max_tokens": 40, "delimiter": "e", "verifier": "logprob", "system_prompt": ""}
    given |= options
    with llama_server(codec, answer) as server:
        model = {"model": f"openai:{server.url}", "tokenizer": str(generator_folder)}
        with Solver(**model, **given) as solver:
            there = solver.solve(engines.PROBLEM)
    with engines.tiny_solver(generator_folder, **given) as solver:
        here = solver.solve(engines.PROBLEM)
    assert there.tree_hash == here.tree_hash
    assert there.remote.token_ids
    assert len(server.asked) == there.remote.requests > 4


@pytest.mark.parametrize(
    ("props", "start"),
    [
        (None, None),  # another program, which calls its models so
        (PROPS, (404, {"error": {"message": "File Not Found"}})),
        (PROPS, (200, {"content": " 2 and", "stop": True, "stopped_eos": False})),  # before 2025
        (PROPS, (200, {"index": 0, "content": "", "tokens": [], "stop_type": "limit"})),
    ],
)
def test_one_that_says_too_little_is_asked_as_all_others_are(codec, source_of, props, start):
    with llama_server(codec, props=props, start=start) as server:
        source = source_of(server)
    assert (source.most, source.dialect.streams, source.context) == (1, True, 0)
    assert server.paths[-1] == "/v1/completions"


def test_one_with_other_tokens_is_refused(codec, source_of):
    start = (200, drawn(codec, " 2 and", content=" what"))
    with (
        llama_server(codec, start=start) as server,
        pytest.raises(InputError, match="the server's tokens do not match --tokenizer"),
    ):
        source_of(server)


@pytest.mark.parametrize("slots", [None, 0, -1, "many", True, [], 2**60])
def test_odd_slots_are_one(codec, source_of, slots):
    with llama_server(codec, props={**PROPS, "total_slots": slots}) as server:
        assert source_of(server).most == 1


@pytest.mark.parametrize("odd", TABLES["odd"])
def test_an_odd_reply_is_an_error_of_its_question(codec, source_of, monkeypatch, odd):
    monkeypatch.setattr("beamwright.remote.generator.MOST_TRIES", 2)
    whole = {**drawn(codec, "x"), **odd} if isinstance(odd, dict) and odd else odd
    with llama_server(codec, lambda body: (200, whole)) as server:
        error = answered(source_of(server), question(codec)).error
    assert isinstance(error, InputError | UnavailableError)
    assert "\n" not in str(error)


def test_slots_that_share_too_small_a_cache_are_asked_in_turn(codec, source_of):
    """All that run fail at once, and would again if all were asked again."""
    running, most, lock = 0, [], threading.Lock()

    def answer(body):
        nonlocal running
        with lock:
            running += 1
            most.append(running)
        time.sleep(0.05)
        with lock:
            crowded, running = running > 1, running - 1
        return refuses(CROWDED, 500) if crowded else (200, drawn(codec, "x"))

    with llama_server(codec, answer) as server:
        source, replies = source_of(server), []
        for key in range(3):
            source.send(key, question(codec))
        while len(replies) < 3:
            replies += waited(source)
    assert not [reply.error for reply in replies if reply.error]
    assert max(most) > 1
    assert most[-2:] == [1, 1]
