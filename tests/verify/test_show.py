"""What `doctor --verifier PATH --show` says of every family."""

import pytest

from beamwright.errors import InputError
from beamwright.sections import ModelSettings
from beamwright.verify.find import show_verifier
from prm_goldens import write_golden


@pytest.mark.parametrize(
    ("family", "read"),
    [
        ("qwen2.5-math-prm", ["<extra_0>"] * 3),
        ("skywork-o1", ["\n"] * 3),
        ("rlhflow", ["\n\n"] * 3),  # where + is predicted
        ("outcome", [None, None, "<|eot_id|>"]),
    ],
)
def test_where_each_format_is_read(family, read, tmp_path):
    steps = show_verifier(ModelSettings(verifier=write_golden(family, tmp_path)))["steps"]
    assert [step["read"][0].strip(" ") if step["read"] else None for step in steps] == read


@pytest.mark.parametrize("name", ["logprob", "none", "deepconf:64", "judge:{folder}"])
def test_what_has_no_tokens_to_read_is_an_error(name, generator_folder):
    name = name.format(folder=generator_folder)
    with pytest.raises(InputError, match="is no reward model"):
        show_verifier(ModelSettings(verifier=name))
