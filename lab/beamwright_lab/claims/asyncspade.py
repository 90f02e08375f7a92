"""AsyncSpade: sparse decoding that selects keys before the query is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beamwright_lab.claims import NEAR, Claim, Found, Judge, Judged, near, of


def _flops(found: Found) -> Judged:
    rows = found["tables"]["FLOPs"]
    (row,) = (each for each in rows if (each["model"], each["context"]) == ("8B", 32768))
    others = min(row["full"], row["exact"], row["quest"])
    said = (
        f"{row['asyncspade']} GFLOP a token at 32k (8B), full attention {row['full']}, Quest "
        f"{row['quest']}; with the second GPU's {row['both ranks']}"
    )
    return said, of(row["asyncspade"] < others, "not reproduced")


def _bandwidth(found: Found) -> Judged:
    rows = found["tables"]["Table 2"]
    off = [abs(row["query heads, MiB/ms"] / row["printed GB/s"] - 1) for row in rows]
    need = [row["K and V, GB/s"] for row in rows]
    said = (
        f"all {len(rows)} within {100 * max(off):.1f} %, counting query heads; K and V of their "
        f"heads need {min(need):.0f} to {max(need):.0f}"
    )
    return said, of(max(off) < 0.1)


def _hidden(found: Found) -> Judged:
    waits = max(row["waits, ms"] for row in found["tables"]["Table 2"])
    rows = found["tables"]["conditions"]
    said = [f"with Table 2's times nobody waits ({waits:.1f} ms)"]
    for name in ("8B", "32B"):
        first = next(row for row in rows if row["case"].startswith(name))
        said.append(
            f"by the roofline {name} computes {first['inference']} ms, selects "
            f"{first['cache rank']}, copies {first['link down']}: "
            f"{'hidden' if first['hidden'] else 'not hidden'} (but for the link it is up to "
            f"{first['hidden by a link of no time up to, tokens'] // 1000}k tokens)"
        )
    return "; ".join(said), of(all(row["hidden"] for row in rows) and not waits)


def _alone(found: Found) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["sparse"] == "asyncspade"]


def _is_hidden(row: Mapping[str, Any]) -> bool:
    return bool(row["rank CPU"] <= (1 + NEAR) * row["forward CPU"])


def _beside(found: Found) -> Judged:
    rows = _alone(found)
    said = "; ".join(
        f"{row['tokens']:,} tokens: {row['forward CPU']:.0f} ms of CPU, the rank's "
        f"{row['rank CPU']:.0f}, of which copies {row['copies CPU']:.0f}"
        for row in rows
    )
    return said, of(all(map(_is_hidden, rows)), "not reproduced")


def _packs(found: Found) -> Judged:
    said, packed = [], [row for row in found["rows"] if "pack" in row["sparse"]]
    for alone in _alone(found):
        rows = [row for row in packed if row["tokens"] == alone["tokens"]]
        said.append(
            f"{alone['tokens']:,} tokens: the rank takes "
            f"{_range([row['rank CPU'] / alone['rank CPU'] for row in rows])} of single layers', "
            f"{sum(map(_is_hidden, rows))} of {len(rows)} hidden"
        )
    return "; ".join(said), of(all(map(_is_hidden, packed)))


def _faster(column: str, claimed: int) -> Judge:
    """column: "-11; -3; -20" by the roofline, where all is as much above it as the paper's own
    times, and what it claims."""

    def judge(found: Found) -> Judged:
        cells = [row[column].split("; ") for row in found["tables"]["TPOT"]]
        roofline, above = (sorted(int(cell[place]) for cell in cells) for place in (0, 1))
        said = (
            f"{roofline[0]} to {roofline[-1]} % by the roofline; {above[0]} to {above[-1]} % if "
            f"all methods are as far above it as the paper's own times"
        )
        return said, of(max(roofline[-1], above[-1]) <= -claimed)

    return judge


def _selection_share(found: Found) -> Judged:
    rows = {row["batch"]: row for row in found["tables"]["Figure 2"]}
    most = max(value for row in rows.values() for name, value in row.items() if name != "batch")
    said = f"{rows[8]['32k']} % of a block at 8 rows and 32k, at most {most} %"
    return said, of(most > 50)


def _layers(found: Found, model: str) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["model"] == model]


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _locality(found: Found) -> Judged:
    far = {
        model: [row["16 before"] for row in _layers(found, model)]
        for model in ("ledger", "bundled")
    }
    said = "; ".join(f"{_range(values)} in the {name} model" for name, values in far.items())
    return f"{said}, by layer", of(min(map(min, far.values())) > 0.4, "not reproduced")


def _prediction(reading: str) -> Judge:
    def judge(found: Found) -> Judged:
        rows, chance = found["rows"], found["share"]
        values = [row[f"predicted, {reading}"] for row in rows]
        better = sum(row[f"predicted, {reading}"] > row["1 before"] for row in rows)
        said = (
            f"overlap {_range(values)}; above the last query's in {better} of {len(rows)} layers "
            f"(chance: {chance})"
        )
        return said, of(min(values) > 0.4)

    return judge


def _shift(found: Found) -> Judged:
    readings, losses = ("text", "printed", "ridge"), []
    said = []
    for reading in readings:
        with_it, without = (
            sum(row[f"{how}, {reading}"] for row in found["rows"]) / len(found["rows"])
            for how in ("shifted", "not shifted")
        )
        losses.append(without - with_it)
        said.append(f"{reading} {without:.2f} without, {with_it:.2f} with it")
    return f"overlap, {'; '.join(said)}", of(max(losses) < 0.02, "not reproduced")


def _accuracy(found: Found) -> Judged:
    tokens = found["options"]["select"]
    rows: dict[str, list[float]] = {}
    for row in found["rows"]:
        rows.setdefault(row["sparse"], []).append(row["looked_up"])
    mean = {name: sum(values) / len(values) for name, values in rows.items()}
    said = (
        f"look-ups right with {tokens} of {found['rows'][0]['tokens']:,} tokens, ledger model: "
        f"{mean['asyncspade']:.2f}, as printed {mean['asyncspade-printed']:.2f}, without softmax "
        f"{mean['asyncspade-ridge']:.2f}, Quest {mean['quest']:.2f}, the layer before "
        f"{mean['ahead']:.2f}, the true query {mean['exact']:.2f}, all tokens {mean['off']:.2f}"
    )
    return said, of(near(mean["asyncspade"], mean["off"]), "not reproduced")


CLAIMS = (
    Claim(
        "Ridge regression and a softmax, Eq. 2 and 3 as section 4.2 says",
        "3, 4.2",
        "sparse/predict.py",
        "asyncspade.yaml: asyncspade",
        "sparse/test_predict.py::test_asyncspade_is_its_equations",
        "selects as the true query does (Fig. 5, no number)",
        "sparse_locality",
        _prediction("text"),
        "measured",
    ),
    Claim(
        "Eq. 2 as printed: the softmax inside",
        "3",
        "lab/beamwright_lab/baselines/readings.py",
        "asyncspade.yaml: asyncspade-printed",
        "sparse/test_predict.py::test_as_printed_eq_2_is_minimised",
        "Fig. 5, no number",
        "sparse_locality",
        _prediction("printed"),
        "measured",
    ),
    Claim(
        "Without any softmax",
        "3",
        "lab/beamwright_lab/baselines/readings.py",
        "asyncspade.yaml: asyncspade-ridge",
        "sparse/test_predict.py::test_a_row_is_predicted_alike_whoever_is_beside_it",
        "has none",
        "sparse_locality",
        _prediction("ridge"),
        "measured",
    ),
    Claim(
        "The shift by one token, Eq. 4",
        "4.2",
        "sparse/predict.py",
        "asyncspade.yaml: asyncspade",
        "sparse/test_predict.py::test_asyncspade_is_its_equations",
        "no loss, even a gain (Fig. 5)",
        "sparse_locality",
        _shift,
        "measured",
    ),
    Claim(
        "All windows up to 16, averaged, Eq. 5",
        "4.2",
        "sparse/predict.py",
        "asyncspade.yaml: window-path",
        "sparse/test_view.py::test_a_window_that_goes_on_ends_where_its_step_does",
        "has none",
        ours="one batched solve",
        note="a window begins anew with each step, or goes on (`window=path`)",
    ),
    Claim(
        "Queries 16 tokens apart select alike",
        "3",
        "lab/beamwright_lab/sparse/locality.py",
        "asyncspade.yaml: asyncspade",
        "lab/test_sparse_ledger.py::test_what_is_guessed_of_a_query_is_what_asyncspade_predicts",
        "overlap above 40 % (Fig. 4)",
        "sparse_locality",
        _locality,
        "measured",
        note="our models lack the premise, so they refute nothing",
    ),
    Claim(
        "Selection of single tokens, Eq. 1",
        "4.2",
        "sparse/select.py",
        "asyncspade.yaml: query-heads",
        "sparse/test_view.py::test_each_row_attends_to_what_it_selects_by_hand",
        "has none",
        ours="one set for each KV head, or for each query head (`each=query`)",
        note="its bandwidths count query heads",
    ),
    Claim(
        "Inference rank and cache rank, a token apart",
        "4.1",
        "sparse/rank.py",
        "asyncspade.yaml: packs",
        "sparse/test_view.py::test_what_the_next_token_reads_is_pushed_behind_this_one_s_queries",
        "a second GPU; hidden",
        "sparse_hiding",
        _beside,
        "measured",
        note="a thread beside the host's memory in the second GPU's place",
    ),
    Claim(
        "Packs of layers",
        "4.3",
        "sparse/view.py",
        "asyncspade.yaml: packs",
        "cli/test_recipes.py::test_every_reading_of_asyncspade_selects_and_packs_change_nothing",
        "4 to 12 layers",
        "sparse_hiding",
        _packs,
        "measured",
    ),
    Claim(
        "Two conditions by which all is hidden",
        "4.3",
        "lab/beamwright_lab/simulator/sparse.py",
        "asyncspade.yaml: packs",
        "lab/test_sparse_paper.py::test_table_two_is_recomputed_and_all_of_it_is_hidden",
        "hidden in all 16 cases (Table 2)",
        "sparse_paper",
        _hidden,
        "simulated",
    ),
    Claim(
        "Bandwidth between the GPUs",
        "5.4",
        "lab/beamwright_lab/studies/sparse.py",
        "asyncspade.yaml: packs",
        "lab/test_sparse_paper.py::test_table_two_is_recomputed_and_all_of_it_is_hidden",
        "105 to 230 GB/s (Table 2)",
        "sparse_paper",
        _bandwidth,
        "computed",
    ),
    Claim(
        "Fewest operations a token, Eq. 6 to 11",
        "5.2",
        "lab/beamwright_lab/studies/sparse.py",
        "asyncspade.yaml: asyncspade",
        "lab/test_sparse_paper.py::test_flops_of_a_token_are_the_paper_s",
        "Fig. 9",
        "sparse_paper",
        _flops,
        "computed",
    ),
    Claim(
        "Batched products for grouped heads",
        "4.3",
        "sparse/select.py",
        "asyncspade.yaml: asyncspade",
        "sparse/test_view.py::test_each_row_attends_to_what_it_selects_by_hand",
        "Fig. 8",
        ours="one product for each KV head's queries",
        note="no multi-head latent attention",
    ),
    Claim(
        "Quest, its baseline",
        "5.1",
        "sparse/select.py",
        "asyncspade.yaml: quest",
        "sparse/test_view.py::test_bounds_are_above_every_key_of_a_page",
        "over 20 % less time a token (Fig. 10)",
        "sparse_paper",
        _faster("against quest %: roofline; so much above; claimed", 20),
        "computed",
    ),
    Claim(
        "Full attention, its baseline",
        "5.3",
        "lab/beamwright_lab/sparse/paper.py",
        "asyncspade.yaml: quest",
        "lab/test_sparse_paper.py::test_quest_s_bounds_are_a_small_part_of_the_overhead_that_the_claim_needs",
        "at least 50 % less (Fig. 10)",
        "sparse_paper",
        _faster("against full %", 50),
        "computed",
    ),
    Claim(
        "TOVA, its baseline",
        "5.1",
        "none",
        "none",
        "none",
        "below AsyncSpade (Fig. 9)",
        ours="none",
        how="by nobody",
        verdict="not built",
        note="it evicts, and a tree's KV is shared",
    ),
    Claim(
        "Selecting dominates a block's time",
        "1",
        "lab/beamwright_lab/sparse/paper.py",
        "asyncspade.yaml: quest",
        "lab/test_sparse_paper.py::test_selection_is_at_most_half_of_the_bytes",
        "in large batches or contexts (Fig. 2)",
        "sparse_paper",
        _selection_share,
        "computed",
    ),
    Claim(
        "Accuracy of full attention",
        "5.2",
        "lab/beamwright_lab/sparse/ledger.py",
        "asyncspade.yaml: asyncspade",
        "lab/test_sparse_ledger.py::test_a_file_of_ledgers_is_a_problem_set_whose_answers_are_judged",
        "matched or surpassed (Fig. 9)",
        "sparse_ledger",
        _accuracy,
        "measured",
        note="what is looked up is named one token before: no older query knows it",
    ),
    Claim(
        "First layers in full, for every predictor alike",
        "5.1",
        "sparse/view.py",
        "asyncspade.yaml: layer-before",
        "sparse/test_view.py::test_each_row_attends_to_what_it_selects_by_hand",
        "not said; Quest's release keeps two",
        ours="any number, with any method",
        verdict="another way",
        note="a layer of embeddings cannot be foreseen",
    ),
    Claim(
        "Turned on where it gains",
        "5.3",
        "plan/sparse.py",
        "--sparse",
        "plan/test_sparse.py::test_a_long_path_that_outgrows_the_device_is_selected_from",
        "beyond a certain length (Fig. 10)",
        ours="`auto`: the true query, KV on the host, where a path outgrows the device",
        verdict="another way",
        note="a guess of the query, or bounds of pages, loses the ledger at 4,096 tokens",
    ),
    Claim(
        "Qwen3 on AIME, GPQA and MATH-500; two GPUs",
        "5.2, 5.3",
        "evaluate/run.py",
        "asyncspade.yaml: asyncspade",
        "cli/test_recipes.py::test_a_shipped_recipe_runs_every_setting_and_can_be_reported",
        "Fig. 9, 10",
        ours="neither card nor network at hand",
        how="by nobody",
        verdict="not tried",
    ),
)
