"""What a step and a prefill pass launch, counted without a card, on torch's `meta` device."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from beamwright.models.named import shape_from_text
from beamwright.models.shape import LayerGroup
from beamwright.plan.costs import Storage
from beamwright.sections import SamplingSettings
from beamwright_lab.gpu.launches import (
    DEVICE,
    captured_prefill,
    on_card,
    prefill_launches,
    step_launches,
)

BESIDE = 13
"""Of a token: the lookup, the first norm, the head, two kernels of the draw, places and results."""


def of_layers(launches, name, *how):
    """What one more layer launches, by name, and how many launches are beside the layers."""
    shape = shape_from_text(name)
    few, more = (launches(replace(shape, layers=n), *how) for n in (1, 2))
    assert more.copied == few.copied
    layer = Counter(more.names) - Counter(few.names)
    return layer, len(few.names) - layer.total(), few.copied


@pytest.mark.parametrize(
    ("name", "rows", "layer"),
    [
        ("qwen2.5-0.5b", 16, 10),  # a gate apart: its product is narrow
        ("qwen2.5-1.5b", 64, 9),
        ("qwen2.5-1.5b", 256, 10),  # the gate is in the product of few rows
        ("qwen2.5-7b", 16, 9),  # parts of `out` and `down` are added up in norms
        ("llama-3.1-8b", 16, 9),
        ("qwen3-8b", 16, 9),  # norms of heads are in the rotation
    ],
)
def test_launches_of_a_layer_and_a_token(name, rows, layer):
    found, beside, copied = of_layers(step_launches, name, rows)
    assert (found.total(), beside, copied) == (layer, BESIDE, 0), found


@pytest.mark.parametrize("storage", [Storage.INT4, Storage.INT8])
def test_weights_in_codes_add_the_sums_of_queries(storage):
    found, beside, copied = of_layers(partial(step_launches, storage=storage), "qwen2.5-7b", 64)
    assert (found.total(), beside, copied) == (10, BESIDE, 0), found
    assert found["add_parts"] == 1


@pytest.mark.parametrize(
    ("sampling", "more"),
    [
        ({"top_p": 0.9}, 2),
        ({"top_k": 20, "min_p": 0.1}, 2),
        ({"top_logprobs": 3}, 44),  # sixteen rows at a time
    ],
)
def test_what_filters_and_likeliest_tokens_add_to_a_token(sampling, more):
    shape = replace(shape_from_text("qwen2.5-1.5b"), layers=1)
    plain = step_launches(shape, 64)
    found = step_launches(shape, 64, SamplingSettings(**sampling))
    assert found.copied == 0
    assert len(found.names) - len(plain.names) == more


def test_layers_with_windows_launch_what_others_do():
    shape = shape_from_text("qwen3-0.6b")
    sizes = {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    groups = LayerGroup((0,), **sizes, window=512), LayerGroup((1,), **sizes)
    windowed = step_launches(replace(shape, layers=2, groups=groups), 16)
    plain = step_launches(replace(shape, layers=2), 16)
    assert Counter(each.name for each in windowed.launches) == Counter(
        each.name for each in plain.launches
    )
    assert windowed.copied == 0


def test_launches_of_a_prefill_pass():
    layer, beside, copied = of_layers(prefill_launches, "qwen2.5-1.5b", (200, 40))
    assert layer.total() <= 10, layer
    assert beside <= 6
    assert copied <= 2


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen2.5-7b", "opt-6.7b"])
def test_a_captured_prefill_pass_is_a_replay_whatever_the_layers(name):
    """Token ids and lists go to the card, what is read is copied; nothing else asks the host."""
    shape = replace(shape_from_text(name), layers=2)
    beside, step = captured_prefill(shape, (200, 40))
    assert (beside.names, beside.copied) == (["copy_", "copy_", "clone"], 2)
    plain = prefill_launches(shape, (200, 40))
    assert step.copied == 0
    assert len(step.names) <= len(plain.names) + 1, "what was found is put where it is kept"


def test_reads_by_the_host_and_tensors_of_two_devices_are_errors():
    """Without which the counts above would prove less."""
    here, there = torch.ones(4), torch.ones(4, device=DEVICE)
    for read in (there.tolist, there[0].item, lambda: bool(there[0] > 0), there.nonzero):
        with on_card(), pytest.raises((RuntimeError, NotImplementedError)):
            read()
    for mix in (lambda: F.linear(there[None], here[None]), lambda: here + there):
        with on_card(), pytest.raises(RuntimeError, match=r"device|the card and on the host"):
            mix()
    with on_card() as noted:
        there.copy_(here)
    assert (noted.names, noted.copied) == (["copy_"], 1)
