from dataclasses import replace

import pytest

from beamwright.plan.costs import Layout, Roofline
from beamwright.plan.scoring import Scorer, ScoringCost, in_verifier_tokens
from beamwright.plan.workload import sampled_searches, tree_steps

GIB = 2**30


@pytest.fixture
def scoring(opt, gpu, paper):
    def make(budget_gib=100, layout=Layout.TREE, **workload):
        work = paper(**workload)
        return ScoringCost(
            Scorer(opt, int(budget_gib * GIB)), work, gpu, layout, sampled_searches(work)
        )

    return make


def test_every_step_has_a_mark_more(paper):
    work = in_verifier_tokens(paper(generate_tokens=70))
    assert [step.num_tokens for step in tree_steps(work)] == [33, 33, 7]


def test_a_step_is_one_prefill_of_all_beams(scoring, opt, gpu):
    """64 rows of 33 tokens are one batch: weights are read once, shared parts once."""
    second = scoring().steps()[1]
    num_tokens, before = 64 * 33, 128 + 33
    union = 128 + 32 * 33
    seen = 64 * 33 * (before + 17)
    expected = Roofline(opt, gpu).decode_step(num_tokens, union + num_tokens, seen)
    assert second.verify_s == pytest.approx(expected)
    assert second.load_bytes == second.store_bytes == second.stall_s == 0


def test_long_steps_go_in_chunks_and_wide_searches_in_batches(scoring, opt, gpu):
    launches_s = 32 * gpu.decode_ops_per_layer * gpu.launch_s
    compute = Roofline(opt, replace(gpu, launch_s=1e-30))

    def num_forwards(**workload):
        found = scoring(**workload)
        free = replace(found, hardware=compute.hardware)
        return (found.steps()[0].verify_s - free.steps()[0].verify_s) / launches_s

    assert num_forwards(step_tokens=32) == pytest.approx(1)
    assert num_forwards(step_tokens=640) == pytest.approx(4 + 4 + 3)  # chunks of 256, 256, 129
    assert num_forwards(num_beams=256, step_tokens=32) == pytest.approx(3)  # 102 rows of 40


def test_what_does_not_fit_is_loaded_every_step(scoring):
    found = scoring(budget_gib=5).steps()
    loaded = [step.load_bytes > 0 for step in found]
    assert loaded[0] is False
    assert loaded[-1] is True
    assert sum(step.stall_s for step in found) > 0
    outgrown = loaded.index(True)
    assert found[outgrown].store_bytes > found[outgrown + 1].store_bytes > 0


def test_a_copy_per_beam_takes_more(scoring):
    shared, copies = scoring(), scoring(layout=Layout.DENSE)
    assert copies.peak.least > shared.peak.worst
    assert copies.longest_path_bytes == shared.longest_path_bytes
    assert copies.steps() == shared.steps(), "a prefill reads shared parts once, and all of it fits"
