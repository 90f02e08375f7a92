"""Streamed products: right in every tile, a row's bits whatever is beside it, and when they run."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import fakes
from beamwright.models import layer_kernels, streaming, trials
from beamwright.models.codes import Codes
from beamwright.models.decoder import Linear
from beamwright.models.grouped import round_to_groups
from beamwright.models.linear import make_packer
from beamwright.models.streaming import CodedLinear, FewRowsLinear, KernelLinear, product
from beamwright.models.trials import KernelChooser, is_invariant
from beamwright.plan.costs import Storage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
drawn = partial(fakes.whole_numbers, device=DEVICE, dtype=torch.bfloat16)
ROWS = (1, 40, 136)  # each tile, and more than one of the largest
SHAPES = [(torch.float16, 80, 256), (torch.bfloat16, 80, 384)]  # the last tile is not full


@pytest.mark.parametrize(("dtype", "outputs", "columns"), SHAPES)
def test_products_are_right_with_and_without_a_bias(few_parts, dtype, outputs, columns):
    weight, bias = drawn(outputs, columns, dtype=dtype), drawn(outputs, dtype=dtype)
    for rows in ROWS:
        x = drawn(rows, columns, dtype=dtype)
        exact = F.linear(x.double(), weight.double())
        assert torch.equal(product(x, weight, None), exact.to(dtype))
        assert torch.equal(product(x, weight, bias), (exact + bias.double()).to(dtype))


def test_large_numbers_of_rows_take_parts_in_turn(few_parts, monkeypatch):
    """With the bits that partial sums in memory have."""
    weight, x = drawn(80, 384), drawn(136, 384)
    found = product(x, weight, None)
    monkeypatch.setattr(streaming, "_IN_TURN", 1)
    assert torch.equal(product(x, weight, None), found)


@pytest.mark.parametrize("rows", [1, 24, 64])
def test_the_gate_in_the_product_has_the_bits_of_one_behind_it(monkeypatch, rows):
    monkeypatch.setattr(streaming, "_UNITS", 2)  # wide enough for a whole sum a program
    half = {"dtype": torch.float16}
    x, weight = drawn(rows, 256, **half), drawn(256, 256, **half) / 8
    codes = Codes.of(round_to_groups(weight))
    for linear in (
        KernelLinear(weight),
        FewRowsLinear(weight),
        CodedLinear(codes, None, None),
    ):
        assert torch.equal(linear.gated(x, "silu"), layer_kernels.gated(linear(x), "silu"))
        assert linear.gated(x, "gelu") is None
        assert linear.gated(drawn(72, 256, **half), "silu") is None
    assert KernelLinear(weight, weight[:, 0].clone()).gated(x, "silu") is None
    assert KernelLinear(weight[:64].contiguous()).gated(x, "silu") is None, "half a tile"
    assert Linear(weight).gated(x, "silu") is None


def test_what_the_kernel_does_not_take_stays():
    streams = KernelChooser(always=True)
    for linear in (
        Linear(drawn(80, 192)),  # no whole units
        Linear(drawn(72, 256)),  # rows of results that are not aligned
        Linear(drawn(80, 256, dtype=torch.float32)),
        Linear(drawn(256, 80).t()),
        Linear(drawn(0, 256)),  # no LM head
        KernelLinear(drawn(80, 256)),
    ):
        assert streams(linear) is linear
    assert type(streams(Linear(drawn(80, 256)))) is KernelLinear


class Library:
    """Stands for a card's library; follows the batch or does not. Counts its calls."""

    def __init__(self, *, leaks):
        self.leaks, self.calls = leaks, 0

    def __call__(self, x, weight, bias=None):
        self.calls += 1
        found = (x.float().unsqueeze(1) * weight.float()).sum(-1)
        return found + (self.leaks and len(x) < 16)


@pytest.mark.parametrize(
    ("leaks", "wide", "kind"),
    [(True, False, KernelLinear), (False, False, Linear), (False, True, FewRowsLinear)],
)
def test_a_library_that_follows_the_batch_is_found_out(monkeypatch, leaks, wide, kind):
    library = Library(leaks=leaks)
    monkeypatch.setattr(trials.F, "linear", library)
    monkeypatch.setattr(trials, "product", Library(leaks=False))
    monkeypatch.setattr(trials, "_ROWS", (8, 64, 72))
    monkeypatch.setattr(streaming, "_UNITS", 1 if wide else 132)
    streams = KernelChooser(always=False)
    found = streams(Linear(drawn(128, 256)))
    assert type(found) is kind
    before = library.calls
    assert type(streams(Linear(drawn(128, 256)))) is kind
    assert library.calls == before  # tried once for a shape


def test_a_card_on_which_the_kernel_is_wrong_keeps_its_library(monkeypatch):
    monkeypatch.setattr(trials, "product", lambda x, weight, bias: x @ weight.t() * 0.9)
    assert type(KernelChooser(always=True)(Linear(drawn(80, 256)))) is Linear
    monkeypatch.setattr(trials, "product", None)
    with pytest.raises(TypeError):  # a mistake of ours is no failure of the card
        KernelChooser(always=True)(Linear(drawn(80, 256)))


def test_rows_that_cancel_tell_the_order_of_a_sum():
    x, weight = (each[:8].float() for each in trials.draw_cancelling_input(drawn(32, 256)))

    def summed(rows, columns=range(256)):
        total = torch.zeros(len(rows), len(weight), device=DEVICE)
        for column in columns:
            total += rows[:, None, column] * weight[:, column]
        return total

    assert is_invariant(summed, x, summed(x), (2, 8, 16))
    assert not is_invariant(summed, x, summed(x, range(255, -1, -1)), (2,))
    assert (x.double() @ weight.double().t()).abs().max() < 1e-9


def test_a_cpu_keeps_its_products():
    pack = make_packer(Storage.PLAIN, torch.bfloat16, "cpu", fixed=True)
    assert not isinstance(pack(Linear(torch.ones(80, 256).bfloat16())), KernelLinear)


@pytest.mark.parametrize("rows", [5, 16, 40, 64])
def test_narrow_tiles_that_a_card_is_to_try_are_right(rows):
    from beamwright_lab.gpu import narrow

    x, weight, bias = drawn(rows, 256), drawn(80, 256), drawn(80)
    exact = (F.linear(x.double(), weight.double()) + bias.double()).to(torch.bfloat16)
    most = 16 if rows <= 16 else 64
    for tile in (narrow._TILES[most][0], narrow._TILES[most][-1]):
        assert torch.equal(narrow.multiply_uncut(x, weight, bias, tile, most), exact)
