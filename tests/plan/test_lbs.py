import pytest

from beamwright_lab.studies.lbs import (
    layerwise_bytes,
    locality_bytes,
    locality_printed_bytes,
    locality_start_bytes,
)

GIB = 2**30
EVERY = (layerwise_bytes, locality_bytes, locality_start_bytes)


@pytest.mark.parametrize("step_tokens", [32, 64, 128])
def test_layerwise_is_the_papers_figure_whatever_the_step(case, step_tokens):
    assert round(layerwise_bytes(case(step_tokens=step_tokens)) / GIB) == 53_012


@pytest.mark.parametrize(
    ("step_tokens", "figure_7", "printed", "start"),
    [(32, 2052, 2010, 1995), (64, 1044, 990, 986), (128, 540, 480, 480)],
)
def test_locality_in_each_convention(case, step_tokens, figure_7, printed, start):
    steps = case(step_tokens=step_tokens)
    assert round(locality_bytes(steps) / GIB) == figure_7
    assert round(locality_printed_bytes(steps) / GIB) == printed
    assert round(locality_start_bytes(steps) / GIB) == start


def test_a_search_that_fits_moves_nothing_but_in_the_printed_form(case):
    # 64 beams of 2048 tokens are 64 GiB.
    assert [bytes_of(case(kv_budget_bytes=64 * GIB)) for bytes_of in EVERY] == [0, 0, 0]
    assert locality_bytes(case(kv_budget_bytes=64 * GIB - 1)) == 64 * GIB
    assert locality_printed_bytes(case(kv_budget_bytes=64 * GIB)) == 2010 * GIB


@pytest.mark.parametrize("bytes_of", EVERY)
def test_a_larger_budget_never_moves_more(case, bytes_of):
    moved = [bytes_of(case(kv_budget_bytes=gib * GIB)) for gib in range(1, 66)]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1] == 0


def test_by_hand(case):
    """2 layers, 2 beams, 1 byte per token and layer; paths of 1, 2, 3; 5 bytes of device."""
    tiny = case(
        num_layers=2,
        kv_bytes_per_token=2,
        num_beams=2,
        prompt_tokens=1,
        generate_tokens=3,
        step_tokens=1,
        kv_budget_bytes=5,
    )
    # Layers of 2, 4 and 6 bytes: two fit, then one, then none.
    assert layerwise_bytes(tiny) == 0 + 4 + 12
    assert locality_printed_bytes(tiny) == 4 + 8 + 12
    assert locality_bytes(tiny) == 8 + 12 + 16
    assert locality_start_bytes(tiny) == 4 + 8 + 12
