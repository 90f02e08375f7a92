import pytest
from pydantic import ValidationError

from beamwright.errors import InputError
from beamwright.verify.family import load_spec
from beamwright.verify.spec import VerifierSpec, check_placeholders
from tables import beside

CASES = beside(__file__)


@pytest.mark.parametrize(("change", "complaint"), CASES["specs"])
def test_an_impossible_spec_says_why(change, complaint):
    with pytest.raises(ValidationError, match=complaint):
        VerifierSpec.model_validate({**CASES["good"], **change})


@pytest.mark.parametrize(("text", "complaint"), CASES["files"])
def test_a_bad_spec_file_is_one_line(tmp_path, text, complaint):
    (tmp_path / "verifier.yaml").write_text(text)
    with pytest.raises(InputError, match=complaint) as caught:
        load_spec(tmp_path)
    assert "verifier.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_braces_that_are_no_placeholder_are_text():
    check_placeholders("prefix", r"{problem} \boxed{answer} {{x}} {1}", ("problem",))
