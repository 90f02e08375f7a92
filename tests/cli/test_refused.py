"""What a command refuses: one line that names the option or the file, exit code 2, no output."""

import shlex

import pytest

from beamwright.io import read_toml_beside

REFUSED = read_toml_beside(__file__)
ROWS = [(f"{command} {rest}", said) for command, rows in REFUSED.items() for rest, said in rows]


@pytest.mark.parametrize(("words", "message"), ROWS)
def test_one_line_and_exit_2(cli, fake, words, message):
    outcome = cli(*shlex.split(words.replace("{here}", __file__)))
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.complaint
    assert not fake.calls
