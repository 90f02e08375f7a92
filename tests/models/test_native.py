"""Products of the native library: against their definition, and bit for bit at any batch."""

import pytest
import torch

from beamwright.errors import NotFiniteError
from beamwright.library import instruction_set, library
from beamwright.models import native
from beamwright.models.decoder import Linear
from beamwright.models.formats.gguf import UNPACK_BLOCKS, BlockLinear
from beamwright.models.formats.header import BLOCKS
from beamwright.models.grouped import GroupedLinear, JoinedLinear, round_to_groups
from beamwright.models.linear import make_packer
from beamwright.plan.costs import Storage

OUTPUTS, COLUMNS, ROWS = 40, 512, 13
_SCALES = {kind: (0, 2) for kind in (3, 7, 12, 13)} | {14: (208,)}  # bytes; of the others: (0,)

needs_library = pytest.mark.skipif(library() is None, reason="built without a C compiler")


def blocks(kind, outputs=OUTPUTS, seed=0):
    """A projection of random codes, with scales of about a hundredth."""
    draws = torch.Generator().manual_seed(seed)
    _, values, size = BLOCKS[kind]
    drawn = torch.randint(0, 256, (outputs * COLUMNS // values, size), generator=draws)
    drawn = drawn.to(torch.uint8)
    for at in _SCALES.get(kind, (0,)):
        scales = torch.rand(len(drawn), 1, generator=draws) / 100
        drawn[:, at : at + 2] = scales.half().view(torch.uint8)
    return BlockLinear(kind, drawn.view(outputs, -1), COLUMNS, "a weight")


def activations(rows=ROWS):
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(1))


def in_8_bits(x):
    """What the library makes of activations, in float64."""
    records = x.view(len(x), -1, 32)
    most = records.abs().amax(-1, keepdim=True)
    codes = (records * (127 / most)).round()
    return (codes.double() * (most / 127).double()).view(x.shape)


def values(linear):
    parts = UNPACK_BLOCKS[linear.kind](linear.weight.view(-1, BLOCKS[linear.kind][2]))
    return parts.dequantise().view(-1, COLUMNS)


@needs_library
@pytest.mark.parametrize("kind", UNPACK_BLOCKS, ids=[BLOCKS[kind][0] for kind in UNPACK_BLOCKS])
class TestProduct:
    def test_is_that_of_the_files_values_and_rounded_activations(self, kind):
        x, linear = activations(), blocks(kind)
        expected = in_8_bits(x) @ values(linear).double().T
        torch.testing.assert_close(
            native.NativeLinear([linear])(x).double(), expected, rtol=1e-5, atol=1e-5
        )

    def test_has_the_same_bits_by_every_instruction_set_batch_and_number_of_threads(self, kind):
        x, linear = activations(), blocks(kind)
        whole = native.NativeLinear([linear], chosen=0)(x)
        for number in range(library().bw_best() + 1):
            made = native.NativeLinear([linear], chosen=number)
            assert torch.equal(made(x), whole)
            for size in (1, 2, 3, 7):
                assert torch.equal(torch.cat([made(rows) for rows in x.split(size)]), whole)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert torch.equal(native.NativeLinear([linear])(x), whole)
        finally:
            torch.set_num_threads(before)

    def test_of_bfloat16_is_rounded_to_it_once(self, kind):
        x, made = activations().bfloat16(), native.NativeLinear([blocks(kind)])
        assert torch.equal(made(x), made(x.float()).bfloat16())

    def test_of_zeros_is_zero_and_of_a_row_that_is_not_finite_is_not(self, kind):
        made = native.NativeLinear([blocks(kind)])
        assert not made(torch.zeros(2, COLUMNS)).any()
        for value in (float("nan"), float("inf")):
            x = activations()
            x[3, 40] = value
            assert made(x).isfinite().all(1).tolist() == [row != 3 for row in range(ROWS)]

    @pytest.mark.parametrize("scale", [float("nan"), float("inf")])
    def test_of_a_damaged_scale_is_refused(self, kind, scale):
        linear = blocks(kind)
        at = _SCALES.get(kind, (0,))[-1]
        row = linear.weight[7].view(-1, BLOCKS[kind][2])
        row[0, at : at + 2] = torch.tensor([scale]).half().view(torch.uint8)
        with pytest.raises(NotFiniteError, match="a weight"):
            native.NativeLinear([linear])


@needs_library
@torch.inference_mode()
@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_of_4_bits_are_multiplied_as_they_are(group):
    x, bias = activations(), torch.randn(OUTPUTS)
    grouped = round_to_groups(torch.randn(OUTPUTS, COLUMNS), group)
    grouped.bias = bias
    made = native.pack_for_library(grouped)
    assert isinstance(made, native.NativeLinear)
    expected = in_8_bits(x) @ grouped.dequantise(slice(None)).double().T + bias
    torch.testing.assert_close(made(x).double(), expected, rtol=1e-5, atol=1e-4)
    for number in range(library().bw_best() + 1):
        assert torch.equal(native.NativeLinear([grouped], number)(x[:3]), made(x)[:3])
    size = -(-OUTPUTS // 16) * 16 * COLUMNS // group * (group // 2 + 4)
    assert made.weight.nbytes == size
    padded = round_to_groups(torch.randn(OUTPUTS, COLUMNS - 16), group)
    assert native.pack_for_library(padded) is padded  # its last group's columns are not all columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_to_blocks_of_8_bits_as_gguf_has_them(dtype):
    weight = torch.randn(OUTPUTS, COLUMNS).to(dtype)
    weight[3, 32:64] = 0
    rounded = native.round_to_q8_0(Linear(weight, torch.ones(OUTPUTS, dtype=dtype)))
    step = weight.float().view(OUTPUTS, -1, 32).abs().amax(2, keepdim=True) / 127
    off = (values(rounded) - weight.float()).view(OUTPUTS, -1, 32).abs()
    assert (off <= step * (0.5 + 127 * 2.0**-11)).all()  # the scale has 11 bits
    assert rounded.kind == 8
    assert torch.equal(rounded.bias, torch.ones(OUTPUTS, dtype=dtype))
    other = Linear(weight[:, :40])
    assert native.round_to_q8_0(other) is other


@needs_library
def test_parts_stand_in_a_row_with_their_biases():
    x, parts = activations(), [blocks(12), blocks(14, 24, seed=2)]
    for part in parts:
        part.bias = torch.randn(len(part.weight))
    found = native.pack_for_library(JoinedLinear(parts))(x)
    alone = [native.NativeLinear([blocks(12)])(x), native.NativeLinear([blocks(14, 24, 2)])(x)]
    assert torch.equal(found, torch.cat(alone, 1) + torch.cat([part.bias for part in parts]))


@needs_library
def test_a_type_whose_columns_do_not_fit_stays_in_groups():
    rows = torch.zeros(16, 48 // 32 * 34 + 34, dtype=torch.uint8)  # no file has such
    assert not native.can_multiply(BlockLinear(8, rows, 48))


@pytest.mark.parametrize("kind", [3, 14])
def test_without_the_library_blocks_become_groups(kind, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    linear = make_packer(Storage.STORED, torch.float32, "cpu")(blocks(kind))
    assert not isinstance(linear, native.NativeLinear)
    grouped = blocks(kind).grouped()
    assert isinstance(grouped, GroupedLinear)
    torch.testing.assert_close(grouped.dequantise(slice(None)), values(blocks(kind)))


@needs_library
@pytest.mark.parametrize(("allowed", "best"), [("DEFAULT", 0), ("AVX2", 1), ("AVX512", 2)])
def test_uses_no_more_instructions_than_torch_may(allowed, best, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: allowed)
    assert instruction_set() == min(best, library().bw_best())
