"""Offloaded layers: each runs with its own weights, whenever copies run and whoever asks."""

import random
import sys
import threading
from collections import Counter
from itertools import product

import pytest
import torch

from beamwright.errors import InputError, LinkError
from beamwright.kv.link import StreamLink
from beamwright.kv.streams import HostStreams
from beamwright.models.decoder import Linear
from beamwright.models.expert_offload import ExpertOffload
from beamwright.models.grouped import JoinedLinear, round_to_groups
from beamwright.models.linear import Int8Linear, prepack_linear
from beamwright.models.native import library_accepts, pack_for_library
from beamwright.models.offload import LayerOffload
from beamwright.models.weight_homes import FileHome, HostHome
from streams import EagerStreams, LateStreams

LAYERS = 6
BYTES = 2 * 4 * 8  # of the two float32 weights of a layer
PATIENCE_S = 20.0


class NotedHome(HostHome):
    """Remembers the order in which layers are copied to the device."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.fetched = []

    def pieces(self, number, parts):
        self.fetched.append(number)
        return super().pieces(number, parts)


class Model:
    """Layers of two projections [1, 8], whose values are the layer's number."""

    def __init__(self, numbers, streams, home=None):
        self.home = home or NotedHome()
        self.streams, self.link, self.seen = streams, StreamLink(streams), []
        self.offload = LayerOffload(numbers, self.home, self.link, "cpu")
        self.layers = [[Linear(torch.full((1, 8), float(n))) for _ in "ab"] for n in range(LAYERS)]
        for number, layer in enumerate(self.layers):
            self.offload.add(number, layer)
        self.offload.close_loading()

    def read(self, number):
        """What a layer computes: the set of the values of its weights."""
        values = {value for each in self.layers[number] for value in each.weight.flatten().tolist()}
        self.seen.append((number, values))

    def run(self, numbers=range(LAYERS)):
        """One pass; on `EagerStreams` compute runs behind the host's back."""
        with self.offload.one_pass() as begin:
            for number in numbers:
                begin(number)
                if type(self.streams) is EagerStreams:
                    self.streams.queue(lambda number=number: self.read(number))
                else:
                    self.read(number)
        if type(self.streams) is EagerStreams:
            self.streams.run_compute()

    def wrong(self):
        return [(number, values) for number, values in self.seen if values != {float(number)}]


@pytest.mark.parametrize(
    "numbers", [[0, 1, 2], [0, 2, 4, 5], [3], [1, 4], [*range(LAYERS)]], ids=str
)
@pytest.mark.parametrize("streams", [EagerStreams, LateStreams, HostStreams])
def test_every_layer_runs_with_its_own_weights(numbers, streams):
    model = Model(numbers, streams())
    for _ in range(3):
        model.run()
    model.run([4, 5])  # the first layers of each kind, as the self-test runs them
    model.run([0, 4])
    model.run()
    model.offload.close()
    model.run()
    assert model.wrong() == []
    assert [number for number, _ in model.seen[:LAYERS]] == [*range(LAYERS)]
    model.offload.close()


@pytest.mark.parametrize("streams", [EagerStreams, LateStreams])
def test_without_the_order_of_copies_and_compute_weights_would_be_others(streams):
    model = Model([*range(LAYERS)], streams(careless=True))
    for _ in range(2):
        model.run()
    assert model.wrong()


@pytest.mark.parametrize(
    ("numbers", "fetched"),
    [
        ([0, 1, 2, 3], [[0, 2, 1, 3, 0, 1], [2, 3, 0, 1], [2, 3, 0, 1]]),
        ([0, 2, 4], [[0, 4, 2, 0], [4, 0], [4, 0]]),  # layer 2 has the second buffer for itself
        ([1, 3], [[1, 3], [], []]),
        ([5], [[5], [], []]),
    ],
    ids=str,
)
def test_a_buffer_takes_its_next_layer_as_soon_as_a_layer_has_run(numbers, fetched):
    model = Model(numbers, LateStreams())
    for expected in fetched:
        model.home.fetched.clear()
        model.run()
        assert model.home.fetched == expected
    model.offload.close()
    assert model.offload.bytes_moved == BYTES * sum(map(len, fetched))
    assert model.offload.home_bytes == BYTES * len(numbers)
    assert model.offload.buffer_bytes == 2 * 64 * min(2, len(numbers))


def test_a_pass_that_fails_leaves_the_next_one_right():
    model = Model([0, 1, 2, 3], LateStreams())

    def fail_after(last):
        with model.offload.one_pass() as begin:
            for number in range(last + 1):
                begin(number)
            model.home.fetched.clear()
            raise ZeroDivisionError

    for last in range(LAYERS):
        with pytest.raises(ZeroDivisionError):
            fail_after(last)
        assert model.home.fetched == [], "nothing is copied for a pass that has failed"
        model.run()
    assert model.wrong() == []


def test_passes_of_two_threads_exclude_each_other():
    model, failed = Model([*range(LAYERS)], HostStreams()), []

    def run(numbers):
        try:
            for _ in range(60):
                model.run(numbers)
        except Exception as error:  # shown below
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=[each]) for each in (range(LAYERS), [0, 3, 4])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
    assert model.wrong() == []
    assert Counter(number for number, _ in model.seen)[0] == 120
    model.offload.close()


# --- experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("streams", [LateStreams, HostStreams])
@pytest.mark.parametrize("pack", [lambda x: x, prepack_linear], ids=["plain", "packed"])
def test_every_expert_runs_with_its_own_weights(kept, streams, pack):
    """An expert leaves a buffer and comes back to another while copies into the first go on."""
    draws = random.Random(0)
    offload = ExpertOffload(kept, NotedHome(), StreamLink(streams()), "cpu")
    layers = [
        [[pack(Linear(torch.full((16, 32), float(8 * layer + number)))) for _ in "ud"]
         for number in range(8)] for layer in range(3)
    ]  # fmt: skip
    x = torch.ones(8, 32) / 32
    for layer, experts in enumerate(layers):
        offload.add(layer, [], experts)
    offload.close_loading()
    for turn in range(40):
        with offload.one_pass():
            for layer, experts in enumerate(layers):
                wanted = sorted(draws.sample(range(8), draws.choice([1, 3, 8])))
                found = []
                for number in offload.bring_experts(layer)(wanted):
                    values = torch.cat([each(x) for each in experts[number]]).unique().tolist()
                    assert values == pytest.approx([8 * layer + number]), (turn, layer, number)
                    found.append(number)
                assert sorted(found) == wanted
        if turn == 20:
            offload.close()
    if kept == 1:
        assert offload.pass_bytes == 0
    offload.close()


def test_the_experts_that_are_used_most_stay():
    home = NotedHome()
    offload = ExpertOffload(0.25, home, StreamLink(HostStreams()), "cpu")
    offload.add(0, [], [[Linear(torch.zeros(1, 8))] for _ in range(8)])
    offload.close_loading()
    bring = offload.bring_experts(0)
    for wanted in ([0, 1, 2], [5, 6], [5, 6], [5, 6]):
        list(bring(wanted))
    home.fetched.clear()
    assert list(bring([1, 5, 6])) == [5, 6, 1], "kept ones compute while others arrive"
    assert home.fetched == [(0, 1)]
    offload.close()


def test_experts_of_a_pass_that_fails_leave_their_buffers():
    offload = ExpertOffload(0.0, NotedHome(), StreamLink(HostStreams()), "cpu")
    experts = [[Linear(torch.full((1, 8), float(number)))] for number in range(8)]
    offload.add(0, [], experts)
    offload.close_loading()
    for _ in range(3):
        coming = offload.bring_experts(0)(range(8))
        next(coming)
        coming.close()
    for number in offload.bring_experts(0)(range(8)):
        assert experts[number][0].weight.unique().tolist() == [number]
    offload.close()


# --- formats of weights ------------------------------------------------------------------------


def packed_parts(weight):
    return JoinedLinear([prepack_linear(Linear(weight[:8])), round_to_groups(weight[8:])])


def every_second_column(weight):
    return Linear(weight.repeat_interleave(2, 1)[:, ::2])


FORMATS = {
    "plain": Linear,
    "a slice": every_second_column,
    "transposed": lambda weight: Linear(weight.T.contiguous().T),
    "float64": lambda weight: Linear(weight.double()),
    "bfloat16": lambda weight: Linear(weight.bfloat16()),
    "oneDNN": lambda weight: prepack_linear(Linear(weight)),
    "int8": lambda weight: Int8Linear(weight, weight[:, 0].clone()),
    "int4": round_to_groups,
    "C library": lambda weight: pack_for_library(round_to_groups(weight)),
    "joined": packed_parts,
}


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_every_format_keep_their_bits(name, home):
    """Layers in one buffer have as many bytes, and other shapes."""
    if name == "C library" and not library_accepts(torch.float32):
        pytest.skip("there is no library")
    draws = torch.Generator().manual_seed(0)
    sizes = [[(64, 128), (128, 64)][number // 2 % 2] for number in range(LAYERS)]
    layers = [
        [FORMATS[name](torch.randn(size, generator=draws)) for size in (own, own[::-1])]
        for own in sizes
    ]
    x = torch.randn(8, 128, generator=draws)
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(name, torch.float32)

    def outputs(number):
        return [
            linear(x[:, : size[1]].contiguous().to(dtype))
            for linear, size in zip(
                layers[number], (sizes[number], sizes[number][::-1]), strict=True
            )
        ]

    expected = [outputs(number) for number in range(LAYERS)]
    store = FileHome() if home == "disk" else HostHome(torch.device("cpu"))
    offload = LayerOffload([0, 1, 2, 3, 4], store, StreamLink(HostStreams()), "cpu")
    for number, layer in enumerate(layers):
        offload.add(number, layer)
    offload.close_loading()
    for _, (number, wanted) in product(range(3), enumerate(expected)):
        with offload.one_pass() as begin:
            begin(number)
            assert all(map(torch.equal, outputs(number), wanted))
    offload.close()


# --- damaged files and full disks --------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """A model with all layers on disk, and its open file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = FileHome()
    model = Model([*range(LAYERS)], HostStreams(), home)
    assert list(tmp_path.iterdir()) == [], "a process that is killed leaves no file"
    with open(home._handle, "r+b", closefd=False) as file:
        yield model, file
    model.offload.close()


def test_a_changed_file_is_an_error_until_it_is_whole_again(on_disk):
    model, file = on_disk
    model.run()
    start = 3 * BYTES + 5
    file.seek(start)
    kept = file.read(1)
    file.seek(start)
    file.write(b"\xff")
    file.flush()
    for _ in range(2):
        with pytest.raises(LinkError) as caught:
            model.run()
        assert str(caught.value) == (
            "copying weights to the device failed: RuntimeError: the temporary file has changed "
            "since it was written. Run the search again."
        )
        model.offload.close()  # as the solver does
    file.seek(start)
    file.write(kept)
    file.flush()
    model.run()
    assert model.wrong() == []


def test_a_truncated_file_is_an_error(on_disk):
    model, file = on_disk
    file.truncate(LAYERS * BYTES - 1)
    with pytest.raises(LinkError, match=r"copying weights to the device failed: .* has changed"):
        model.run()
    assert model.wrong() == []


def test_a_file_that_cannot_be_read_is_an_error(on_disk, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(LinkError, match=r"weights .* failed: OSError: .*Input/output error"):
        on_disk[0].run()


def test_a_full_disk_is_an_error_of_the_user(monkeypatch):
    full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115 (its owner closes it)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full)
    with pytest.raises(InputError, match=r"No space left on device.* Free disk space there"):
        Model([0, 1], HostStreams(), FileHome())


def test_a_folder_without_room_for_files_is_an_error_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(InputError, match=r"--weights-home disk: .*set TMPDIR to another folder"):
        FileHome()
