"""FlashTTS: speculation, order and memory for verifier-guided search (Chen and others)."""

from __future__ import annotations

from typing import Any

from beamwright_lab.claims import Claim, Found, Judge, Judged, near, of, same_trees


def _summary(found: Found, ratio: str) -> dict[str, Any]:
    return next(row for row in found["summary"] if row["ratio"] == ratio)


def _numbers(found: Found) -> str:
    beams = sorted({row["n"] for row in found["13: latency"]})
    return "n = " + " and ".join(map(str, beams))


def _goodput(found: Found) -> Judged:
    row, other = (
        _summary(found, f"goodput, full / {each}") for each in ("baseline", "baseline, uncached")
    )
    mean = float(row["mean"])
    said = (
        f"mean {row['mean']}x, {row['least']} to {row['most']}x ({_numbers(found)}); over a "
        f"verifier without prefix cache {other['mean']}x"
    )
    return said, of(near(mean, 2.2), "partly" if mean > 1 else "not reproduced")


def _methods(found: Found) -> Judged:
    rows = [row for row in found["3 left and 11: methods"] if row["search"] != "best-of-n"]
    values = sorted(float(row["P+M+S / baseline"]) for row in rows)
    said = f"{values[0]} to {values[-1]}x at n = {rows[0]['n']}"
    return said, of(near(values[-1], 3.9), "partly" if values[0] > 1 else "not reproduced")


def _change(ratio: object) -> int:
    """A ratio of 0.7 is -30 %."""
    return round(100 * (float(str(ratio)) - 1))


def _falls(ratio: str, low: int, high: int) -> Judge:
    """Seconds fall by so many percent; low, high: the paper's."""

    def judge(found: Found) -> Judged:
        start = f"{ratio}, full / baseline"
        row, other = _summary(found, start), _summary(found, f"{start}, uncached")
        mean, uncached = _change(row["mean"]), _change(other["mean"])
        least, most = _change(row["least"]), _change(row["most"])
        said = f"{mean:+d} % ({least:+d} to {most:+d}); over a verifier without prefix cache "
        said += f"{uncached:+d} %"
        inside = [low <= -each <= high for each in (mean, uncached)]
        return said, of(all(inside), "partly" if min(mean, uncached) < 0 else "not reproduced")

    return judge


def _speculation(found: Found) -> Judged:
    exact, auto = found["gains"]["P+M+S"], found["gains"]["auto"]
    least, most = found["n"]
    said = (
        f"{exact[0]:.2f} to {exact[1]:.2f}x at n = {least} to {most}; as the default decides "
        f"{auto[0]:.2f} to {auto[1]:.2f}x"
    )
    return said, of(exact[0] > 1.1, "partly")


def _look_ahead(found: Found) -> Judged:
    ahead, plain = found["gains"]["P+M+S+L"], found["gains"]["P+M+S"]
    said = (
        f"speculation gains {ahead[0]:.2f} to {ahead[1]:.2f}x with it, {plain[0]:.2f} to "
        f"{plain[1]:.2f}x without"
    )
    return said, of(ahead[0] > plain[0], "not reproduced")


def _sensitivity(found: Found) -> Judged:
    rows = found["sensitivity"]
    least, most = (end(rows, key=lambda row: row["P+M+S"]) for end in (min, max))
    worst = min(row["P+M+S+L"] / row["P+M+S"] for row in rows)
    ends = (
        f"{row['P+M+S']:.2f}x (spread {row['spread']}, inherited {row['inherited']})"
        for row in (least, most)
    )
    said = f"{' to '.join(ends)}; with LookAhead at worst {worst:.2f} of that"
    return said, of(least["P+M+S"] > 1, "partly")


def _utilisation(found: Found) -> Judged:
    without, with_it = found["4 and 16 left: utilisation"]
    last = "rows, fifth 5"
    said = (
        f"rows at the end of a round {without[last]} without, {with_it[last]} with; decoding "
        f"uses {without['FLOP/s, decoding']} and {with_it['FLOP/s, decoding']} of the FLOP/s"
    )
    return said, of(float(with_it[last]) > float(without[last]), "not reproduced")


def _memory_of_stages(found: Found) -> Judged:
    row = next(row for row in found["6: throughput and KV"] if row["model"] == "1.5B")
    prefill, decode = float(row["prefill, GiB at 80 %"]), float(row["decode, GiB at 80 %"])
    said = f"{prefill:g} GiB and {decode:g} GiB, {decode / prefill:.0f} times"
    return said, of(prefill < 1 and decode / prefill >= 5)


def _split(found: Found) -> Judged:
    rows = [row for row in found["10: split"] if "throughput over half and half" in row]
    values = [(float(row["throughput over half and half"]), row["KV, GiB"]) for row in rows]
    (most, least_kv), (least, most_kv) = max(values), min(values)
    said = f"{least:g}x with {most_kv} GiB to {most:g}x with {least_kv} GiB over half and half"
    return said, of(least > 1, "partly")


def _short_memory(found: Found) -> Judged:
    row = next(row for row in found["17 right: memory"] if row["KV, GiB"] == 1.5)
    order, both = (100 * (float(row[f"{name} / baseline"]) - 1) for name in ("P", "P+M"))
    strong = 100 * (float(row["strong / baseline"]) - 1)
    said = f"+{order:.0f} % and +{both:.0f} %, of which +{strong:.0f} % is the engine without them"
    return said, of(near(order, 58) and near(both, 145))


CLAIMS = (
    Claim(
        "Speculative Beam Extension, the paper's copies (Alg. 1)",
        "4.1",
        "engine/speculation.py",
        "flashtts_fig16.yaml: truncate-0.85",
        "engine/test_speculation.py::test_truncated_duplicates_are_written_as_any_step_is",
        "often the largest part of its gain (6.4.1)",
        ours="other trees, less accurate on the bundled pair",
        how="measured",
        verdict="as printed",
        note="not the default; the tree follows the clock",
    ),
    Claim(
        "The same, exactly",
        "4.1",
        "engine/speculation.py",
        "flashtts_fig16.yaml: exact",
        "engine/test_speculation.py::test_the_tree_is_the_same_with_every_strategy",
        "often the largest part (6.4.1)",
        "flashtts_speculation",
        _speculation,
        "simulated",
        note="the tree is the same; no gain on two CPU cores",
    ),
    Claim(
        "SelectSPEC: bins of the last score, M = B - j + 1",
        "4.1.1",
        "lab/beamwright_lab/baselines/bins.py",
        "flashtts_fig16.yaml: bins",
        "lab/test_bins.py::test_bins_are_quantiles_of_the_scores_before",
        "has none",
        how="by a test",
        ours="the default guesses by a step's own score",
        note="bins are quantiles, the paper does not say which",
    ),
    Claim(
        "Truncation ratio R",
        "6.4.2",
        "engine/tree_run.py",
        "flashtts_fig16.yaml: truncate-0.5",
        "engine/test_speculation.py::test_r_is_what_copies_keep",
        "0.85 gains more (Fig. 16 right)",
        ours="copies keep a share R; seconds not compared",
        note="drawn by lineage",
    ),
    Claim(
        "Two phases with preemption",
        "4.1.2",
        "engine/queue.py",
        "flashtts_fig16.yaml: exact",
        "engine/test_speculation.py::test_what_a_row_that_has_left_read_may_leave_the_device_before_the_batch_is_smaller",
        "has none",
        ours="speculative rows leave within 16 tokens",
        note="at once in the paper",
    ),
    Claim(
        "LookAhead Verification: both steps in one request",
        "4.1.3",
        "models/prefill.py",
        "flashtts_fig16.yaml: look-ahead",
        "verify/test_prm.py::test_steps_of_one_path_may_come_together",
        "most of the verifier's savings (6.2)",
        "flashtts_speculation",
        _look_ahead,
        "simulated",
        note="one call and one pass, to the same bits; what is dropped was read in vain",
    ),
    Claim(
        "What the gain rests on: uneven steps, scores that foretell",
        "3.2.1, 4.1.1",
        "lab/beamwright_lab/flashtts/speculation.py",
        "flashtts_fig16.yaml: exact",
        "lab/test_flashtts_figures.py::test_what_is_gained_ahead_rests_on_uneven_steps",
        "neither in numbers (Fig. 3 right)",
        "flashtts_speculation",
        _sensitivity,
        "simulated",
    ),
    Claim(
        "Prefix-aware order: greedy, siblings together",
        "4.2",
        "lab/beamwright_lab/flashtts/order.py",
        "flashtts_fig17.yaml: P",
        "lab/test_flashtts_order.py::test_it_follows_what_shares_most_and_then_who_came_first",
        "larger batches (Fig. 17 left, bars only)",
        ours="no order shares more than depth-first",
        note="the default is depth-first: the same sharing, cheaper",
    ),
    Claim(
        "Order, and order with memory, at 1.5 GB",
        "6.4.4",
        "lab/beamwright_lab/flashtts/figures.py",
        "flashtts_fig17.yaml: P+M",
        "lab/test_flashtts_figures.py::test_tables_say_ratios_of_what_ran",
        "+58 and +145 % (Fig. 17 right)",
        "flashtts_figures",
        _short_memory,
        "simulated",
    ),
    Claim(
        "Roofline-guided split, Eq. 1",
        "4.3.1",
        "lab/beamwright_lab/simulator/split.py",
        "--split",
        "lab/simulator/test_split_search.py::test_the_search_finds_what_brute_force_finds",
        "no number in the text (Fig. 10)",
        "flashtts_figures",
        _split,
        "computed",
        note="in the lab; the engine's memory moves, on cards, too: never worse (simulated)",
    ),
    Claim(
        "Offloading the idle model",
        "4.3.2",
        "engine/queue.py",
        "flashtts_fig17.yaml: P+M",
        "solver/test_split.py::test_memory_moves_while_a_search_runs",
        "has none",
        ours="KV leaves only where it is in the way",
        verdict="another way",
        note="one memory for both, on a CPU and a card; not timed on one",
    ),
    Claim(
        "KV for 80 % of the throughput, prefill and decoding",
        "3.2.3",
        "plan/costs.py",
        "flashtts_fig17.yaml: P+M",
        "lab/test_flashtts_figures.py::test_the_cost_model_alone_has_the_paper_s_asymmetry",
        "below 1 GB, and 5 to 10 times that (Fig. 6)",
        "flashtts_figures",
        _memory_of_stages,
        "computed",
    ),
    Claim(
        "Precise goodput",
        "6.1",
        "evaluate/metrics.py",
        "flashtts_fig12.yaml: 1.5B+7B",
        "lab/test_flashtts_figures.py::test_both_sides_count_goodput_alike",
        "mean 2.2x over two vLLM, 1.2 to 5.4x, n = 8 to 512 (Fig. 12)",
        "flashtts_figures",
        _goodput,
        "simulated",
        note="the baseline has the paper's rules, not Python's time",
    ),
    Claim(
        "Search variants: DVTS, dynamic, varying",
        "6.2",
        "search/dynamic.py",
        "flashtts_fig11.yaml: dynamic",
        "lab/test_flashtts_figures.py::test_every_method_has_a_row_with_what_it_gains",
        "1.2 to 3.9x (Fig. 11)",
        "flashtts_figures",
        _methods,
        "simulated",
    ),
    Claim(
        "Latency",
        "6.2",
        "engine/timeline.py",
        "flashtts_fig13.yaml: 1.5B+7B",
        "lab/test_flashtts_figures.py::test_tables_say_ratios_of_what_ran",
        "-38 to -68 % (Fig. 13)",
        "flashtts_figures",
        _falls("latency", 38, 68),
        "simulated",
    ),
    Claim(
        "Seconds of the verifier",
        "6.2",
        "verify/prm.py",
        "flashtts_fig13.yaml: 1.5B+7B",
        "lab/test_flashtts_baseline.py::test_without_its_prefix_cache_the_verifier_computes_whole_paths",
        "-75 to -85 %",
        "flashtts_figures",
        _falls("verification", 75, 85),
        "simulated",
    ),
    Claim(
        "A round's end stays busy",
        "6.4.2",
        "engine/batch.py",
        "flashtts_fig16.yaml: exact",
        "lab/test_flashtts_figures.py::test_where_all_fits_order_and_split_change_nothing_and_speculation_gains",
        "higher, more even (Fig. 16 left)",
        "flashtts_figures",
        _utilisation,
        "simulated",
    ),
    Claim(
        "Answers stay the same",
        "6.3",
        "engine/noise.py",
        "flashtts_fig14.yaml: 1.5B+7B",
        "engine/test_same_tree.py::test_the_tree_is_the_same",
        "comparable accuracy (Fig. 14)",
        "schedules",
        same_trees,
        "measured",
    ),
    Claim(
        "Accuracy on AIME and AMC, seconds on an RTX 4090",
        "6",
        "evaluate/run.py",
        "flashtts_fig14.yaml: 7B+1.5B",
        "cli/test_recipes.py::test_a_shipped_recipe_runs_every_setting_and_can_be_reported",
        "Fig. 14",
        ours="neither card nor network at hand",
        how="by nobody",
        verdict="not tried",
    ),
)
