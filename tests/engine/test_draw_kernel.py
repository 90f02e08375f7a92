"""One kernel that draws, against torch's operations: on a GPU if there is one, else interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from beamwright.engine import draw_kernel
from beamwright.engine.noise import lineage_key, stack_keys
from beamwright.engine.sampling import RowSampling, Sampler, draws_in_kernel
from beamwright.sections import SamplingSettings

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


@pytest.mark.parametrize(("seed", "temperature"), [*enumerate([0.3, 1.0, 1.7])])
def test_it_draws_what_torch_draws(seed, temperature):
    tokens = assert_same(make_rows(12, seed), SamplingSettings(temperature=temperature))
    assert len(set((tokens // 128).tolist())) > 2, "pieces that nobody wins prove little"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_type_are_scaled_in_float32(dtype):
    assert_same(make_rows(4, 5, dtype=dtype), SamplingSettings(temperature=0.7))


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 640])
def test_vocabularies_around_the_size_of_a_piece(vocab):
    assert_same(make_rows(3, 1, vocab), SamplingSettings(temperature=2.0))


def test_rows_without_a_token_are_never_drawn_nor_counted():
    inputs = make_rows(6)
    inputs[0][:, 300:] = 100.0
    tokens = assert_same(inputs, SamplingSettings(temperature=5.0), num_tokens=300)
    assert tokens.max() < 300


def test_rows_of_every_temperature_and_greedy_ones():
    """Greedy by their settings or by their node."""
    rows = [SamplingSettings(temperature=t) for t in (0.0, 0.5, 2.0, 4.0)] * 2
    greedy = [False] * 4 + [True] * 4
    inputs = make_rows(8)
    tokens = assert_same(inputs, rows, greedy=greedy)
    likeliest = inputs[0].argmax(-1)
    assert torch.equal(tokens[[0, 4, 5, 6, 7]], likeliest[[0, 4, 5, 6, 7]])
    assert not torch.equal(tokens[1:4], likeliest[1:4])


def test_the_lowest_of_equal_logits_wins():
    inputs = make_rows(2)
    inputs[0][0] = 1.0
    inputs[0][1, [130, 131, 400]] = 50.0
    assert assert_same(inputs, SamplingSettings(temperature=0.0)).tolist() == [0, 130]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
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
    assert draws_in_kernel(cuda, "triton-tree")
    assert draws_in_kernel(cuda, "tree"), "with layer-wise offloading"
    assert not draws_in_kernel(cuda, "reference")
    assert not draws_in_kernel(torch.device("cpu"), "triton-tree")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not draws_in_kernel(cuda, "tree")


@pytest.mark.nightly
def test_the_kernels_compile_for_a_card_that_is_not_there():
    """With the accurate logarithm and quotient that torch has, for those that may win."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compile_draw.py"), "90"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    for built in json.loads(found.stdout).values():
        assert built["approximate_log"] is built["exact_quotient"] is built["draws"]
        assert built["accurate_log"]
