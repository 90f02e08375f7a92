"""The table of what search buys."""

from beamwright_lab.gains import study


def result(kinds):
    lead = {"width": 1.0, "lead": {"value": 0.04, "interval": [0.0, 0.07]}}
    row = {
        "method": "greedy",
        "accuracy": {"value": 0.5, "interval": [0.4, 0.6]},
        **{kind: 0.5 for kind in kinds},
        "tokens": 80.0,
        "seconds": 0.2,
        **{f"beside vote, equal {unit}": lead for unit in ("tokens", "seconds")},
    }
    return {"kinds": kinds, "rows": [row]}


def test_kinds_have_columns_if_there_are_several():
    def header(kinds):
        return study.block(result(kinds)).partition(" | all ")[0]

    assert header(["words", "units"]) == "| method | words | units"
    assert header(["bundled"]) == "| method"
    assert study.block(result(["bundled"])).endswith("| +4 (+0 to +7) | +4 (+0 to +7) |")
