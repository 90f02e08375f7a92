"""What a step and a prefill pass launch, counted without a card, on torch's `meta` device."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from beamwright.models.named import shape_from_text
from beamwright_lab.gpu.launches import (
    DEVICE,
    captured_prefill,
    on_card,
    prefill_launches,
)

BESIDE = 13
"""Of a token: the lookup, the first norm, the head, two kernels of the draw, places and results."""


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
