"""What a row draws, and what is kept of its distribution: by oracles of plain numbers."""

import pytest
import torch

from beamwright.engine.noise import gumbel_noise, lineage_key, spread_tokens, stack_keys
from beamwright.engine.sampling import MOST_LIKELIEST, RowSampling, Sampler, likeliest
from beamwright.sections import SamplingSettings
from engine.rows import FILTERS, LOGITS, logits_of

INF = float("inf")
CPU = torch.device("cpu")


def draw_keys(num_rows, seed=0):
    return stack_keys([lineage_key(seed, (0, row)) for row in range(num_rows)], CPU)


def noise_of(keys, positions, token_ids):
    return gumbel_noise(keys, positions, spread_tokens(token_ids))


def sample(logits, keys, positions, num_tokens=None, greedy=None, **settings):
    """Tokens and log-probabilities of rows that all have these settings."""
    rows = [SamplingSettings(**settings)] * len(logits)
    how = RowSampling(len(rows), CPU)
    how.load(rows, greedy or [False] * len(rows))
    return Sampler(num_tokens or logits.shape[-1], CPU).sample(logits, keys, positions, how)


def draw(logits, num_rows=1, num_positions=1, seed=0, **settings):
    """Tokens [positions, rows] drawn from one row of logits."""
    keys, rows = draw_keys(num_rows, seed), logits.expand(num_rows, -1)
    positions = (torch.full((num_rows,), p) for p in range(num_positions))
    return torch.stack([sample(rows, keys, each, **settings)[0] for each in positions])


# --- noise -----------------------------------------------------------------------------------


def test_a_stream_has_its_own_key():
    lineages = [(0, 1), (0, 2), (0, 1, 0), ("0", 1), (0, 11), (0, 1, 1)]
    keys = [*(lineage_key(0, each) for each in lineages), lineage_key(0, (0, 1), "rollout")]
    keys += [lineage_key(seed, (0, 1)) for seed in (1, 10)]
    assert len(set(keys)) == len(keys)
    assert lineage_key(0, (0, 1)) == keys[0]
    assert all(-(2**31) <= half < 2**31 for key in keys for half in key)


def test_the_random_stream_is_pinned():
    """A change of these numbers changes every tree that anybody has published."""
    assert lineage_key(0, (0, 1)) == (-872878631, -683522499)
    found = noise_of(draw_keys(2), torch.tensor([5, 6]), torch.tensor([0, 7, 400]))
    expected = torch.tensor([[2.26977, 1.626417, 0.25025], [-0.776888, 1.69254, 2.596475]])
    assert torch.allclose(found, expected, atol=1e-5)


# --- drawing ---------------------------------------------------------------------------------


def chi_square(tokens, probs):
    counts = torch.bincount(tokens.flatten(), minlength=len(probs)).double()
    expected = probs * tokens.numel()
    live = probs > 0
    assert counts[~live].sum() == 0
    return (((counts - expected) ** 2)[live] / expected[live]).sum().item()


ONE_ROW = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5]])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature):
    tokens = draw(ONE_ROW, num_rows=50, num_positions=400, temperature=temperature)
    probs = (ONE_ROW[0].double() / temperature).softmax(0)
    assert chi_square(tokens, probs) < 24.3  # 7 degrees of freedom, p = 0.001


def test_rows_of_the_head_without_a_token_are_never_drawn():
    logits = torch.zeros(64, 20)
    logits[:, 12:] = 50.0
    positions = torch.zeros(64, dtype=torch.long)
    tokens, logprobs = sample(logits, draw_keys(64), positions, num_tokens=12)
    assert int(tokens.max()) < 12
    assert torch.allclose(logprobs, torch.tensor(1 / 12).log())


# --- rows of one batch -----------------------------------------------------------------------

MIXED = (
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"top_k": 5},
    {"temperature": 0.3},
    {"top_k": 500, "top_p": 0.5, "min_p": 0.1},
    {"top_k": 60, "temperature": 2.0},
    {},
)


def plain_draw(logits, keys, positions, temperature=0.8, top_k=None, top_p=1.0, min_p=None):
    """The oracle: all rows by the same numbers, and nothing in tensors."""
    if temperature == 0:
        return logits.argmax(-1)
    scaled = logits / temperature
    if top_k is not None and top_k < scaled.shape[1]:
        least = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    if top_p < 1.0:
        ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= top_p
        hidden = torch.zeros_like(outside).scatter(1, index, outside)
        scaled = scaled.masked_fill(hidden, float("-inf"))
    if min_p is not None:
        floor = scaled.softmax(-1).amax(-1, keepdim=True) * min_p
        scaled = scaled.masked_fill(scaled.softmax(-1) < floor, float("-inf"))
    noise = noise_of(keys, positions, torch.arange(logits.shape[1]))
    return noise.add_(scaled).argmax(-1)


@pytest.mark.parametrize("settings", MIXED, ids=str)
def test_equal_rows_draw_as_by_plain_numbers(settings):
    logits = torch.randn(256, 300, generator=torch.Generator().manual_seed(2)) * 3
    keys, positions = draw_keys(256), torch.arange(256) * 7
    found, logprobs = sample(logits, keys, positions, **settings)
    assert torch.equal(found, plain_draw(logits, keys, positions, **settings))
    assert torch.equal(logprobs, logits.log_softmax(-1).gather(1, found.unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize("tile_rows", [None, 64])
def test_what_a_row_may_draw_is_the_same_whatever_others_do(tile_rows):
    """To the last bit."""
    logits = torch.randn(256, 300, generator=torch.Generator().manual_seed(3)) * 3
    keys, positions = draw_keys(256), torch.arange(256) * 5
    settings = [SamplingSettings(**MIXED[row % len(MIXED)]) for row in range(256)]
    mixed = RowSampling.of(settings, CPU)
    sampler = Sampler(300, CPU, tile_rows=tile_rows)
    found, logprobs = sampler.sample(logits, keys, positions, mixed)
    for number in range(len(MIXED)):
        rows = slice(number, None, len(MIXED))
        alone = RowSampling.of(settings[rows], CPU)
        drawn = sampler.sample(logits[rows], keys[rows], positions[rows], alone)
        assert torch.equal(drawn[0], found[rows])
        assert torch.equal(drawn[1], logprobs[rows])


# --- statistics of the distribution ----------------------------------------------------------


def stats_of(logits, num_tokens=None, names=("entropy", "confidence")):
    found = Sampler(num_tokens or logits.shape[-1], CPU, names).stats(
        logits, RowSampling(len(logits), CPU)
    )
    assert all(values.shape == logits.shape[:1] for values in found.values())
    return {name: values.tolist() for name, values in found.items()}


def test_statistics_see_drawable_tokens_only():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    assert stats_of(logits, num_tokens=25) == stats_of(logits[:, :25])
    impossible = torch.cat([logits, torch.full((5, 3), float("-inf"))], dim=1)
    assert stats_of(impossible)["entropy"] == pytest.approx(stats_of(logits)["entropy"])


# --- the likeliest tokens --------------------------------------------------------------------


def random_logits(rows, vocab, dtype):
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)


@pytest.mark.parametrize(
    ("logits", "num_tokens"),
    [
        *(
            (random_logits(rows, vocab, dtype), num_tokens)
            for dtype in (torch.float32, torch.float64, torch.bfloat16)  # with a tie in every row
            for rows, vocab, num_tokens in ((1, 50, 50), (40, 3000, 2990), (3, 9, 7))
        ),
        *(
            (torch.tensor([row, row[::-1]]), len(row))
            for row in (
                [0.0] * 40,
                [-INF] * 30 + [1.0, 1.0],
                [0.0, 500.0, -0.0, 500.0] * 10,
                [300.0] + [-INF] * 29,
                [-INF, 0.0] * 20,
            )
        ),
    ],
)
def test_the_likeliest_tokens_are_those_of_a_sort_ties_in_the_order_of_their_ids(
    logits, num_tokens
):
    ids, logprobs = likeliest(logits, num_tokens)
    whole = logits[:, :num_tokens].float().log_softmax(-1).tolist()
    ordered = [sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0])) for row in whole]
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    found = [list(zip(*pair, strict=True)) for pair in pairs]
    assert found == [row[:MOST_LIKELIEST] for row in ordered]


# --- a large vocabulary: the tokens that can win, against whole rows --------------------------


VOCAB, ROWS = 20_000, 6


def wide_rows(kind, seed):
    return logits_of(kind, ROWS, VOCAB + 50, seed)


def both(logits, settings, greedy=None, seed=0):
    """Tokens and log-probabilities by row and of whole rows."""
    keys = stack_keys([lineage_key(seed, (0, row)) for row in range(ROWS)], CPU)
    positions = torch.arange(ROWS) * 7 + seed
    how = RowSampling(ROWS, CPU)
    how.load(settings, greedy or [False] * ROWS)
    samplers = (Sampler(VOCAB, CPU, captured=captured) for captured in (False, True))
    return [each.sample(logits, keys, positions, how) for each in samplers]


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("filters", [{}, *FILTERS], ids=str)
def test_the_token_is_the_one_of_the_whole_row(kind, filters):
    for seed, temperature in enumerate([0.1, 0.8, 1.0, 3.0]):
        settings = [SamplingSettings(temperature=temperature, **filters)] * ROWS
        fast, slow = both(wide_rows(kind, seed), settings, seed=seed)
        assert torch.equal(fast[0], slow[0])
        assert torch.equal(fast[1], slow[1])


@pytest.mark.parametrize("kind", ["of a trained model", "with ties", "forbidden"])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_draw_otherwise_are_drawn_in_any_number_of_threads(kind, threads):
    hows = [{}, {"temperature": 0}, {"min_p": 0.1}, {"top_k": 9}, {}, {"temperature": 2.0}]
    settings = [SamplingSettings(**how) for how in hows]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for logits in (wide_rows(kind, 1), wide_rows(kind, 2).bfloat16()):
            fast, slow = both(logits, settings, [False] * (ROWS - 1) + [True])
            assert torch.equal(fast[0], slow[0])
            assert torch.equal(fast[1], slow[1])
    finally:
        torch.set_num_threads(before)
