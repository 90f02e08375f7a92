"""A recurrent layer's step in Triton against torch's; interpreted where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from beamwright.kv.states import BEGINS, GOES_ON, IDLE, StateBlocks, StatePlace
from beamwright.models import step_kernels, steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = [GOES_ON, BEGINS, IDLE, GOES_ON, GOES_ON]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def several_programs_for_a_head(monkeypatch):
    monkeypatch.setattr(step_kernels, "_NUMBERS", 256)


def drawn(*size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def assert_close(found, expected):
    """The interpreter cuts off what does not fit into bfloat16, so that a whole step is allowed."""
    step = torch.finfo(found.dtype).eps
    near = 8 * step * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=2 * step, atol=near)


class Pool:
    """Rows' records in shuffled blocks, with random numbers of a dtype everywhere.

    The first row reads another's blocks, as the first token of a sibling; the others their own.
    """

    def __init__(self, dtype, aligned_tensor_bytes, block_bytes):
        rows, fixed = len(WAYS), -(-aligned_tensor_bytes // block_bytes)
        order = torch.randperm((rows + 1) * fixed + 2, generator=torch.Generator().manual_seed(3))
        owned = order[: (rows + 1) * fixed].view(rows + 1, fixed).to(DEVICE, torch.int32)
        self.storage = drawn(len(order), block_bytes // dtype.itemsize, dtype=dtype)
        sources = torch.cat([owned[rows:], owned[1:rows]])
        ways = torch.tensor(WAYS, dtype=torch.int32, device=DEVICE)
        self.tables = sources, owned[:rows].contiguous(), ways
        self.dtype, self.went = dtype, ways != IDLE

    def blocks(self, rows=slice(None)):
        """Of some rows, in a copy of the pool."""
        storage = self.storage.clone().view(torch.uint8)
        return StateBlocks(storage, *(table[rows].contiguous() for table in self.tables))

    def part(self, storage, table, offset, size):
        """Rows' numbers [rows, *size], so many bytes behind a record's start."""
        records = storage.view(self.dtype)[table.long()].flatten(1)
        first = offset // self.dtype.itemsize
        return records[:, first : first + torch.Size(size).numel()].unflatten(1, size)

    def before(self, offset, size):
        """Of each row the state that it reads."""
        sources, _, ways = self.tables
        found = self.part(self.storage, sources, offset, size)
        return torch.where((ways == GOES_ON).view(-1, *[1] * len(size)), found, 0)

    def assert_written(self, blocks, offset, after):
        """Rows that are computed have these states, and nothing else in the pool has changed."""
        table = self.tables[1][self.went]
        found = self.part(blocks.storage, table, offset, after.shape[1:])
        assert_close(found, after[self.went])
        places = torch.arange(self.storage.numel(), device=DEVICE).view(self.storage.shape)
        own = places[table.long()].flatten(1)[:, offset // self.dtype.itemsize :]
        expected = self.storage.clone().flatten()
        expected[own[:, : after[0].numel()]] = found.flatten(1)
        assert torch.equal(blocks.storage.view(self.dtype).flatten(), expected)

    def check(self, name, offset, size, inputs, *fixed, **how):
        """A step's kernel is torch's, leaves other rows alone, and a row follows no batch."""
        after, blocks = self.before(offset, size), self.blocks()
        expected = getattr(steps, name)(after, *inputs, *fixed, **how)
        kernel = getattr(step_kernels, name)
        found = kernel(StatePlace(blocks, offset, self.dtype), *inputs, *fixed, **how)
        assert_close(found[self.went], expected[self.went])
        assert not found[~self.went].any()
        self.assert_written(blocks, offset, after)
        last = StatePlace(self.blocks(slice(-1, None)), offset, self.dtype)
        alone = kernel(last, *(x[-1:] for x in inputs), *fixed, **how)
        assert torch.equal(alone, found[-1:]), "a row follows the batch"


# Key heads, heads, key dim and value dim; blocks' bytes over those of a head, an offset in heads.
SHAPES = {
    "whole heads": ((2, 4, 16, 32), 2, 3),
    "heads across blocks": ((1, 3, 16, 24), 0.75, 0.5),
    "heads of Mamba-2 across blocks": ((1, 3, 24, 16), 0.75, 0.5),
    "no power of two": ((2, 2, 12, 20), 3, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("step", ["delta_step", "scan_step"])
def test_the_gated_delta_rule_and_the_step_of_mamba_2(step, name, kept, dtype):
    (groups, heads, first, second), blocks_over, heads_before = SHAPES[name]
    head_bytes = first * second * kept.itemsize
    offset = int(heads_before * head_bytes)
    pool = Pool(kept, offset + heads * head_bytes + 64, int(blocks_over * head_bytes))
    shared, own = (first, second) if step == "delta_step" else (second, first)
    widths = [groups * shared, groups * shared, heads * own, heads]
    mixed = drawn(len(WAYS), sum(widths), dtype=dtype).split(widths, dim=1)
    two = [part.unflatten(1, (groups, shared)) for part in mixed[:2]]
    values, size = mixed[2].unflatten(1, (heads, own)), (heads, first, second)
    if step == "delta_step":
        gates = -drawn(len(WAYS), heads).abs(), mixed[3].sigmoid()
        pool.check(step, offset, size, (*two, values, *gates))
    else:
        fixed = drawn(heads), -drawn(heads).exp(), drawn(heads)
        pool.check(step, offset, size, (values, mixed[3], *two), *fixed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("biased", "silu"), [(False, True), (True, False)])
def test_the_short_convolution(biased, silu, dtype):
    channels, taps = 300, 4
    offset, size = 48, channels * taps * dtype.itemsize
    pool = Pool(dtype, offset + size + 16, size // 2 + 8)
    x, weight = drawn(len(WAYS), channels + 9, dtype=dtype)[:, 9:], drawn(channels, taps) / 2
    bias = drawn(channels, dtype=dtype) if biased else None
    how = {"silu": silu}
    pool.check("convolution_step", offset, (channels, taps), (x,), weight.to(dtype), bias, **how)


def test_the_rule_is_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    state, value = drawn(3, 4, 16, 24), drawn(3, 4, 24)
    query, key = drawn(3, 2, 16), drawn(4, 2, 16)[1:]
    decay, beta = -drawn(3, 4).abs(), drawn(3, 4).sigmoid()
    for_each = [x.repeat_interleave(2, dim=1) for x in (query, key)]  # older ones do it outside
    inputs = [x[:, None] for x in (*for_each, value, decay, beta)]
    expected, after = modeling.torch_recurrent_gated_delta_rule(
        *inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    found = steps.delta_step(state, query, key, value, decay, beta)
    torch.testing.assert_close(found, expected[:, 0])
    torch.testing.assert_close(state, after)


def test_mamba_2_is_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    state, x, rate = drawn(3, 4, 24, 16), drawn(3, 4, 24), drawn(3, 4)
    enters, leaves = drawn(3, 2, 16), drawn(4, 2, 16)[1:]
    shift, decay, skip = drawn(4), -drawn(4).exp(), drawn(5)[1:]
    kept = state.clone()
    found = steps.scan_step(kept, x, rate, enters, leaves, shift, decay, skip)
    wide = x.shape[2]
    expected = modeling.mamba2_selective_state_update(
        state, x, rate[..., None].expand(-1, -1, wide), decay[:, None, None].expand(-1, wide, 16),
        enters, leaves, skip[:, None].expand(-1, wide), dt_bias=shift[:, None].expand(-1, wide),
        dt_softplus=True,
    )  # fmt: skip
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(kept, state)
