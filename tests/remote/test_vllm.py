"""vLLM's engine as a generator: with vLLM where it is installed, else with what it is called by.

The stand-in has the few calls that are made, as vLLM 0.32 has them, and a script for an engine.
"""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

from beamwright import Solver
from beamwright.errors import InputError, UnavailableError
from beamwright.remote.vllm import VllmSource
from beamwright.remote.writer import PromptRequest
from beamwright.sections import ModelSettings, SamplingSettings

PROBLEM = "Ann has 3 apples and eats one. How many apples has she?"


@pytest.mark.filterwarnings("ignore")  # of what it imports
def test_the_likeliest_trees_are_those_of_the_model_here():
    """In float32, token for token, on whatever vLLM runs on here."""
    pytest.importorskip("vllm")
    options = {"verifier": "bundled", "temperature": 0.0, "n": 4, "width": 2, "dtype": "float32"}
    # Blocks of 128 tokens, as on a CPU, would never be shared by so short prompts.
    model = "vllm:bundled?enforce_eager=true&block_size=32&enable_chunked_prefill=false"
    model += "&max_num_batched_tokens=4096"
    with Solver(model=model, **options) as solver:
        far = solver.solve(PROBLEM)
        drawn = solver.solve(PROBLEM, temperature=0.8)
        assert solver.solve(PROBLEM, temperature=0.8).tree_hash == drawn.tree_hash
    with Solver(model="bundled", **options) as solver:
        here = solver.solve(PROBLEM)
    assert far.tree_hash == here.tree_hash
    assert far.remote.cached_tokens > 0


# --- what it is called by --------------------------------------------------------------------


@dataclass
class Engine:
    """Answers what a test says, a request per step."""

    added: dict = field(default_factory=dict)
    aborted: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    fails: Exception | None = None
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=77))

    def add_request(self, name, prompt, params):
        if self.fails is not None:
            raise self.fails
        self.added[name] = (prompt, params)

    def step(self):
        if self.fails is not None:
            raise self.fails
        return [self.outputs.pop(0)] if self.outputs else []

    def abort_request(self, names):
        self.aborted += names

    def writes(self, name, *texts, reason="stop", stop="\n\n"):
        likeliest = [{7: SimpleNamespace(logprob=-0.5)}, {8: SimpleNamespace(logprob=-1.5)}]
        told = {"token_ids": [7, 8], "finish_reason": reason, "stop_reason": stop}
        written = [
            SimpleNamespace(index=number, text=text, logprobs=likeliest, **told)
            for number, text in enumerate(texts)
        ]
        told = {"finished": True, "prompt_token_ids": [5, 6, 1], "num_cached_tokens": 2}
        self.outputs.append(SimpleNamespace(request_id=name, outputs=written[::-1], **told))


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    module = ModuleType("vllm")
    module.LLM = lambda folder, **given: SimpleNamespace(llm_engine=engine, given=given)
    module.SamplingParams = SimpleNamespace
    module.TokensPrompt = lambda **given: given
    module.sampling_params = ModuleType("vllm.sampling_params")
    module.sampling_params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module.sampling_params)
    return engine


@pytest.fixture
def source(engine, generator_folder):
    return VllmSource(generator_folder, {}, ModelSettings(model="vllm:x"))


def ask(source, *keys):
    sampling = SamplingSettings(temperature=0.5)
    for key in keys:
        source.ask(key, PromptRequest((5, 6), lambda: "", 2, 3, 9, sampling, ("\n\n",)))


def test_a_question_and_its_texts(engine, source):
    assert (source.context, source.token_ids) == (77, True)
    ask(source, "key")
    ((name, (prompt, params)),) = engine.added.items()
    assert prompt == {"prompt_token_ids": [5, 6]}
    assert (params.n, params.seed, params.max_tokens, params.stop) == (2, 3, 9, ["\n\n"])
    assert (params.temperature, params.top_k, params.min_p) == (0.5, 0, 0.0)
    engine.writes(name, "a\n\n", "b\n\n")
    (reply,) = source.wait(1.0)
    assert (reply.key, [each.text for each in reply.written]) == ("key", ["a\n\n", "b\n\n"])
    assert (reply.written[0].token_ids, reply.written[0].logprobs) == ((7, 8), (-0.5, -1.5))
    assert (reply.prompt_tokens, reply.cached_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("reason", "stop", "ended"),
    [
        ("stop", "\n\n", "stop"),
        ("stop", None, "eos"),
        ("stop", 2, "eos"),
        ("length", None, "length"),
        ("abort", None, UnavailableError),
    ],
)
def test_how_texts_end(engine, source, reason, stop, ended):
    ask(source, "key")
    engine.writes("0", "x", reason=reason, stop=stop)
    (reply,) = source.wait(1.0)
    assert (reply.written[0].ended if reply.written else type(reply.error)) == ended


def test_what_it_refuses_is_that_question(engine, source):
    engine.fails = ValueError("too long")
    ask(source, "one")
    engine.fails = None
    ask(source, "two")
    (reply,) = source.wait(1.0)
    assert (reply.key, str(reply.error)) == ("one", "vLLM: ValueError: too long")
    engine.writes("1", "x")
    (reply,) = source.wait(1.0)
    assert (reply.key, reply.error) == ("two", None)


def test_who_is_given_up_is_aborted(engine, source):
    ask(source, "one", "two")
    source.cancel("one")
    assert engine.aborted == ["0"]
    engine.writes("0", "late")
    engine.writes("1", "x")
    (reply,) = source.wait(1.0)
    assert reply.key == "two"
    ask(source, "three")
    source.close()
    assert engine.aborted == ["0", "2"]
    assert source.wait(0.01) == []


def test_a_dead_engine_fails_everything(engine, source):
    ask(source, "one", "two")
    engine.fails = RuntimeError("engine core died")
    replies = source.wait(1.0)
    assert {reply.key for reply in replies} == {"one", "two"}
    assert all(isinstance(reply.error, UnavailableError) for reply in replies)
    assert source.wait(0.01) == []


def test_a_model_that_it_cannot_load_and_no_vllm(engine, generator_folder, monkeypatch):
    def refuses(folder, **given):
        raise ValueError("no such option")

    monkeypatch.setattr(sys.modules["vllm"], "LLM", refuses)
    with pytest.raises(InputError, match="--model vllm:x: ValueError: no such option"):
        VllmSource(generator_folder, {"odd": 1}, ModelSettings(model="vllm:x"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UnavailableError, match="pip install"):
        VllmSource(generator_folder, {}, ModelSettings(model="vllm:x"))
