"""LBS: locality-aware beam scheduling (Wang, Shiao, Yang)."""

from __future__ import annotations

from beamwright_lab.claims import (
    NEAR,
    Claim,
    Found,
    Judge,
    Judged,
    near,
    of,
    same_trees,
    span,
)


def _lbs(found: Found, figure: str, start: str) -> str:
    """Ours, of the row of a figure whose words begin so."""
    return next(
        str(row["ours"])
        for row in found["table"]
        if row["figure"] == figure and row["what"].startswith(start)
    )


def _lbs_steps(found: Found, figure: str, start: str) -> list[str]:
    """The same for steps of 32, 64 and 128."""
    return [
        str(row["ours"])
        for step in (32, 64, 128)
        for row in found["table"]
        if row["figure"] == figure
        and row["what"].startswith(start)
        and f"steps of {step}" in row["what"]
    ]


def _layerwise_bytes(found: Found) -> Judged:
    exact, streamed = (_lbs(found, "7", start) for start in ("layer-wise", "the same"))
    said = f"{exact} GiB; {streamed} with two stream buffers, which Eq. 1 leaves out"
    return said, of(exact == "53,012")


def _grouped_bytes(found: Found) -> Judged:
    values = _lbs_steps(found, "7", "group by group")
    said = " / ".join(values)
    return f"{said} GiB, lengths taken at a step's end", of(values == ["2,052", "1,044", "540"])


def _inter_token(found: Found) -> Judged:
    values = [float(each) for each in _lbs_steps(found, "10a", "inter-token")]
    holds = all(near(*each) for each in zip(values, (3.7, 1.8, 0.9), strict=True))
    return " / ".join(f"{each:.2f} %" for each in values), of(holds)


def _prefix_reuse(found: Found) -> Judged:
    values = [each.partition(" ")[0] for each in _lbs_steps(found, "10b", "LBS without")]
    return " / ".join(f"{each}x" for each in values), of(min(map(float, values)) > 2)


def _io_share(found: Found) -> Judged:
    before, after = (_lbs(found, "11", f"I/O share, {each}") for each in ("layer-wise", "LBS"))
    low, high = span(before)
    holds = low >= 0.7 and high <= 0.9 and span(after)[1] < 0.15
    said = f"{before} before (one constant fitted to 64 beams), {after} after, 16 to 64 beams"
    return said, of(holds)


def _lbs_speedup(model: str, paper: float) -> Judge:
    def judge(found: Found) -> Judged:
        said = _lbs(found, "9", f"LBS as published over layer-wise, {model}")
        return f"{said}x, 16 to 64 beams", of(near(span(said)[1], paper))

    return judge


def _longer_steps(found: Found) -> Judged:
    said = _lbs(found, "9", "longer steps win")
    first, *_, last = (float(each) for each in said.split(" / "))
    return f"{first}x at 32, {last}x at 128", of(last / first > 1 + NEAR)


def _other_card(found: Found) -> Judged:
    values = [
        float(_lbs(found, "13", f"LBS as published, {model}, RTX 3080 Ti, PCIe 4.0 x8")[6:])
        for model in ("opt-2.7b", "qwen1.5-4b")
    ]
    holds = all(near(*each) for each in zip(values, (6.85, 3.52), strict=True))
    return " / ".join(f"{each}x" for each in values) + ", on PCIe 4.0 x8", of(holds)


def _shared_speedup(found: Found) -> Judged:
    said = _lbs(found, "9", "Beamwright, shared KV, opt-6.7b")
    (row,) = (each for each in found["sensitivity"] if each["passes"] == 6)
    rest = row["shared over layer-wise, shared"]
    return (
        f"{said}x over layer-wise with a copy per beam; at 64 beams {rest}x over layer-wise "
        f"with shared KV: the factor is the sharing",
        "beyond the paper",
    )


def _fair(found: Found) -> Judged:
    quarter, tenth = (found["shares"][each]["once"] for each in ("25 %", "10 %"))
    said = (
        f"they need {quarter['least']:.2f} to {quarter['most']:.2f} of our time with a quarter of "
        f"the KV, {tenth['least']:.2f} to {tenth['most']:.2f} with a tenth (below 1 they are "
        "faster)"
    )
    return said, "beyond the paper"


CLAIMS = (
    Claim(
        "Streaming layers for every token moves",
        "3, Eq. 1",
        "lab/beamwright_lab/baselines/layerwise/streams.py",
        "lbs.yaml: layerwise",
        "lab/test_lbs_figures.py::test_layerwise_is_the_papers_figure_whatever_the_step",
        "53,012 GB (Fig. 7)",
        "lbs_figures",
        _layerwise_bytes,
        "computed",
    ),
    Claim(
        "Inter-token locality: a group decodes a whole step",
        "4.1",
        "schedule/locality.py",
        "lbs.yaml: inter-token",
        "lab/test_lbs_figures.py::test_locality_in_each_convention",
        "2,052 / 1,044 / 540 GB for steps of 32 / 64 / 128 (Fig. 7)",
        "lbs_figures",
        _grouped_bytes,
        "computed",
    ),
    Claim(
        "The same, as a share of layer-wise",
        "5.3",
        "schedule/locality.py",
        "lbs.yaml: inter-token",
        "lab/test_lbs_figures.py::test_prefix_reuse_and_then_reuse_between_steps_load_less",
        "3.7 / 1.8 / 0.9 % (Fig. 10a)",
        "lbs_figures",
        _inter_token,
        "simulated",
    ),
    Claim(
        "Inter-beam locality: Algorithm 1",
        "4.1",
        "schedule/algorithm_one.py",
        "lbs.yaml: lbs",
        "schedule/test_algorithm_one.py::test_every_choice_has_the_largest_overlap",
        "over 2x fewer bytes (Fig. 10b)",
        "lbs_figures",
        _prefix_reuse,
        "simulated",
    ),
    Claim(
        "Our groups: ranges of the depth-first order",
        "4.1",
        "schedule/ranges.py",
        "lbs.yaml: ranges",
        "schedule/test_ranges.py::test_never_more_groups_than_any_contiguous_cut",
        "has none",
        how="by a test",
        ours="never more groups than any cut of that order",
        verdict="another way",
        note="exact, not greedy",
    ),
    Claim(
        "Balanced groups, so that the next one's KV has room",
        "4.2",
        "schedule/algorithm_one.py",
        "lbs.yaml: lbs",
        "schedule/test_algorithm_one.py::test_group_sizes_of_the_paper_and_the_slides",
        "group sizes of its example",
        ours="the same sizes",
    ),
    Claim(
        "Prefetching, and waiting for the link",
        "4.2, 5.4",
        "kv/cache.py",
        "lbs.yaml: inter-token-prefetch",
        "kv/test_residency.py::test_prefetch_takes_no_room_that_a_later_group_needs",
        "0.70-0.90 of the time before, below 0.15 after (Fig. 11)",
        "lbs_figures",
        _io_share,
        "simulated",
    ),
    Claim(
        "#Beam, the size of a group, from free memory at run time",
        "4.1",
        "engine/capacity.py",
        "--kv-memory",
        "engine/test_budgets.py::test_the_least_budget_is_one_path_and_its_step",
        "asks the card at every step",
        ours="from the budget that is named, and what the step will write",
        verdict="another way",
        note="a budget replaces it; a step that outgrows it parks",
    ),
    Claim(
        "Speed over layer-wise, OPT-6.7B",
        "5.2",
        "schedule/locality.py",
        "lbs.yaml: lbs",
        "cli/test_recipes.py::test_lbs_runs_each_part_of_the_paper",
        "3.39-9.72x (Fig. 9)",
        "lbs_figures",
        _lbs_speedup("opt-6.7b", 9.72),
        "simulated",
        note="given its waiting, no schedule that only removes waiting gets further",
    ),
    Claim(
        "LLaMA-2-7B",
        "5.2",
        "schedule/locality.py",
        "lbs.yaml: lbs",
        "lab/test_lbs_figures.py::test_lbs_is_faster_than_layerwise_on_every_model_and_card",
        "3.60-8.74x (Fig. 9)",
        "lbs_figures",
        _lbs_speedup("llama-2-7b", 8.74),
        "simulated",
    ),
    Claim(
        "Qwen-7B",
        "5.2",
        "schedule/locality.py",
        "lbs.yaml: lbs",
        "lab/test_lbs_figures.py::test_lbs_is_faster_than_layerwise_on_every_model_and_card",
        "4.17-7.99x (Fig. 9)",
        "lbs_figures",
        _lbs_speedup("qwen1.5-7b", 7.99),
        "simulated",
    ),
    Claim(
        "Longer steps win",
        "5.2",
        "schedule/locality.py",
        "lbs.yaml: lbs",
        "lab/test_lbs_figures.py::test_longer_steps_win",
        "consistently",
        "lbs_figures",
        _longer_steps,
        "simulated",
    ),
    Claim(
        "On an RTX 3080 Ti, OPT-2.7B / Qwen-4B",
        "5.5",
        "plan/machines.py",
        "lbs.yaml: lbs",
        "lab/test_lbs_figures.py::test_lbs_is_faster_than_layerwise_on_every_model_and_card",
        "up to 6.85x / 3.52x (Fig. 13)",
        "lbs_figures",
        _other_card,
        "simulated",
    ),
    Claim(
        "The order of beams changes no answer",
        "4.1",
        "engine/noise.py",
        "lbs.yaml: lbs",
        "engine/test_same_tree.py::test_the_tree_is_the_same",
        "said",
        "schedules",
        same_trees,
        "measured",
    ),
    Claim(
        "Shared KV stored once, OPT-6.7B",
        "4.1",
        "attention/tree.py",
        "lbs.yaml: ranges",
        "attention/test_backends.py::test_shared_segments_are_counted_once",
        "keeps a copy per beam",
        "lbs_figures",
        _shared_speedup,
        "simulated",
    ),
    Claim(
        "Beside engines by vLLM's and SGLang's rules",
        "6",
        "lab/beamwright_lab/tiers/frontier.py",
        "lbs.yaml: parked",
        "lab/test_frontier.py::test_a_line_has_the_fastest_engine_in_both_readings",
        "not compared",
        "frontier",
        _fair,
        "simulated",
    ),
    Claim(
        "Seconds on a card",
        "5.1",
        "lab/beamwright_lab/gpu/search.py",
        "lbs.yaml: lbs",
        "lab/test_gpu_stages.py::test_every_point_of_the_figures_is_measured_and_grows_one_tree",
        "RTX 4090, RTX 3080 Ti",
        ours="neither card at hand; an H100: benchmarks, On a card",
        how="measured on another card",
        verdict="not tried",
        note="on those cards",
    ),
)
