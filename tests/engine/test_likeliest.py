"""The likeliest tokens are those of a sorted softmax, ties in the order of their ids."""

import pytest
import torch

from beamwright.engine.likeliest import MOST, LikeliestBuffers, likeliest
from beamwright.sections import SamplingSettings

CPU = torch.device("cpu")
INF = float("inf")


def sorted_out(logits, num_tokens):
    """[(id, log-probability)] of each row, by Python's sort."""
    logprobs = logits[:, :num_tokens].float().log_softmax(-1).tolist()
    ordered = [sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0])) for row in logprobs]
    return [row[:MOST] for row in ordered]


def random_logits(rows, vocab, dtype=torch.float32, seed=0):
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "vocab", "num_tokens"), [(1, 50, 50), (40, 3000, 2990), (3, 9, 7)]
)
def test_they_are_those_of_a_sort(dtype, rows, vocab, num_tokens):
    """bfloat16 has a tie in every row."""
    logits = random_logits(rows, vocab, dtype)
    ids, logprobs = likeliest(logits, num_tokens)
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    assert [list(zip(*pair, strict=True)) for pair in pairs] == sorted_out(logits, num_tokens)
    assert ids.shape == (rows, min(MOST, num_tokens))


@pytest.mark.parametrize(
    "row",
    [
        [0.0] * 40,
        [-INF] * 30 + [1.0, 1.0],
        [0.0, 500.0, -0.0, 500.0] * 10,
        [300.0] + [-INF] * 29,
        [-INF, 0.0] * 20,
    ],
)
def test_ties_and_tokens_without_any_probability(row):
    logits = torch.tensor([row, row[::-1]])
    ids, logprobs = likeliest(logits, len(row))
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    assert [list(zip(*pair, strict=True)) for pair in pairs] == sorted_out(logits, len(row))


@pytest.mark.parametrize("everyone", [False, True])
def test_rows_get_as_many_as_they_ask_for(everyone):
    buffers = LikeliestBuffers(16, 4, everyone=everyone)
    buffers.load([0, 3, 0, 20], CPU)
    steps = [random_logits(4, 60, seed=seed) for seed in range(5)]
    for number, logits in enumerate(steps):
        buffers.keep(logits, 60, torch.tensor([number]))
    found = buffers.found(4)
    for place, count in ((1, 3), (3, 20)):
        expected = [tuple(sorted_out(logits, 60)[place][:count]) for logits in steps[:4]]
        assert found.pop(place) == expected
    assert found == {}


def test_nobody_asks_and_nothing_is_computed(monkeypatch):
    buffers = LikeliestBuffers(16, 2, everyone=True)
    buffers.load([0, 0], CPU)
    buffers.keep(None, 60, None)
    assert (buffers.asked, buffers.found(3), len(buffers._ids)) == (False, {}, 0)


def test_buffers_stay_in_place():
    """A captured step holds their addresses."""
    buffers = LikeliestBuffers(16, 2, everyone=True)
    buffers.load([1, 0], CPU)
    before = buffers._ids.data_ptr(), buffers._logprobs.data_ptr()
    for wanted in ([0, 0], [5, 20], [0, 1]):
        buffers.load(wanted, CPU)
    assert (buffers._ids.data_ptr(), buffers._logprobs.data_ptr()) == before


def test_nobody_can_ask_for_more():
    (most,) = [
        each.le
        for each in SamplingSettings.model_fields["top_logprobs"].metadata
        if hasattr(each, "le")
    ]
    assert most == MOST
