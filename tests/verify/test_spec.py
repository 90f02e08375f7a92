import pytest
from pydantic import ValidationError

from beamwright.errors import InputError
from beamwright.verify.family import load_spec
from beamwright.verify.spec import (
    LIKELIHOOD_SPEC,
    VerifierSpec,
    check_placeholders,
    validated,
)

GOOD = {
    "name": "prm",
    "template": {"prefix": "{problem}\n", "step_suffix": " #\n", "marker": "#"},
    "read": "marker",
    "head": {"kind": "logit_pair", "good": "+", "bad": "-"},
    "activation": "softmax",
}


def test_a_complete_spec_is_read():
    spec = VerifierSpec.model_validate(GOOD)
    assert (spec.combine, spec.aggregate) == ("last", "last")
    assert not spec.head.looks_back
    assert LIKELIHOOD_SPEC.head.looks_back


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": None}, "name"),
        ({"reads": "marker"}, "reads"),
        ({"read": "everywhere"}, "read"),
        ({"template": {"step_suffix": "\n", "marker": "#"}}, "marker inside step_suffix"),
        ({"template": {"step_suffix": "#\n"}}, "marker inside step_suffix"),
        ({"head": {"kind": "logit_pair", "good": "+"}}, "needs 'good' and 'bad'"),
        ({"head": {"kind": "linear"}, "activation": "sigmoid"}, "needs 'file'"),
        ({"head": {"kind": "token_mlp", "file": "h"}, "activation": "sigmoid"}, "needs 'features'"),
        (
            {
                "head": {"kind": "token_mlp", "file": "h", "features": ["colour"]},
                "activation": "sigmoid",
            },
            "features",
        ),
        ({"activation": "sigmoid"}, "a logit_pair head goes with softmax only"),
        (
            {"head": {"kind": "token_mlp", "file": "h", "features": ["gap"]}},
            "softmax goes with logit_pair, two_layer and linear heads",
        ),
        ({"template": {"layout": "dialogue"}}, "layout: dialogue needs a marker"),
        ({"template": {"layout": "answer"}}, "layout: answer cannot be read at marker"),
        ({"template": {"layout": "dialogue", "marker": "+"}, "read": "end"}, "cannot be read at"),
        ({"template": {"layout": "answer", "prefix": "x"}, "read": "end"}, "layout: text only"),
        ({"template": {"prefix": "x", "system": "y"}, "read": "end"}, "not with a prefix"),
        ({"template": {"split": "\n"}, "read": "end"}, "split needs a step_suffix"),
        ({"template": {"split": "\n", "step_suffix": "\n"}, "read": "end"}, "split needs read"),
        ({"scores": "sometimes"}, "scores"),
        ({"aggregate": "max"}, "aggregate"),
    ],
)
def test_an_impossible_spec_says_why(change, complaint):
    with pytest.raises(ValidationError, match=complaint):
        VerifierSpec.model_validate({**GOOD, **change})


def test_a_folder_without_a_spec_names_the_file(generator_folder):
    with pytest.raises(InputError, match=r"no verifier\.yaml says how its scores are read"):
        load_spec(generator_folder)


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


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"prefix": "{problm}\n\n"}, "{problm} is no placeholder; {problem} is one"),
        ({"prefix": "Solve it.\n"}, "without {problem} the verifier would never see the problem"),
        ({"prefix": "{problem}", "step_suffix": "{step}"}, "there are none here"),
        ({"system": "Judge {problem}."}, "there are none here"),
    ],
)
def test_a_placeholder_that_nothing_replaces_is_an_error(template, words):
    head = {"kind": "linear", "layers": ["score"]}
    spec = {"name": "x", "read": "step_end", "head": head, "activation": "sigmoid"}
    with pytest.raises(InputError) as caught:
        validated(VerifierSpec, {**spec, "template": template}, "x/verifier.yaml")
    assert words in str(caught.value)


def test_braces_that_are_no_placeholder_are_text():
    check_placeholders("prefix", r"{problem} \boxed{answer} {{x}} {1}", ("problem",))


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "a/../../x", "/tmp/x", "..", "", "..\\x", "C:\\x", "C:x", "a\0b"]
)
def test_a_head_outside_the_folder_is_refused(tmp_path, file):
    written = {"name": "x", "read": "end", "head": {"kind": "linear", "file": file}}
    with pytest.raises(InputError, match="lies outside the verifier's folder"):
        validated(VerifierSpec, {**written, "activation": "sigmoid"}, "x")
