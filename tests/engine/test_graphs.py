"""The order of what `CudaGraphReplay` asks of CUDA, by a scripted one; a card runs the real one."""

from contextlib import contextmanager

import pytest
import torch

from beamwright.engine import tensor_rows
from beamwright.engine.graphs import CudaGraphReplay
from beamwright.models.prefill_passes import Replay
from engines import PROBLEM, assert_nothing_allocated, grow
from tape import FixedAttention, HostReadError, put_on_tape

SHAPE, OTHER = ("8 rows",), ("16 rows",)


class ScriptedCuda:
    """Remembers calls. Under capture a step's launches are kept and not run."""

    def __init__(self, monkeypatch):
        self.calls, self.ran, self.capturing, self.refusal = [], [], None, None
        self.current = "current"
        script = self

        class Stream:
            def __init__(self, name="side"):
                self.name = name

            def wait_stream(self, other):
                script.calls.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self):
                script.ran += self.launches
                script.calls.append("replay")

        @contextmanager
        def graph(target, pool, stream, capture_error_mode):
            assert (stream.name, capture_error_mode) == ("side", "thread_local")
            script.calls.append(f"capture into pool {pool}")
            script.capturing = target.launches = []
            script.current = stream.name
            try:
                yield
                if script.refusal is not None:
                    raise script.refusal
            finally:
                script.capturing = None
            script.current = "current"

        @contextmanager
        def on(stream):
            script.calls.append(f"on {stream.name}")
            yield

        current, pools = Stream("current"), iter(range(9))
        for name, fake in {
            "Stream": lambda device, priority: Stream(),
            "CUDAGraph": Graph,
            "graph": graph,
            "graph_pool_handle": lambda: next(pools),
            "current_stream": lambda device: current,
            "stream": on,
            "synchronize": lambda device: self.calls.append("synchronize"),
            "set_stream": lambda stream: setattr(script, "current", stream.name),
            "memory_snapshot": lambda pool: [{"total_size": 100 + pool}, {"total_size": 7}],
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def launch(self, name):
        """A step: what it launches."""
        return lambda: (self.ran if self.capturing is None else self.capturing).append(name)


@pytest.fixture
def cuda(monkeypatch):
    return ScriptedCuda(monkeypatch)


@pytest.fixture
def failures():
    return []


@pytest.fixture
def replay(cuda, failures):
    return CudaGraphReplay(torch.device("cuda"), failures.append)


WARM = ["side waits for current", "on side", "current waits for side"]


def test_what_was_captured_before_a_move_or_a_release_is_never_replayed(cuda, replay):
    for key in (SHAPE, SHAPE, OTHER, OTHER):
        replay.run(key, 0, cuda.launch("old"))
    cuda.calls.clear()
    for key in (SHAPE, SHAPE, OTHER, OTHER):
        replay.run(key, 1, cuda.launch("new"))
    assert cuda.ran == ["old"] * 4 + ["new"] * 4
    once = [*WARM, "capture into pool 1", "replay"]
    assert cuda.calls == ["synchronize", *once, *once]
    replay.release()
    cuda.calls.clear()
    replay.run(SHAPE, 1, cuda.launch("new"))
    assert cuda.calls == WARM, "nothing is left"


def test_after_a_failed_capture_steps_are_plain_and_graphs_that_there_are_go_on(
    cuda, replay, failures
):
    for _ in range(2):
        replay.run(SHAPE, 0, cuda.launch("a"))
    cuda.refusal = RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")
    for _ in range(3):
        replay.run(OTHER, 0, cuda.launch("b"))
        assert cuda.current == "current", "the next step is queued where it was"
    cuda.refusal = None
    replay.run(OTHER, 0, cuda.launch("b"))
    replay.run(SHAPE, 0, cuda.launch("a"))
    assert cuda.ran == ["a", "a", "b", "b", "b", "b", "a"]
    assert failures == ["CUDA error: operation not permitted when stream is capturing"]
    assert cuda.calls.count("capture into pool 0") == 2, "and nothing else is captured"


def test_memory_that_is_short_in_a_capture_is_raised(cuda, replay, failures):
    replay.run(SHAPE, 0, cuda.launch("a"))
    cuda.refusal = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        replay.run(SHAPE, 0, cuda.launch("a"))
    assert (cuda.current, failures) == ("current", [])
    cuda.refusal = None
    replay.run(SHAPE, 0, cuda.launch("a"))
    assert cuda.ran == ["a", "a"]


def test_a_solution_says_that_its_steps_could_not_be_captured(make_solver, cuda, monkeypatch):
    """Its tree is that of plain calls."""

    class Refused(CudaGraphReplay):
        fetch = Replay.fetch

    options = {"n": 4, "width": 2, "max_rounds": 3, "dtype": "float64", "graphs": "on"}
    plain = make_solver(**options).solve(PROBLEM)
    assert not any("graphs" in line for line in plain.warnings)
    cuda.refusal = RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(
        tensor_rows, "make_replay", lambda *parts: Refused(torch.device("cuda"), parts[-1])
    )
    found = make_solver(**options).solve(PROBLEM)
    assert found.tree_hash == plain.tree_hash
    said = "CUDA graphs failed: operation not permitted when stream is capturing; steps run as "
    assert any(line.startswith(said) for line in found.to_json()["warnings"])


# --- steps on tape: the same bits, whatever happens between iterations ----------------------------


@pytest.fixture
def play(make_solver, monkeypatch):
    """Grows a tree by plain steps and by taped ones; they are equal."""

    def grown(**options):
        expected, tree = grow(make_solver(dtype="float64", **options))
        with make_solver(dtype="float64", graphs="on", **options) as solver:
            replay = put_on_tape(monkeypatch, solver, FixedAttention(solver.generator.backend))
            solution, found = grow(solver)
            assert_nothing_allocated(solver)
        assert solution.tree_hash == expected.tree_hash
        assert [n.text for n in found.nodes()] == [n.text for n in tree.nodes()]
        return replay.num_played

    return grown


SMALL = {"n": 4, "width": 2, "max_rounds": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"n": 8, "max_batch": 3},
        {"step_tokens": 40, "max_tokens": 90, "ignore_eos": True},
        {"search": "lookahead", "lookahead": 2},
    ],
    ids=str,
)
def test_a_replayed_pass_sees_what_the_host_has_changed(play, options):
    """Tapes hold addresses and numbers, as graphs do: rows, tails and lists go on."""
    assert play(**{**SMALL, **options}) > 10


def test_a_pass_that_asks_the_device_is_found_out(play, monkeypatch):
    """Else the tests above would show nothing."""
    real = tensor_rows.TensorRowRunner._compute_pass

    def asks(self, buffers):
        real(self, buffers)
        buffers.tokens.any().item()

    monkeypatch.setattr(tensor_rows.TensorRowRunner, "_compute_pass", asks)
    with pytest.raises(HostReadError):
        play(**SMALL)
