"""What `doctor --verifier PATH --show` says of every family."""

import pytest

from beamwright.errors import InputError
from beamwright.sections import ModelSettings
from beamwright.verify.find import show_verifier
from prm_goldens import GOLDENS, write_golden


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return {name: write_golden(name, tmp_path_factory.mktemp("prm")) for name in GOLDENS}


@pytest.mark.parametrize(
    ("family", "read"),
    [
        ("qwen2.5-math-prm", ["<extra_0>"] * 3),
        ("skywork-o1", ["\n"] * 3),
        ("skywork-o1-paragraphs", ["\n\n"] * 3),
        ("math-shepherd", ["ки"] * 3),
        ("rlhflow", ["\n\n"] * 3),  # where + is predicted
        ("outcome", [None, None, "<|eot_id|>"]),
    ],
)
def test_where_each_format_is_read(family, read, options):
    steps = show_verifier(ModelSettings(verifier=options[family]))["steps"]
    assert [step["read"][0].strip(" ") if step["read"] else None for step in steps] == read


@pytest.mark.parametrize("name", ["logprob", "none", "deepconf:64", "judge:{folder}"])
def test_what_has_no_tokens_to_read_is_an_error(name, options):
    name = name.format(folder=options["rlhflow"])
    with pytest.raises(InputError, match="is no reward model"):
        show_verifier(ModelSettings(verifier=name))
