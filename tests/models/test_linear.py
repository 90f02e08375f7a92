"""Projections packed by oneDNN; int8 and int4 against the same weights, turned back."""

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F

from beamwright.models.decoder import Linear
from beamwright.models.grouped import (
    _CACHED_VALUES,
    UNPACK,
    GroupedLinear,
    can_unpack,
    dequantise_table,
)
from beamwright.models.linear import (
    PackedLinear,
    make_packer,
    prepack_linear,
    quantise_linear,
    quiet_import,
)
from beamwright.models.load import inspect_model, load_model
from beamwright.plan.costs import INT4_GROUP, Storage, weight_bytes
from beamwright.sections import ModelSettings
from engines import projections, random_decoder


def draw(seed, *size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def load(folder, weights, **settings):
    return load_model(str(folder), ModelSettings(model=str(folder), weights=weights, **settings))


def tensors_in(value):
    """Every tensor, by its identity."""
    if isinstance(value, torch.Tensor):
        return {id(value): value}
    parts = value if isinstance(value, list) else vars(value).values()
    parts = [part for part in parts if isinstance(part, list) or hasattr(part, "__dict__")]
    return {key: tensor for part in parts for key, tensor in tensors_in(part).items()}


@torch.inference_mode()
def test_int4_is_off_by_half_a_step_at_most_and_multiplied_in_tiles():
    rows, columns = 2 * _CACHED_VALUES // (2 * INT4_GROUP) + 24, 2 * INT4_GROUP
    original = Linear(draw(0, rows, columns), draw(1, rows))
    linear = quantise_linear(original, Storage.INT4)
    values = linear.dequantise(slice(None))
    groups = original.weight.view(rows, 2, INT4_GROUP)
    step = (groups.amax(2) - groups.amin(2)).repeat_interleave(INT4_GROUP, dim=1) / 15
    assert ((values - original.weight).abs() <= 0.502 * step).all()  # scale and low: 11 bits
    x = draw(2, 8, columns)
    assert (linear(x) - Linear(values, original.bias)(x)).abs().max() < 1e-4


@pytest.mark.parametrize("columns", [64, 96, 100])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@torch.inference_mode()
def test_columns_that_fill_no_group_are_no_columns(columns, dtype):
    kind = getattr(torch, dtype)
    linear = quantise_linear(Linear(draw(0, 24, columns).to(kind)), Storage.INT4)
    x = draw(1, 8, columns).to(kind)
    found, expected = linear(x), F.linear(x, linear.dequantise(slice(None)).to(kind))
    assert found.dtype == kind
    assert (found - expected).abs().max() <= 2 * torch.finfo(kind).eps * 8 * expected.abs().max()


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_torchs_operator_turns_groups_back_as_plain_torch_does(monkeypatch, bits, group):
    codes = torch.randint(
        2**bits, (48, 3 * group), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    linear = GroupedLinear.of(bits, codes, *(draw(seed, 48, 3).half().float() for seed in (1, 2)))
    scale, low = linear.scales_and_lows.float().split(1, dim=-1)
    expected = (codes.view(48, 3, group).float() * scale + low).flatten(1)
    assert torch.equal(dequantise_table(linear.weight, bits), expected)
    assert torch.equal(linear.dequantise(slice(8, 40)), expected[8:40])

    def wrong(table):
        return torch.zeros(len(table), group)

    can_unpack.cache_clear()
    monkeypatch.setitem(UNPACK, bits, wrong)
    assert torch.equal(linear.dequantise(slice(8, 40)), expected[8:40])  # it is not trusted
    can_unpack.cache_clear()


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize(
    ("weights", "dtype"),
    [("auto", "float32"), ("int8", "bfloat16"), ("int4", "float32"), ("int4", "bfloat16")],
)
def test_bytes_are_counted_as_they_are(write_family, family, weights, dtype):
    folder, _ = write_family(family)
    model = load(folder, weights, dtype=dtype)
    decoder = model.decoder
    stored = sum(tensor.nbytes for tensor in tensors_in(decoder.weights).values())
    if weights == "int8":  # a row's lowest value, which a card keeps
        stored += 4 * sum(len(each.weight) for each in projections(decoder))
    assert weight_bytes(decoder.shape, decoder.dtype.itemsize, model.storage) == stored
    found = inspect_model(ModelSettings(model=str(folder), weights=weights, dtype=dtype))
    assert (found["weight_bytes"], found["weights"]) == (stored, str(model.storage))


@pytest.mark.parametrize("storage", [Storage.PLAIN, Storage.INT8, Storage.BYTES, Storage.INT4])
@torch.inference_mode()
def test_rows_have_the_same_bits_at_any_batch(storage):
    linear = quantise_linear(Linear(draw(0, 384, 256), draw(1, 384)), storage)
    linear = make_packer(storage, torch.float32, "cpu")(linear)
    x = draw(2, 256, 256)
    whole = linear(x)
    for rows in (8, 16, 24, 32, 64, 136):
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[-rows:]), whole[-rows:])


# --- oneDNN ----------------------------------------------------------------------------------


def test_an_operator_that_torch_lacks_or_that_errs_is_not_used(monkeypatch):
    linear = Linear(draw(0, 24, 40))
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: x[:, :24] * 0)
    assert prepack_linear(linear) is linear

    def refuse(self, weight, bias):
        raise NotImplementedError

    monkeypatch.setattr(PackedLinear, "__init__", refuse)
    assert prepack_linear(linear) is linear


# --- what other libraries say is held back while they are imported, and no longer -------------


def test_remarks_are_held_back_for_the_import_only(caplog):
    logger = logging.getLogger("torchao.some.part")
    with quiet_import():
        logger.warning("Failed to load")
        warnings.warn("deprecated", stacklevel=1)
    logger.warning("later")
    assert [record.message for record in caplog.records] == ["later"]
    with pytest.warns(UserWarning, match="deprecated"):
        warnings.warn("deprecated", stacklevel=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 1024, 1032, 4864])
def test_a_single_row_has_the_bits_that_it_has_among_others(dtype, columns):
    """With sums that cancel, so that another order of them would show."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(columns, generator=generator)
    half, asked = (torch.randn(n, columns // 2, generator=generator) for n in (40, 16))
    weight = torch.cat([half, -half], 1)[:, order].to(dtype).contiguous()
    x = torch.cat([asked, asked], 1)[:, order].to(dtype)
    for linear in (
        prepack_linear(Linear(weight, torch.ones(40, dtype=dtype))),
        prepack_linear(Linear(weight)),
    ):
        if not linear.is_exact_for_one_row:
            pytest.skip("nothing is packed here")
        assert torch.equal(linear(x), torch.cat([linear(row) for row in x.split(1)]))


def test_a_decoder_takes_one_row_where_all_its_products_do():
    shape = "llama,layers=1,hidden=64,heads=2,kv_heads=1,intermediate=64,vocab=64,context=64"
    packed, plain = random_decoder(shape, pack=prepack_linear), random_decoder(shape)
    assert not plain.is_exact_for_one_row
    assert packed.is_exact_for_one_row == isinstance(packed.weights.lm_head, PackedLinear)
    packed.weights.layers[0].down = plain.weights.layers[0].down
    assert not packed.is_exact_for_one_row
