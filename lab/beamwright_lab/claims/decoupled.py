"""Decoupled tree exploration: McCreanor's thesis on a runtime for test-time compute."""

from __future__ import annotations

from typing import Any

from beamwright_lab.claims import Claim, Found, Judged, Verdict, near, of

CALM = "lru", "tree"


def _runs(found: Found, victims: str) -> dict[float, dict[str, Any]]:
    """By split, of what fits."""
    return {
        row["split"]: row
        for row in found["split"]
        if row["victims"] == victims and not isinstance(row["tok/s"], str)
    }


def _peak(found: Found) -> Judged:
    runs = _runs(found, "lru")
    rates = {split: row["tok/s"] for split, row in runs.items()}
    best = max(rates, key=rates.__getitem__)
    said = "; ".join(f"{split}: {rate:,.0f} tok/s" for split, rate in rates.items())
    return f"{said} (24 GB)", of(near(best, 0.3), "partly")


def _hits(found: Found) -> Judged:
    rows = [*_runs(found, "lru").values()]
    own, other = (sorted(row[name] for row in rows) for name in ("hits", "verifier hits"))
    said = f"{own[0]:.3f} to {own[-1]:.3f}; the verifier {other[0]:.3f} to {other[-1]:.3f}"
    return said, of(min(own[0], other[0]) > 0.8)


def _thrash(found: Found) -> Judged:
    rows = [*_runs(found, "lru").values()]
    most = max(max(row["thrash"], row["verifier thrash"]) for row in rows)
    none = [f"{row['split']}" for row in rows if not row["thrash"] and not row["verifier thrash"]]
    said = f"none at a split of {' and '.join(none)}, elsewhere up to {100 * most:.1f} % of tokens"
    return said, of(most < 0.01)


def _held(found: Found) -> Judged:
    rows = sorted(found["vllm"], key=lambda row: row["verifier blocks"])
    held = [row["verifier held"] for row in rows]
    said = ", ".join(f"{row['verifier held']} of {row['verifier blocks']:,}" for row in rows)
    said = f"on average requests hold {said} blocks, under vLLM's rules"
    return said, of(held == sorted(held) and held[0] < 0.9 * held[-1], "not reproduced")


def _thrash_by_hash(found: Found) -> Judged:
    rows = found["vllm"]
    shares = {row["split"]: max(row["thrash"], row["verifier thrash"]) for row in rows}
    said = ", ".join(f"{split}: {100 * share:.1f} %" for split, share in shares.items())
    otherwise: Verdict = "partly" if min(shares.values()) < 0.01 else "not reproduced"
    return f"of blocks, by split: {said}", of(max(shares.values()) < 0.01, otherwise)


def _eviction(found: Found) -> Judged:
    plain, tree = (_runs(found, victims) for victims in CALM)
    gains = {split: tree[split]["tok/s"] / plain[split]["tok/s"] for split in plain}
    most = max(gains, key=gains.__getitem__)
    said = (
        f"evicting by the tree is up to {100 * (gains[most] - 1):.0f} % faster than LRU "
        f"(split {most})"
    )
    return said, of(gains[most] < 1.02, "not reproduced")


def _requests(found: Found) -> Judged:
    own, other = found["batches"]
    said = f"{100 * own['requests of 1']:.2f} % of the generator's, "
    said += f"{100 * other['requests of 1']:.0f} % of the verifier's"
    return said, of(own["requests of 1"] > 0.9 > other["requests of 1"])


def _underfilled(found: Found) -> Judged:
    own, other = found["batches"]
    said = f"a pass has {100 * own['of 2,048']:.1f} % of 2,048 tokens, "
    said += f"the verifier's {100 * other['of 2,048']:.0f} %"
    return said, of(own["of 2,048"] < 0.2)


def _sizes(found: Found) -> Judged:
    rows = {row["requests"]: row for row in found["sizes"]}
    own, other = rows[16]["of its most"], rows[16]["of the verifier's most"]
    said = f"at 16 requests {100 * own:.0f} % of its most; the verifier {100 * other:.0f} %"
    return said, of(other > 2 * own, "partly")


def _hybrid(found: Found) -> Judged:
    row = next(row for row in found["hybrid"] if row["rows"] == 64)
    said = (
        f"a step of 64 rows takes {row['times, 200']}x with a prompt of 200 tokens in it, "
        f"{row['times, 1000']}x with 1,000"
    )
    return said, of(row["times, 200"] > 1)


def _settings(found: Found) -> dict[str, dict[str, Any]]:
    return {row["setting"]: row for row in found["settings"]}


def _batching(found: Found) -> Judged:
    rows = _settings(found)
    few, many = (rows[f"lockstep{each}"]["seconds"] for each in ("", ", more"))
    gains = [
        few / rows["continuous"]["seconds"],
        many / rows["continuous, more"]["seconds"],
    ]
    said = f"{gains[0]:.2f}x over lockstep with 4 problems at a time, {gains[1]:.2f}x with 16"
    return said, of(min(gains) > 1.1, "partly")


def _utilisation(found: Found) -> Judged:
    times = {row["share"]: row["times"] for row in found["utilisation"]}
    return f"{times[0.4]}x", of(near(times[0.4], 4), "partly")


def _invocations(found: Found) -> Judged:
    rows = [row for row in found["invocations"] if row["in flight"] == 1]
    said = ", ".join(f"{row['kept']:.2f} kept leaves {row['passes']:.2f}" for row in rows)
    least = min(row["passes"] for row in rows)
    return f"{said} of the passes", of(near(least, 0.5), "partly")


def _decoupled(found: Found) -> Judged:
    rows = _settings(found)
    one, other = rows["decoupled, eager"], rows["continuous, more"]
    gain = other["seconds"] / one["seconds"]
    said = f"{one['times']}x one problem at a time; {gain:.2f}x continuous batching with as many"
    return said, "beyond the paper"


def _pipelining(found: Found) -> Judged:
    rows = _settings(found)
    turns, both = rows["decoupled, eager"], rows["decoupled, eager + overlap"]
    two, own = rows["the same, two PRMs"], rows["the same, a card for the PRM"]
    said = (
        f"both models at once {turns['seconds'] / both['seconds']:.2f}x; a second verifier on the "
        f"card {both['seconds'] / two['seconds']:.2f}x more, a card of its own "
        f"{both['seconds'] / own['seconds']:.2f}x"
    )
    return said, "beyond the paper"


def _several(found: Found) -> Judged:
    """Of the last number of verifiers, against one."""
    rows = {row["verifier"]: row for row in found["rows"]}
    said = ", ".join(f"{name} {row['times']:.2f}x" for name, row in rows.items())
    most, equal = next(iter(rows.values()))["verifiers"], all(row["same"] for row in rows.values())
    trees = "equal trees" if equal else "other trees"
    return f"{most} lanes against one, by verifier: {said}; {trees}", "beyond the paper"


def _loop(found: Found) -> Judged:
    rows = [row for row in found["settings"] if not row["setting"].startswith("the same")]
    shares = [100 * row["loop_cpu_s"] / row["seconds"] for row in rows]
    said = (
        f"{min(shares):.1f} to {max(shares):.1f} % of the time, in Python (CPU seconds of the loop "
    )
    said += "and of the simulator's counting, over simulated seconds)"
    return said, of(max(shares) < 1, "partly")


CLAIMS = (
    Claim(
        "One runtime for both models, prefix caches",
        "4.3.1, 6.1",
        "models/tree_model.py",
        "decoupled_chapter4.yaml: continuous",
        "lab/test_decoupled.py::test_where_all_fits_nothing_leaves_and_little_memory_is_seen",
        "hits at a high rate, over many splits (Fig. 6.1)",
        "decoupled_cache",
        _hits,
        "simulated",
    ),
    Claim(
        "A score is computed once",
        "4.3.2",
        "verify/prm.py",
        "decoupled_chapter4.yaml: lockstep",
        "verify/test_prm.py::test_steps_whose_paths_are_equal_are_computed_once",
        "has none",
        ours="equal paths share score and KV",
    ),
    Claim(
        "Problems join as others end",
        "4.3.3",
        "engine/queue.py",
        "decoupled_chapter4.yaml: continuous",
        "engine/test_same_tree.py::test_the_tree_is_the_same",
        "a dramatic gain",
        "decoupled_throughput",
        _batching,
        "simulated",
    ),
    Claim(
        "Nothing is sampled past its depth",
        "4.3.4",
        "search/rounds.py",
        "decoupled_chapter4.yaml: lockstep",
        "cli/test_recipes.py::test_chapter_4_samples_nothing_past_its_depth",
        "has none",
        ours="no path is deeper than 40 steps",
    ),
    Claim(
        "Memory split",
        "5.2",
        "solver/memory.py",
        "--split",
        "lab/test_decoupled.py::test_memory_is_split_by_the_generators_part",
        "throughput peaks at 0.3 of the card (Fig. 5.2)",
        "decoupled_cache",
        _peak,
        "simulated",
    ),
    Claim(
        "Blocks of the verifier in each turn",
        "5.2.1",
        "lab/beamwright_lab/decoupled/blocks.py",
        "--split",
        "lab/test_decoupled.py::test_under_vllms_rules_blocks_are_counted_by_hash",
        "fewer with less memory (Fig. 5.3)",
        "decoupled_blocks",
        _held,
        "simulated",
    ),
    Claim(
        "Cache thrashing, Alg. 1, under vLLM's rules",
        "6.2",
        "lab/beamwright_lab/decoupled/blocks.py",
        "decoupled_chapter4.yaml: recompute",
        "lab/test_decoupled.py::test_under_vllms_rules_blocks_are_counted_by_hash",
        "extremely rare (Fig. 6.2)",
        "decoupled_blocks",
        _thrash_by_hash,
        "simulated",
        note="as printed nothing leaves CacheBlocks, and nothing counts",
    ),
    Claim(
        "The same in this engine, by segment",
        "6.2",
        "kv/cache.py",
        "decoupled_chapter4.yaml: recompute",
        "kv/test_residency.py::test_the_order_of_eviction",
        "extremely rare (Fig. 6.2)",
        "decoupled_cache",
        _thrash,
        "simulated",
    ),
    Claim(
        "LRU suits tree search",
        "6.2",
        "schedule/__init__.py",
        "decoupled_chapter4.yaml: recompute",
        "schedule/test_eviction.py::test_against_one_sort_by_the_whole_rule",
        "no need of another rule",
        "decoupled_cache",
        _eviction,
        "simulated",
    ),
    Claim(
        "Requests of one token",
        "7.1",
        "lab/beamwright_lab/decoupled/cache.py",
        "decoupled_chapter4.yaml: continuous",
        "lab/test_decoupled.py::test_where_all_fits_nothing_leaves_and_little_memory_is_seen",
        "the generator's, not the verifier's (Fig. 7.1)",
        "decoupled_cache",
        _requests,
        "simulated",
    ),
    Claim(
        "The generator's batches are under-filled",
        "8.1.1",
        "lab/beamwright_lab/decoupled/cache.py",
        "decoupled_chapter4.yaml: lockstep",
        "lab/test_decoupled.py::test_where_all_fits_nothing_leaves_and_little_memory_is_seen",
        "10 % in its example",
        "decoupled_cache",
        _underfilled,
        "simulated",
    ),
    Claim(
        "The generator gains from larger batches, the verifier soon does not",
        "7.1",
        "plan/costs.py",
        "decoupled_chapter4.yaml: lockstep",
        "lab/test_decoupled.py::test_the_verifier_saturates_with_fewer_requests",
        "Fig. 7.2",
        "decoupled_cache",
        _sizes,
        "computed",
    ),
    Claim(
        "A prompt in a decode batch delays it",
        "8.1.2",
        "lab/beamwright_lab/decoupled/cache.py",
        "decoupled_chapter4.yaml: continuous",
        "lab/test_decoupled.py::test_a_prompt_in_a_pass_delays_every_row_of_it",
        "higher latency (Fig. 8.1)",
        "decoupled_cache",
        _hybrid,
        "computed",
        note="the engine never mixes prompts into decoding",
    ),
    Claim(
        "Two work queues, Alg. 2",
        "7.2",
        "engine/scoring.py",
        "decoupled_chapter4.yaml: decoupled",
        "engine/test_explore.py::test_a_turn_of_the_verifier_takes_what_fits",
        "designed, not built (9.1.1)",
        "decoupled_throughput",
        _decoupled,
        "simulated",
    ),
    Claim(
        "Who is taken in: running, queued, speculative (Alg. 5)",
        "7.2",
        "engine/queue.py",
        "decoupled_chapter4.yaml: decoupled",
        "engine/test_explore.py::test_decoupled_takes_problems_in_until_a_pass_is_full",
        "has none",
        ours="by the rows of a pass, by KV, by seconds of waiting for a host",
    ),
    Claim(
        "A beam goes on before its round is over (Alg. 5)",
        "7.2",
        "engine/engine.py",
        "decoupled_chapter4.yaml: independent",
        "engine/test_explore.py::test_a_path_that_waits_for_no_other_goes_on_before_its_round_is_over",
        "has none",
        ours="independent paths do, with equal trees, if decoupled",
        note="others compare scores: DVTS's come early at too high a price, particles need all",
    ),
    Claim(
        "The verifier never scores speculation, Alg. 4",
        "7.2",
        "engine/engine.py",
        "decoupled_chapter4.yaml: decoupled",
        "engine/test_speculation.py::test_the_verifier_may_be_kept_from_what_is_ahead",
        "has none",
        ours="the default",
    ),
    Claim(
        "Batches of 40 % for 10 %",
        "8.1.1",
        "plan/costs.py",
        "decoupled_chapter4.yaml: decoupled",
        "lab/test_decoupled.py::test_more_rows_are_faster_by_less_than_their_number",
        "up to 4x the generator's rate",
        "decoupled_throughput",
        _utilisation,
        "computed",
    ),
    Claim(
        "Half of the speculation kept",
        "8.1.1",
        "engine/speculation.py",
        "flashtts_fig16.yaml: bins",
        "lab/test_decoupled.py::test_the_more_is_kept_of_what_is_ahead_the_fewer_passes",
        "half of the passes",
        "decoupled_throughput",
        _invocations,
        "simulated",
    ),
    Claim(
        "Pipelining",
        "9.1.2",
        "engine/executor.py",
        "decoupled_chapter4.yaml: overlapped",
        "engine/test_same_tree.py::test_the_tree_is_the_same",
        "proposed",
        "decoupled_throughput",
        _pipelining,
        "simulated",
        note="a second verifier gains nothing on one simulated card",
    ),
    Claim(
        "Several verifiers at a time",
        "9.1.2",
        "engine/executor.py",
        "decoupled_chapter4.yaml: verifiers",
        "engine/test_executor.py::test_several_verifiers_score_at_a_time_each_its_own_trees",
        "proposed",
        "decoupled_verifiers",
        _several,
        "measured",
    ),
    Claim(
        "Eager or speculative, adaptively",
        "9.1.3",
        "engine/speculation.py",
        "decoupled_chapter4.yaml: decoupled",
        "engine/test_speculation.py::test_uneven_steps_and_cheap_calls_pay",
        "proposed",
        ours="beside many problems it never pays",
        how="simulated",
        verdict="beyond the paper",
    ),
    Claim(
        "Queues cost nothing to speak of",
        "8.1.3",
        "engine/queue.py",
        "decoupled_chapter4.yaml: decoupled",
        "engine/test_explore.py::test_a_line_is_by_priority_then_by_who_came_first",
        "likely negligible",
        "decoupled_throughput",
        _loop,
        "measured",
    ),
    Claim(
        "Seconds of vLLM on a card, accuracy on MATH",
        "5 to 7",
        "evaluate/run.py",
        "decoupled_chapter4.yaml: decoupled",
        "cli/test_recipes.py::test_a_shipped_recipe_runs_every_setting_and_can_be_reported",
        "Fig. 5.2 to 7.3",
        ours="neither card nor network at hand",
        how="by nobody",
        verdict="not tried",
    ),
)
