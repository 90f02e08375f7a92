"""What `--sparse auto` stands for, and what crosses the link for selected tokens."""

from dataclasses import replace

import pytest

from beamwright.models.named import NAMED_SHAPES, shape_from_text
from beamwright.plan.costs import ModelCosts, Roofline
from beamwright.plan.fits import VerifierCosts
from beamwright.plan.machines import find_profile, with_cuda_graphs
from beamwright.plan.sparse import choose_sparse, loaded_tokens, selected_share
from beamwright.plan.workload import Workload

CPU = find_profile("epyc-2core")
SLOW = replace(CPU, h2d_bandwidth=512 * 2**20, d2h_bandwidth=512 * 2**20)
SMALL = ModelCosts.of(
    shape_from_text(
        "llama,layers=24,hidden=256,heads=4,kv_heads=2,intermediate=512,vocab=512,context=9000"
    ),
    4,
)
LONG = Workload(1, 1, 128, 8000, 32)
PATH = LONG.longest * SMALL.kv_bytes_per_token


def chosen(work=LONG, machine=SLOW, budget=PATH // 4, select=256, scorer=None):
    here = Roofline(SMALL, machine)
    return choose_sparse(work, here, here, CPU, budget, select, scorer)


def test_what_all_rows_select_is_brought_once_and_what_was_there_is_not():
    share = selected_share(116, 1016)
    assert share == 0.1
    assert loaded_tokens([(1000, 1)], share, reload_factor=1) == pytest.approx(90)
    alone, together = loaded_tokens([(8000, 1)], share), loaded_tokens([(1000, 8)], share)
    assert together < alone / 2
    assert loaded_tokens([(1000, 200)], share) < 1, "all of it is there"
    assert selected_share(2048, 1000) == 1.0
    assert selected_share(10, 1000) == 0.0


def test_a_long_path_that_outgrows_the_device_is_selected_from():
    found = chosen()
    assert found.method == "exact"
    assert "a path does not fit the device" in found.why
    assert chosen(budget=SMALL.kv_bytes_per_token * 400).method == "exact"
    assert "cannot hold" in chosen(budget=SMALL.kv_bytes_per_token * 200).why


def test_a_verifier_has_to_hold_a_path_in_its_part():
    assert chosen(scorer=VerifierCosts(SMALL, 2 * PATH)).method == "exact"
    found = chosen(scorer=VerifierCosts(SMALL, PATH))
    assert (found.method, "verifier" in found.why) == ("off", True)


def test_what_fits_and_what_is_swapped_seldom_is_read_whole():
    assert chosen(budget=2 * PATH).method == "off"
    tree = Workload(64, 4, 128, 1920, 32)
    assert chosen(tree, budget=PATH).method == "off"
    assert "--select" in chosen(replace(LONG, generate_tokens=100)).why
    far = "where the device is the host, nothing is far"
    assert chosen(machine=CPU, budget=2 * PATH).method == "off", far


def test_a_card_s_selection_pays_for_every_operator_and_for_a_host_that_scores():
    model = ModelCosts.of(NAMED_SHAPES["llama-3.1-8b"], 2)
    plain, work = find_profile("rtx-4090"), Workload(4, 1, 128, 16000, 32)
    budget = 2 * work.longest * model.kv_bytes_per_token
    full, plain = Roofline(model, with_cuda_graphs(plain)), Roofline(model, plain)
    found = choose_sparse(work, full, plain, CPU, budget, 2048)
    assert (found.method, "locality" in found.why) == ("off", True)
