"""Every block of docs/extending.md runs, one after another as its reader would."""

import re
from pathlib import Path

import pytest

from beamwright.registry import restored
from beamwright.search import STRATEGIES

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.filterwarnings("default")
def test_every_block_runs(capsys):
    assert len(BLOCKS) >= 5
    scope = {"__name__": "extending"}
    with restored():
        for block in BLOCKS:
            exec(compile(block, str(PAGE), "exec"), scope)
        assert "epsilon-beam" in STRATEGIES
    assert "epsilon-beam" not in STRATEGIES
    assert capsys.readouterr().out
