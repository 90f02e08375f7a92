"""Kernels that filter and draw, against torch: on a GPU if there is one, else interpreted."""

import math
import sys

import pytest
import torch

pytest.importorskip("triton")

from beamwright.engine import draw_kernel, filter_kernel
from beamwright.engine.noise import lineage_key, stack_keys
from beamwright.engine.sampling import RowSampling, Sampler, filter_logits, samples_in_kernel
from beamwright.sections import SamplingSettings
from engine.rows import FILTERS, LOGITS, logits_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's: infinities
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 500


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces of a vocabulary that an interpreter is quick with."""
    monkeypatch.setattr(draw_kernel, "PIECE_TOKENS", 128)


def make_rows(num_rows, seed=0, vocab=VOCAB, dtype=torch.float32):
    """Logits, keys and positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(num_rows, vocab, generator=generator)).to(DEVICE, dtype)
    keys = stack_keys([lineage_key(seed, (0, row)) for row in range(num_rows)], DEVICE)
    return logits, keys, torch.arange(num_rows, device=DEVICE) + 70


def sample(inputs, settings, *, fused, num_tokens=None, greedy=None):
    """settings: of every row, or of each."""
    logits = inputs[0]
    rows = settings if isinstance(settings, list) else [settings] * len(logits)
    how = RowSampling(len(rows), DEVICE)
    how.load(rows, greedy or [False] * len(rows))
    return Sampler(num_tokens or logits.shape[1], DEVICE, fused=fused).sample(*inputs, how)


def assert_same(inputs, settings, **options):
    """The same tokens as torch's, and nearly its log-probabilities; returns the tokens."""
    found = sample(inputs, settings, fused=True, **options)
    expected = sample(inputs, settings, fused=False, **options)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert torch.equal(found[0], expected[0])
    assert (found[1] - expected[1]).abs().max() < 1e-5
    return found[0]


@pytest.mark.parametrize(
    ("num_rows", "vocab", "temperature", "dtype"),
    [
        *((12, VOCAB, temperature, torch.float32) for temperature in (0.3, 1.0, 1.7)),
        *((4, VOCAB, 0.7, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
        *((3, vocab, 2.0, torch.float32) for vocab in (1, 127, 128, 129, 640)),
    ],
)
def test_it_draws_what_torch_draws(num_rows, vocab, temperature, dtype):
    """From logits of any type, and vocabularies around the size of a piece."""
    inputs = make_rows(num_rows, 1, vocab, dtype)
    tokens = assert_same(inputs, SamplingSettings(temperature=temperature))
    assert num_rows < 12 or len(set((tokens // 128).tolist())) > 2, "pieces that nobody wins"


def test_rows_without_a_token_are_never_drawn_nor_counted():
    inputs = make_rows(6)
    inputs[0][:, 300:] = 100.0
    tokens = assert_same(inputs, SamplingSettings(temperature=5.0), num_tokens=300)
    assert tokens.max() < 300


def test_the_lowest_of_equal_logits_wins():
    inputs = make_rows(2)
    inputs[0][0] = 1.0
    inputs[0][1, [130, 131, 400]] = 50.0
    assert assert_same(inputs, SamplingSettings(temperature=0.0)).tolist() == [0, 130]


def test_pieces_without_any_probability_and_rows_without_a_distribution():
    inputs = make_rows(5)
    inputs[0][0, :300] = -torch.inf
    inputs[0][1, 301:] = -torch.inf
    assert_same(tuple(each[:2] for each in inputs), SamplingSettings())
    inputs[0][2] = -torch.inf
    inputs[0][3, 200] = torch.nan
    inputs[0][4, 7] = torch.inf
    tokens, logprobs = sample(inputs, SamplingSettings(), fused=True)
    assert logprobs.isfinite().tolist() == [True, True, False, False, False]
    assert ((tokens >= 0) & (tokens < VOCAB)).all(), "the step goes on until the host looks"


def test_noise_decides_among_equal_logits():
    """Of many rows: there are near ties, and noise whose series is at its worst."""
    inputs = make_rows(24)
    inputs[0].zero_()
    assert_same(inputs, SamplingSettings(temperature=1.3))
    assert_same(inputs, SamplingSettings(temperature=1e-3))


def test_it_is_chosen_on_cuda_unless_nobody_wants_kernels(monkeypatch):
    cuda = torch.device("cuda")
    assert samples_in_kernel(cuda, "triton-tree")
    assert samples_in_kernel(cuda, "tree"), "with layer-wise offloading"
    assert not samples_in_kernel(cuda, "reference")
    assert not samples_in_kernel(torch.device("cpu"), "triton-tree")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not samples_in_kernel(cuda, "tree")


# --- filters: what kernels leave of a row, against torch's sort of all of it ------------------


ROUNDING = 1e-6  # of a sum of probabilities, and of a quotient of two


def left_by_kernels(logits, how):
    """Of each row the tokens that may be drawn [rows, tokens]."""
    threshold, last = filter_kernel.compute_thresholds(logits, *how.tensors)
    small = logits.dtype in (torch.bfloat16, torch.float16)
    order = logits.float() if small else logits.float() / how.temperature
    ids, threshold, last = torch.arange(logits.shape[1]), threshold.unsqueeze(1), last.unsqueeze(1)
    return (order > threshold) | ((order == threshold) & (ids.to(DEVICE) <= last))


def assert_left(logits, settings):
    """What torch leaves, in float64, where no sum or quotient lies within rounding of a threshold.

    In float32 torch's own sums of 151,936 tokens are off by 1e-5.
    """
    logits, how = logits.to(DEVICE), RowSampling.of(settings, DEVICE)
    scaled = logits.float() / how.temperature
    expected = (
        filter_logits(scaled.double(), how.flags, how.top_k, how.top_p, how.min_p) > -torch.inf
    )
    found = left_by_kernels(logits, how) & (scaled > -torch.inf)
    assert found.any(1).all()
    for row, token in (found != expected).nonzero().tolist():
        mine, sets = scaled[row].double(), settings[row]
        if sets.top_k is not None and sets.top_k < len(mine):
            mine[mine < mine.topk(sets.top_k).values[-1]] = -torch.inf
        probs = mine.softmax(0)
        before = probs[(mine > mine[token]) | ((mine == mine[token]) & (_ids(mine) < token))].sum()
        off_p = abs(float(before) - sets.top_p)
        off_min_p = abs(float(probs[token] / probs.max()) - (sets.min_p or math.inf))
        assert min(off_p, off_min_p) < ROUNDING, (sets, row, token, off_p, off_min_p)


def _ids(row):
    return torch.arange(len(row), device=row.device)


@pytest.mark.parametrize("number", range(len(LOGITS)))
def test_they_leave_what_torch_leaves(number):
    """Every other pair of the two tables, which the interpreter takes long for."""
    settings = [SamplingSettings(temperature=0.8, **each) for each in FILTERS[number % 2 :: 2]]
    assert_left(logits_of([*LOGITS][number], len(settings)).bfloat16(), settings)


FEW = [SamplingSettings(temperature=0.8, **FILTERS[n]) for n in (2, 4, 5)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_logits_of_every_type_are_ordered_by_their_bits(dtype):
    assert_left(logits_of("of a trained model", 3, seed=1).to(dtype), FEW)


@pytest.mark.parametrize("room", [0, 40])
def test_rows_of_which_much_is_left_are_searched_as_they_are(monkeypatch, room):
    """In several pieces and chunks."""
    for name, size in (("ROOM", room), ("PIECE_TOKENS", 128), ("CHUNK_TOKENS", 128)):
        monkeypatch.setattr(filter_kernel, name, size)
    for kind in ("with ties", "all the same"):
        assert_left(logits_of(kind, 3, vocab=300).bfloat16(), FEW)


def test_what_a_temperature_makes_equal_is_equal():
    """Neighbours in float32 fall together; of them top-k leaves all, top-p the lower ids."""
    logits = torch.full((2, 96), -50.0)
    one = torch.tensor(7.8)
    for place in range(8):
        logits[:, 40 - 5 * place] = one
        one = torch.nextafter(one, torch.tensor(8.0))
    assert len((logits[0] / 1.9).unique()) < 8
    filters = [{"top_k": 3}, {"top_p": 0.45}]
    assert_left(logits, [SamplingSettings(temperature=1.9, **each) for each in filters])


def test_a_real_vocabulary(monkeypatch):
    """Few tokens that are left, and most of them."""
    monkeypatch.setattr(filter_kernel, "CHUNK_TOKENS", 1 << 14)  # an interpreter's are costly
    logits = logits_of("flat", 2, vocab=151_936, seed=3)
    logits[1] = 4 * logits[1]
    assert_left(logits.bfloat16(), [FEW[0], FEW[2]])


def test_rows_draw_what_torch_draws_and_no_row_follows_another(monkeypatch):
    """Beside greedy rows, and such as have no filters."""
    monkeypatch.setattr(draw_kernel, "PIECE_TOKENS", 128)
    rows = [{}, *FILTERS[:6], {"temperature": 0.0, "top_k": 3}, {"min_p": 0.1}]
    settings = [SamplingSettings(**({"temperature": 1.1} | each)) for each in rows]
    logits = logits_of("flat", len(rows), vocab=500, seed=4).to(DEVICE)
    keys = stack_keys([lineage_key(4, (0, row)) for row in range(len(rows))], DEVICE)
    inputs = logits, keys, torch.arange(len(rows), device=DEVICE) + 9
    found, plain = (
        Sampler(500, DEVICE, fused=fused).sample(*inputs, RowSampling.of(settings, DEVICE))
        for fused in (True, False)
    )
    assert torch.equal(found[0], plain[0])
    assert (found[1] - plain[1]).abs().max() < 1e-5
    for row in (0, 3, 7):
        one = slice(row, row + 1)
        how = RowSampling.of(settings[one], DEVICE)
        alone = Sampler(500, DEVICE, fused=True).sample(*(each[one] for each in inputs), how)
        assert torch.equal(alone[0], found[0][one])
        assert torch.equal(alone[1], found[1][one])
