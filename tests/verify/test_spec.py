import pytest
from pydantic import ValidationError

from beamwright.errors import InputError
from beamwright.verify.family import load_spec
from beamwright.verify.spec import VerifierSpec, check_placeholders

GOOD = {
    "name": "prm",
    "template": {"prefix": "{problem}\n", "step_suffix": " #\n", "marker": "#"},
    "read": "marker",
    "head": {"kind": "logit_pair", "good": "+", "bad": "-"},
    "activation": "softmax",
}


LINEAR, MLP = {"kind": "linear"}, {"kind": "token_mlp", "file": "h"}
OUTSIDE = ["../x", "a/../../x", "/tmp/x", "..", "", "..\\x", "C:\\x", "C:x", "a\0b"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": None}, "name"),
        ({"template": {"step_suffix": "\n", "marker": "#"}}, "marker inside step_suffix"),
        ({"head": {"kind": "logit_pair", "good": "+"}}, "needs 'good' and 'bad'"),
        ({"head": LINEAR, "activation": "sigmoid"}, "needs 'file'"),
        ({"head": MLP, "activation": "sigmoid"}, "needs 'features'"),
        ({"head": {**MLP, "features": ["colour"]}, "activation": "sigmoid"}, "features"),
        ({"activation": "sigmoid"}, "a logit_pair head goes with softmax only"),
        ({"head": {**MLP, "features": ["gap"]}}, "softmax goes with logit_pair, two_layer and"),
        ({"template": {"layout": "dialogue"}}, "layout: dialogue needs a marker"),
        ({"template": {"layout": "answer"}}, "layout: answer cannot be read at marker"),
        ({"template": {"layout": "dialogue", "marker": "+"}, "read": "end"}, "cannot be read at"),
        ({"template": {"layout": "answer", "prefix": "x"}, "read": "end"}, "layout: text only"),
        ({"template": {"prefix": "x", "system": "y"}, "read": "end"}, "not with a prefix"),
        ({"template": {"split": "\n"}, "read": "end"}, "split needs a step_suffix"),
        ({"template": {"split": "\n", "step_suffix": "\n"}, "read": "end"}, "split needs read"),
        ({"aggregate": "max"}, "aggregate"),
        ({"template": {"prefix": "{problm}\n"}}, "{problm} is no placeholder; {problem} is one"),
        ({"template": {"prefix": "Solve it.\n"}}, "without {problem} the verifier would never"),
        ({"template": {"prefix": "{problem}", "step_suffix": "{step}"}}, "there are none here"),
        *(({"head": {**LINEAR, "file": each}}, "outside the verifier's fold") for each in OUTSIDE),
    ],
)
def test_an_impossible_spec_says_why(change, complaint):
    with pytest.raises(ValidationError, match=complaint):
        VerifierSpec.model_validate({**GOOD, **change})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: [", "not YAML"),
        ("name: prm", "read: Field required"),
        ("", "spec"),
        ("- 1", "spec"),
    ],
)
def test_a_bad_spec_file_is_one_line(tmp_path, text, complaint):
    (tmp_path / "verifier.yaml").write_text(text)
    with pytest.raises(InputError, match=complaint) as caught:
        load_spec(tmp_path)
    assert "verifier.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_braces_that_are_no_placeholder_are_text():
    check_placeholders("prefix", r"{problem} \boxed{answer} {{x}} {1}", ("problem",))
