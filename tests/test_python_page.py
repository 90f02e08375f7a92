"""The examples in docs/guides/python.md, as one session."""

import re
from pathlib import Path

from test_docs import exact_answer

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "python.md"


def test_the_examples_run(capsys):
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M):
        exec(compile(block, PAGE.name, "exec"), names)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == names["solution"].answer == exact_answer(names["solution"].problem)
    assert "['Solution', 'InputError']" in out
    assert out[-1] == f"{names['quick'].result().answer} {names['votes'].result().answer}"
    assert names["quick"].result().answer == exact_answer(names["problem"])
    names["solver"].close()
    assert len(names["solution"].candidates) == 8
