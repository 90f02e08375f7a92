"""Products of weights in codes: those of what the codes stand for, at any number of rows."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import fakes
from beamwright.models import streaming, trials
from beamwright.models.codes import Codes
from beamwright.models.decoder import Linear
from beamwright.models.grouped import GroupedLinear, JoinedLinear, join_projections
from beamwright.models.linear import Int8Linear, quantise_linear
from beamwright.models.streaming import CodedLinear, KernelLinear, product
from beamwright.models.trials import KernelChooser
from beamwright.plan.costs import Storage
from engines import prefilled, random_decoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
drawn = partial(fakes.whole_numbers, device=DEVICE, dtype=torch.float16)
FORMS = [(4, 16), (4, 32), (4, 64), (4, 128), (4, 256), (8, 16), (8, 32), (8, 128), (8, 256)]
SMALL = "llama,layers=1,hidden=128,heads=4,kv_heads=2,intermediate=256,vocab=256,context=64"


def grouped(bits, group, outputs=80, columns=256, *, bias=False):
    """Whose values, and sums of products with whole numbers, are exact in 16 bits."""
    draws = torch.Generator().manual_seed(outputs)
    codes = torch.randint(2**bits, (outputs, columns), generator=draws, dtype=torch.uint8)
    scale = 2.0 ** torch.randint(-2, 1, (outputs, columns // group), generator=draws)
    linear = GroupedLinear.of(bits, codes, scale, -(2 ** (bits - 1) - 1) * scale)
    linear.weight = linear.weight.to(DEVICE)
    return join_projections([linear], drawn(outputs) if bias else None)


@pytest.fixture(autouse=True)
def one_number_of_rows(monkeypatch):
    """What a projection is tried with."""
    monkeypatch.setattr(trials, "_ROWS", (264,))


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_products_are_those_of_what_codes_stand_for(few_parts, bits, group):
    linear = grouped(bits, group, bias=True)
    codes, values = Codes.of(linear), linear.dequantise(slice(None))
    assert codes.words.nbytes + codes.scales_and_lows.nbytes == linear.weight.nbytes
    assert torch.equal(codes.dequantise(torch.float16), values.half())
    for rows in (1, 40):
        x = drawn(rows, 256)
        exact = F.linear(x.double(), values.double(), linear.bias.double())
        assert torch.equal(product(x, codes, linear.bias), exact.half())


def test_values_are_rounded_once():
    """By less than the whole of a step between two numbers of 11 bits."""
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 384, generator=draws).to(DEVICE)
    whole = Int8Linear(weight, None)
    exact = whole.weight.double() * whole.scale.double()[:, None]
    int4 = quantise_linear(Linear(weight), Storage.INT4)
    for linear, expected in (
        (whole.grouped(), exact),
        (int4, int4.dequantise(slice(None)).double()),
    ):
        found = Codes.of(linear).dequantise(torch.float16)
        assert ((found - expected).abs() <= 1e-6 + 2**-10.9 * expected.abs()).all()


def test_a_row_has_the_same_bits_among_any_others(few_parts, monkeypatch):
    """On a card of numbers that do not add up exactly, too; in parts, in turn, turned back."""
    linear, dtype = grouped(4, 64, columns=384, bias=True), torch.float16
    x = drawn(272, 384)
    if DEVICE == "cuda":
        x, dtype = torch.randn(272, 384, device=DEVICE, dtype=torch.bfloat16), torch.bfloat16
        linear.bias = linear.bias.to(dtype)
    codes = Codes.of(linear)
    ways = [CodedLinear(codes, linear.bias, many) for many in (None, trials._by_kernel)]
    whole = ways[0](x[:256])
    for rows in (1, 8, 17, 33, 64, 65, 130):
        assert torch.equal(ways[0](x[:rows]), whole[:rows])
    monkeypatch.setattr(streaming, "DEQUANTISED_VALUES", 32 * 384)
    for way in ways:
        assert torch.equal(way(x)[:256], whole)


def test_what_the_kernel_takes_goes_there(monkeypatch):
    monkeypatch.setattr(trials, "product", summed)
    streams = KernelChooser(always=True, dtype=torch.float16)
    parts = [grouped(4, 32, 32), grouped(8, 16, 32, bias=True), Linear(drawn(80, 256))]
    kinds = [type(part) for part in streams(JoinedLinear(parts)).parts]
    assert kinds == [CodedLinear, CodedLinear, KernelLinear]
    odd = grouped(4, 24, columns=384), grouped(4, 64, outputs=72), grouped(4, 64, columns=192)
    for linear in odd:
        assert streams(linear) is linear, "groups, outputs and columns are whole tiles"
    assert KernelChooser(always=True, dtype=torch.float32)(grouped(4, 64)).bits == 4


def summed(x, weight, bias=None, parts=None, leak=0):
    """Row by row; leak: what many rows make of it."""
    weight = weight.dequantise(x.dtype) if isinstance(weight, Codes) else weight
    found = (x.float().unsqueeze(1) * weight.float()).sum(-1)
    return found.to(x.dtype) + leak * (len(x) > 256)


def test_many_rows_are_the_library_s_where_it_has_the_bits(monkeypatch):
    linear = grouped(4, 64, 32, 128)
    monkeypatch.setattr(trials, "product", summed)
    for leak, many in ((0, trials._by_library), (1, trials._by_kernel)):
        monkeypatch.setattr(trials.F, "linear", partial(summed, leak=leak))
        found = KernelChooser(always=False, dtype=torch.float16)(linear)
        assert found.by is many
    monkeypatch.setattr(trials, "product", partial(summed, leak=1))
    assert KernelChooser(always=True, dtype=torch.float16)(linear).by is None


def test_a_card_on_which_the_kernel_is_wrong_turns_tiles_back(monkeypatch):
    linear = grouped(4, 64)
    monkeypatch.setattr(
        trials, "product", lambda x, codes, bias: F.linear(x, codes.dequantise(x.dtype)) * 0.9
    )
    assert KernelChooser(always=True, dtype=torch.float16)(linear) is linear
    monkeypatch.setattr(Codes, "dequantise", lambda self, dtype: drawn(80, 256))
    assert KernelChooser(always=True, dtype=torch.float16)(linear) is linear


def in_codes(linear):
    """Without a trial."""
    is_grouped = isinstance(linear, GroupedLinear)
    return CodedLinear(Codes.of(linear), linear.bias, None) if is_grouped else linear


@pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter")
@torch.inference_mode()
def test_a_decoder_reads_codes_as_they_are():
    found = []
    for pack in (lambda linear: linear, in_codes):
        decoder = random_decoder(SMALL, torch.float16, DEVICE, Storage.INT4, pack)
        found.append(decoder.logits(prefilled(decoder, range(20))))
    layer = decoder.weights.layers[0]
    assert isinstance(layer.qkv, CodedLinear)
    assert isinstance(layer.down, CodedLinear)
    torch.testing.assert_close(*found, atol=2e-3, rtol=2e-3)
