"""The order of what `CudaGraphReplay` asks of CUDA, by a scripted one; a card runs the real one."""

from contextlib import contextmanager

import pytest
import torch

from beamwright.decode.graphs import CudaGraphReplay, EagerReplay

SHAPE, OTHER = ("8 rows",), ("16 rows",)


class ScriptedCuda:
    """Remembers calls. Under capture a step's launches are kept and not run."""

    def __init__(self, monkeypatch):
        self.calls, self.ran, self.capturing = [], [], None
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
            yield
            script.capturing = None

        @contextmanager
        def on(stream):
            script.calls.append(f"on {stream.name}")
            yield

        current, pools = Stream("current"), iter(range(9))
        for name, fake in {
            "Stream": lambda device: Stream(),
            "CUDAGraph": Graph,
            "graph": graph,
            "graph_pool_handle": lambda: next(pools),
            "current_stream": lambda device: current,
            "stream": on,
            "synchronize": lambda device: self.calls.append("synchronize"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def launch(self, name):
        """A step: what it launches."""
        return lambda: (self.ran if self.capturing is None else self.capturing).append(name)


@pytest.fixture
def cuda(monkeypatch):
    return ScriptedCuda(monkeypatch)


@pytest.fixture
def replay(cuda):
    return CudaGraphReplay(torch.device("cuda"))


WARM = ["side waits for current", "on side", "current waits for side"]


def test_every_run_runs_the_step_once(cuda, replay):
    for _ in range(4):
        replay.run(SHAPE, 0, cuda.launch("a"))
    assert cuda.ran == ["a"] * 4
    assert cuda.calls == [*WARM, "capture into pool 0", "replay", "replay", "replay"]


def test_each_shape_has_a_graph_and_they_share_the_pool(cuda, replay):
    for key in (SHAPE, OTHER, SHAPE, OTHER, OTHER, SHAPE):
        replay.run(key, 0, cuda.launch(key))
    assert cuda.ran == [SHAPE, OTHER, SHAPE, OTHER, OTHER, SHAPE]
    assert cuda.calls.count("capture into pool 0") == 2


def test_what_was_captured_before_a_move_is_never_replayed(cuda, replay):
    for key in (SHAPE, SHAPE, OTHER, OTHER):
        replay.run(key, 0, cuda.launch("old"))
    cuda.calls.clear()
    for key in (SHAPE, SHAPE, OTHER, OTHER):
        replay.run(key, 1, cuda.launch("new"))
    assert cuda.ran == ["old"] * 4 + ["new"] * 4
    once = [*WARM, "capture into pool 1", "replay"]
    assert cuda.calls == ["synchronize", *once, *once]


def test_a_release_waits_for_the_device_and_forgets(cuda, replay):
    for _ in range(2):
        replay.run(SHAPE, 0, cuda.launch("a"))
    replay.release()
    cuda.calls.clear()
    replay.run(SHAPE, 0, cuda.launch("a"))
    assert cuda.calls == WARM


def test_eager_replay_calls_the_step_and_reads_at_once():
    eager, values = EagerReplay(), torch.zeros(3, dtype=torch.uint8)
    eager.run(SHAPE, 0, lambda: values.fill_(4))
    assert eager.fetch(values)() == [4, 4, 4]
