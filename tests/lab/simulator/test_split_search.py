"""FlashTTS section 4.3: T_tot by hand, the search against brute force, both strategies."""

import random

import pytest

from beamwright.errors import InputError
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.machines import find_profile
from beamwright_lab.simulator import split

GIB = 2**30
BILLION = 1_000_000_000


def total_time(case, prefill_batch, decode_batch):
    """T_tot as the paper prints it: every batch takes the time of a full one."""
    count, decode = case.num_requests, case.generator
    prefill_s = -(-count // prefill_batch) * case.verifier.prefill_s(prefill_batch)
    token_s = -(-count // decode_batch) * decode.decode_token_s(decode_batch)
    return prefill_s + decode.new_tokens * token_s


def model(parameters=1.5 * BILLION, kv=28 * 1024, layers=28):
    return ModelCosts(layers, int(parameters), int(2 * parameters), kv, 12, 128, 2)


@pytest.fixture
def gpu():
    return find_profile("rtx-4090")


def alone(roofline, new_tokens):
    """Of a request that shares nothing with others: the paper's."""
    return split.Stage(roofline, new_tokens, 0, new_tokens)


def make_case(gpu, num_requests=64, verifier=None, generator=None, verifier_tokens=1024):
    return split.SplitCase(
        num_requests,
        alone(Roofline(verifier or model(), gpu), verifier_tokens),
        alone(Roofline(generator or model(), gpu), 512),
    )


def random_case(rng, gpu, most=64):
    def stage():
        costs = model(rng.choice((0.5, 1.5, 7)) * BILLION, rng.choice((28, 56, 128)) * 1024)
        context = rng.choice((0, rng.randrange(2048)))
        new = rng.randrange(1, 1024)
        held = new + context * rng.choice((1.0, rng.uniform(0.05, 1)))
        return split.Stage(Roofline(costs, gpu), new, context, held)

    case = split.SplitCase(rng.randrange(1, most), stage(), stage(), rng.random() < 0.5)
    whole = case.num_requests * (case.verifier.kv_bytes + case.generator.kv_bytes)
    return case, int(whole * rng.uniform(0.01, 1.3))


def boundary(case, memory_bytes):
    """Every size of the verifier's batch, with what Eq. 1 leaves beside it."""
    for prefill in range(1, case.num_requests + 1):
        decode = split.decode_capacity(case, memory_bytes, prefill)
        if prefill * case.verifier.kv_bytes <= memory_bytes and decode >= 1:
            yield prefill, decode


def test_total_time_is_batches_of_what_the_roofline_says(gpu):
    """10 requests: the verifier's in batches of 3, and in batches of 4, half of 512 cached."""
    roof = Roofline(model(), gpu)
    prefill = 4 * roof.decode_step_s(3 * 1024, 3 * 1024, 3 * 1024 * 1025 / 2)
    decode = 3 * 512 * roof.decode_step_s(4, 4 * 256, 4 * 256)
    case = make_case(gpu, num_requests=10)
    assert total_time(case, 3, 4) == pytest.approx(prefill + decode)


def test_equation_one_by_hand(gpu):
    case = make_case(gpu)  # 28 MiB a request of the verifier, 14 MiB of the generator
    assert split.decode_capacity(case, 100 * 2**20, 2) == 3
    assert split.decode_capacity(case, 28 * 2**20, 1) == 0
    assert split.decode_capacity(case, 100 * GIB, 1) == 64


def brute_force(case, memory_bytes):
    """(T_tot, -B_dec by Eq. 1) of the best of all pairs of batch sizes that fit; None if none does.

    T_tot is a sum: what each model takes is looked up.
    """
    count = range(1, case.num_requests + 1)
    verifier = [-(-count[-1] // b) * case.verifier.prefill_s(b) for b in count]
    generator = [total_time(case, 1, b) - verifier[0] for b in count]
    pairs = [
        (verifier[prefill - 1] + min(generator[:decode]), -decode)
        for prefill, decode in boundary(case, memory_bytes)
    ]
    return min(pairs, default=None)


def test_the_search_finds_what_brute_force_finds(gpu):
    rng, infeasible, uneven = random.Random(1), 0, 0
    for _ in range(1000):
        case, memory_bytes = random_case(rng, gpu)
        found, best = split.best_split(case, memory_bytes), brute_force(case, memory_bytes)
        if best is None:
            infeasible += 1
            assert found is None
            continue
        computing_s = found.total_s - found.overhead_s
        assert computing_s == pytest.approx(best[0], rel=1e-12)
        pair = found.prefill_batch, found.decode_batch
        assert computing_s == pytest.approx(total_time(case, *pair), rel=1e-12)
        assert split.decode_capacity(case, memory_bytes, found.prefill_batch) >= found.decode_batch
        assert found.verifier_bytes + found.generator_bytes == memory_bytes
        assert found.prefill_batch * case.verifier.kv_bytes <= found.verifier_bytes + 1
        assert found.decode_batch * case.generator.kv_bytes <= found.generator_bytes + 1
        # The boundary as printed takes batches as large as fit, however uneven.
        printed = min(total_time(case, *pair) for pair in boundary(case, memory_bytes))
        assert printed >= computing_s * (1 - 1e-12)
        uneven += printed > computing_s * (1 + 1e-9)
    assert 0 < infeasible < 300
    assert uneven > 100  # latency does not fall with every byte, whatever the paper says


def test_the_idle_models_kv_moves_as_far_as_it_is_in_the_way(gpu):
    case, roofline = make_case(gpu, num_requests=4), Roofline(model(), gpu)
    assert split.alternating_split(case, GIB).overhead_s == 0
    tokens = 4 * 1024  # of the verifier; 4 * 512 of the generator, all of them new
    both = 2 * sum(
        roofline.transfer_s(4 * 512 * 28 * 1024, 4 * 512 / 8, direction)
        for direction in ("h2d", "d2h")
    )
    assert split.alternating_split(case, tokens * 28 * 1024).overhead_s == pytest.approx(both)


def test_kv_that_is_kept_comes_back_where_there_is_no_room_for_it(gpu):
    case = split.tree_case(64, 1000, 32, (model(), 8000), (model(), 9000), gpu)
    needed = (8000 + 9000 + 2 * 64 * 32) * 28 * 1024
    ample, short = split.best_split(case, needed), split.best_split(case, needed - 800 * 28 * 1024)
    assert ample.overhead_s == 0
    expected = Roofline(model(), gpu).transfer_s(800 * 28 * 1024, 100, "h2d")
    assert short.overhead_s == pytest.approx(expected, rel=1e-3)


def test_where_one_model_at_a_time_fits_it_is_in_turn_and_where_no_path_does_that_is_said(gpu):
    assert split.best_split(make_case(gpu), 30 * 2**20) is None
    assert split.alternating_split(make_case(gpu), 30 * 2**20).prefill_batch == 1
    with pytest.raises(InputError, match=r"one path of the verifier needs 28\.0 MiB"):
        split.alternating_split(make_case(gpu), 20 * 2**20)
