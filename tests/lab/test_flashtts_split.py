"""The benchmark of FlashTTS's split plans all three pairs; weights that do not fit are said."""

from beamwright.plan.machines import find_profile
from beamwright_lab.flashtts.split import PAIRS, PLAN_COLUMNS, plan_rows


def test_three_pairs_on_a_card_of_24_gb():
    rows = list(plan_rows([512], find_profile("rtx-4090")))
    assert {row["pair"] for row in rows} == set(PAIRS)
    assert all(set(row) <= set(PLAN_COLUMNS) for row in rows)
    said = [row for row in rows if row["requests"] == "the weights do not fit"]
    assert [(row["pair"], row["memory"]) for row in said] == [
        ("1.5B+7B", "40%"),
        ("7B+1.5B", "40%"),
    ]
    whole = [row for row in rows if row["requests"] == "whole paths"]
    assert all(float(row["generator's share"]) > 0.7 for row in whole)
    assert all(float(row["search, s"]) < float(row["half and half, s"]) for row in whole)
