"""Weights below --memory: llama.cpp's rules, the floors, and tables on small inputs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from beamwright.plan.costs import Layout, ModelCosts, Roofline
from beamwright.plan.machines import find_profile
from beamwright_lab.common import Timing
from beamwright_lab.offload import measured, predicted
from beamwright_lab.offload.llama_cpp import OP_OFFLOAD_MIN_BATCH, Host, LlamaModel

CARD = replace(
    find_profile("rtx-4090"),
    device_bandwidth=1e30, flops=1e30, launch_s=1e-30, h2d_bandwidth=1e9, link_share=1.0,
)  # fmt: skip
COSTS = ModelCosts(
    num_layers=10, num_parameters=1000, weight_bytes=12_000, kv_bytes_per_token=20, num_heads=1,
    head_dim=1, element_bytes=2,
)  # fmt: skip
MODEL = LlamaModel(COSTS, layer_bytes=1000, head_bytes=1500, kv_bytes=5000)
FAST = Host(bandwidth=2e9, flops=1e30)


@pytest.mark.parametrize(
    ("left", "layers"), [(1499, None), (1500, 0), (2999, 0), (3000, 1), (16_499, 9), (10**9, 10)]
)
def test_the_output_layer_is_on_the_card_first_and_each_layer_with_its_kv(left, layers):
    assert MODEL.layers_that_fit(left) == layers


@pytest.mark.parametrize(("layers", "host_bytes"), [(4, 6000), (0, 10_000), (None, 12_000)])
def test_few_rows_are_computed_on_the_host_and_many_after_a_copy(layers, host_bytes):
    few, many = OP_OFFLOAD_MIN_BATCH - 1, OP_OFFLOAD_MIN_BATCH
    on_host = MODEL.pass_s(layers, CARD, FAST, few, 0, 0)
    assert on_host == pytest.approx(host_bytes / FAST.bandwidth, rel=1e-3)
    copied = MODEL.pass_s(layers, CARD, FAST, many, 0, 0)
    assert copied == pytest.approx(host_bytes / CARD.h2d_bandwidth, rel=1e-3)


def test_the_host_also_needs_its_flops_and_reads_its_part_of_the_kv():
    slow = replace(FAST, flops=1e6)
    found = MODEL.pass_s(4, CARD, slow, 16, 0, 0)
    assert found == pytest.approx(2 * 500 * 16 / slow.flops, rel=1e-3)
    for tokens in (16, 64):
        more = MODEL.pass_s(4, CARD, FAST, tokens, 1e6, 0) - MODEL.pass_s(
            4, CARD, FAST, tokens, 0, 0
        )
        assert more == pytest.approx(1e6 * 12 / FAST.bandwidth, rel=1e-3)


def test_copy_and_compute_take_turns():
    card = replace(CARD, device_bandwidth=1e9, bandwidth_share=1.0)
    found = MODEL.pass_s(4, card, FAST, 64, 0, 0)
    assert found == pytest.approx((6000 + 12_000) / 1e9, rel=1e-3)


def test_only_used_experts_are_read_or_copied():
    sparse = replace(MODEL, costs=replace(COSTS, active_parameters=10))
    for tokens, rate in ((1, FAST.bandwidth), (64, CARD.h2d_bandwidth)):
        share = sparse.costs.share_of_weights_read(tokens)
        found = sparse.pass_s(4, CARD, FAST, tokens, 0, 0)
        assert found == pytest.approx(share * 6000 / rate, rel=2e-2)


def test_with_all_layers_on_the_card_the_pass_is_that_of_the_roofline():
    costs, card = replace(COSTS, weight_bytes=10_000), find_profile("rtx-4060")
    model = replace(MODEL, costs=costs)
    whole = Roofline(costs, card).decode_step_s(16, 3e6, 3e6, Layout.TREE)
    assert model.pass_s(10, card, FAST, 16, 3e6, 3e6) == pytest.approx(whole)


# --- predictions ------------------------------------------------------------------------------

SMALL = [
    case
    for case in predicted.cases([1, 16])
    if case.generator == "qwen2.5-14b" and case.card == "rtx-4060"
]


@pytest.fixture(scope="module")
def rows():
    return [predicted.row_of(case, Host()) for case in SMALL]


def test_cases_have_no_limit_above_the_cards_memory():
    for case in predicted.cases([1]):
        assert case.limit_bytes < find_profile(case.card).device_memory_bytes
    assert {case.verifier for case in SMALL} == set(predicted.VERIFIERS)


def test_everything_of_a_row_is_within_the_limit(rows):
    for row in rows:
        parts = dict(row["offloaded"]["bytes"])
        limit = parts.pop("limit")
        assert limit == row["limit_gib"] * 2**30
        assert 0.98 * limit < sum(parts.values()) <= limit
        assert (parts["verifier_kv"] > 0) == (row["verifier"] is not None)


def test_weights_are_off_the_card_and_the_floor_is_a_floor(rows):
    for row in rows:
        ours = row["offloaded"]
        assert ours["layers"][0][0] > 0
        assert 0 < ours["floor_share"] <= 1 + 1e-9
        assert ours["search_s"] > predicted.GENERATE_TOKENS * row["n"] / ours["tokens_s"]


def test_a_verifier_takes_layers_from_both_sides(rows):
    by_case = {(row["n"], row["verifier"]): row for row in rows}
    for n in (1, 16):
        alone, scored = by_case[n, None], by_case[n, predicted.VERIFIERS[-1]]
        assert scored["offloaded"]["layers"][0][0] > alone["offloaded"]["layers"][0][0]
        assert scored["llama_cpp"]["card_layers"][0] < alone["llama_cpp"]["card_layers"][0]
        assert alone["smaller"] is not None
        assert scored["smaller"] is None, "two models of 7b do not fit in 7 GiB"


def test_the_floor_takes_the_longer_of_copy_and_pass():
    held = Roofline(COSTS, find_profile("rtx-4060"))
    passes = [(3, (1, 0.0, 0.0)), (2, (4096, 1e9, 1e9))]
    short, long = (held.decode_step_s(*each) for _, each in passes)
    copy_s = (short + long) / 2
    assert predicted.floor_s(passes, held, copy_s) == pytest.approx(3 * copy_s + 2 * long)


def test_passes_hold_all_rows_and_all_tokens():
    work = SMALL[1].workload
    passes = list(predicted.decode_passes(work))
    assert sum(count for count, _ in passes) == work.generate_tokens
    assert {rows for _, (rows, *_) in passes} == {work.num_beams}
    scored = sum(count * rows for count, (rows, *_) in predicted.verify_passes(work))
    assert scored == work.prompt_tokens + work.num_beams * work.generate_tokens


def test_tables_show_every_row_and_what_does_not_fit(rows):
    search = {"prompt": 128, "generate": 1024, "step": 32}
    host = {"bandwidth": 60e9, "flops": 1e12}
    shown = predicted.speed_table({"rows": rows, "host": host, "search": search})
    assert shown.startswith("Predicted by the cost model, not measured")
    assert shown.count("\n| qwen2.5-14b int4 ") == len(rows)
    assert "no fit" in shown
    assert predicted.bytes_table({"rows": rows}).count("\n") == len(rows) + 1


# --- measurements -----------------------------------------------------------------------------


def test_the_floor_of_a_run_is_the_link_or_the_resident_run():
    assert measured.floor_s(1000, 100.0, 3.0) == (10.0, "link")
    assert measured.floor_s(1000, 1000.0, 3.0) == (3.0, "compute")


def test_half_of_the_weights_or_all_layers_go_home():
    sizes = measured.sizes_of("tiny")
    limit = measured.Limit.of(sizes)
    layer = sizes.with_offloaded(1).offloaded.home_bytes
    assert abs(limit.num_layers * layer - sizes.all_weights / 2) <= layer / 2
    assert measured.Limit.of(sizes, 1.0).num_layers == sizes.shape.layers


def test_sides_decode_equal_trees_and_move_their_layers_once_per_pass():
    given = measured.parse(
        [
            "--models",
            "tiny",
            "--rounds",
            "1",
            "--tokens",
            "4",
            "--prompt-tokens",
            "8",
            "--links",
            "1GB/s",
        ]
    )
    rows = measured.measure("tiny", 2, given, has_llama=False)
    assert [row["side"] for row in rows] == ["resident", "host, 1GB/s", "disk"]
    for row in rows[1:]:
        passes, rest = divmod(row["moved_bytes"], row["home_bytes"])
        assert (passes, rest) == (4, 0), "the prompt, and a pass for each token but the first"
        assert row["moved_per_token"] == row["moved_bytes"] / 8
        assert row["floor_share"] > 0
    found = {"rows": rows, "peaks": []}
    assert measured.speed_table(found).count("\n| tiny ") == 3


def test_trees_that_differ_end_the_run():
    def solution(tree_hash, layers):
        weights = {"generator": SimpleNamespace(layers=layers)} if layers else {}
        return SimpleNamespace(tree_hash=tree_hash, weights=weights)

    limit = measured.Limit(5, 0)
    measured.check_equal({"resident": solution("a", 0), "disk": solution("a", 5)}, limit)
    with pytest.raises(RuntimeError, match="trees differ"):
        measured.check_equal({"resident": solution("a", 0), "disk": solution("b", 5)}, limit)
    with pytest.raises(RuntimeError, match="layers off the device"):
        measured.check_equal({"resident": solution("a", 0), "disk": solution("a", 4)}, limit)


def test_a_side_without_copies_has_no_floor():
    timings = {
        "resident": Timing((2.0, 1.0)),
        "disk": Timing((4.0,)),
        measured.LLAMA: Timing((3.0,)),
    }
    stats = SimpleNamespace(layers=5, home_bytes=100, device_bytes=50, moved_bytes=400)
    solutions = {"disk": SimpleNamespace(weights={"generator": stats})}
    rows = measured.rows_of("tiny", 2, 4, timings, solutions, {"disk": 200.0})
    assert [row.get("floor_share") for row in rows] == [None, 0.5, None]
    assert rows[1]["bound"] == "link"
    peaks = [{"model": "tiny", "side": "disk", "peak_bytes": 2**30, "running_bytes": 2**29}]
    assert "| tiny | disk | 1.00 | 0.50 |" in measured.peak_table({"peaks": peaks})
