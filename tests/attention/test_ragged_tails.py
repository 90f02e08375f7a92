"""A row's bits beside rows whose tails have other lengths, on every torch backend."""

import random

import pytest
import torch

from beamwright.attention import BACKENDS, make_attention


def lengths_up_to(most, num_rows, seed=0):
    """Tokens that each row has decoded before: few, many, and around where tails are cut."""
    rng = random.Random(seed)
    edges = [n for n in (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 127, 128, 254, 255) if n < most]
    lengths = [0, most - 1, *(rng.choice([*edges, rng.randrange(most)]) for _ in range(num_rows))]
    return dict(enumerate(lengths[:num_rows]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_join_and_leave_keep_their_bits(make_forest, make_batch, backend):
    """Between any two tokens some leave and others join, with tokens of their own or without."""
    forest, num_tokens = make_forest(4, dtype=torch.float32, rows=12, seed=6), 5
    held = {row: 7 * row % 58 for row in range(12)}
    alone = forest.decode(backend, range(12), num_tokens, held=held)
    batch = make_batch(forest, backend)
    arrangements = [
        ([], [11, 0, 4, 5, 1, 9, 2, 10]),
        ([4, 2, 0, 1, 3, 5], [3, 8]),
        ([7, 6, 5, 4, 3, 2, 1, 0], []),
        ([0, 1, 2, 3, 4], [6, 7, 9]),
    ]
    for kept, joining in arrangements:
        batch.arrange(kept, joining, held)
        before = list(batch.held)
        for layer, contexts in enumerate(batch.token()):
            for place, row in enumerate(batch.rows):
                expected = alone[before[place] - held[row]][layer][row]
                assert torch.equal(contexts[place], expected)
    batch.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rows_bits_do_not_depend_on_the_tails_beside_it(make_forest, backend):
    """Up to the longest tail that there is: nothing of a row's sums is cut by another's length."""
    forest = make_forest(3, dtype=torch.float32, rows=24, seed=2)
    most = make_attention(backend).tail_tokens
    company = [lengths_up_to(most, 24, seed) for seed in range(3)]
    whole = [forest.decode(backend, range(24), 1, held=held)[0] for held in company]
    for row in range(24):
        for held, found in zip(company, whole, strict=True):
            # Alone, but for the padding that there always is.
            alone = forest.decode(backend, [row] * 8, 1, held={row: held[row]})[0]
            for a, b in zip(found, alone, strict=True):
                assert torch.equal(a[row], b[0])


@pytest.mark.parametrize(("head_dim", "group"), [(8, 1), (8, 2), (20, 1), (64, 4)])
def test_every_length_of_a_tail_has_the_same_bits_in_any_company(
    make_forest, make_batch, head_dim, group
):
    """`tree`, through all of 1..256 tokens: alone, and beside rows that are longer or shorter."""
    shape = {"layers": 1, "head_dim": head_dim, "group": group}
    forest = make_forest(2, dtype=torch.float32, rows=8, **shape)
    alone, mixed = make_batch(forest, "tree"), make_batch(forest, "tree")
    alone.arrange([], [0] * 8)
    mixed.arrange([], range(8), {1: 255, 2: 100, 3: 40, 4: 17})
    for length in range(1, 257):
        assert torch.equal(alone.token()[0][0], mixed.token()[0][0]), length
        # The others: one is full, one is a few tokens behind, the rest begin again and again.
        mixed.held[1:] = [255, max(0, length - 9), *(length * n % 251 for n in range(3, 8))]
    alone.close()
    mixed.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_nans_leaves_the_others_alone(make_forest, backend):
    """One whose logits overflow fails by itself, also where others have fewer parts than it."""
    forest = make_forest(4, dtype=torch.float32, rows=9)
    expected = forest.decode(backend, range(9), 3)
    for token in range(3):
        for layer in range(2):
            forest._token(0, token, layer)[1][0] = torch.nan
    found = forest.decode(backend, range(9), 3)
    for token in range(3):
        for a, b in zip(found[token], expected[token], strict=True):
            assert a[0].isnan().all()
            assert torch.equal(a[1:], b[1:])


def test_a_row_that_joins_reads_nothing_of_a_row_of_nans(make_forest, make_batch):
    """It takes the other's place in the tail, and hides what follows its own tokens."""
    forest = make_forest(3, dtype=torch.float32, rows=9, layers=1)
    expected = forest.decode("tree", [*range(7), 8], 1)[0][0]
    batch = make_batch(forest, "tree")
    batch.arrange([], range(8))
    forest._token(0, 1, 0)[1][7] = torch.nan
    batch.token()
    batch.token()
    batch.arrange([0, 1, 2, 3, 4, 5, 6], [8])
    batch.held = [0] * 8
    assert torch.equal(batch.token()[0], expected)
    batch.close()
