"""Every block of docs/guides/extend.md runs, one after another as its reader would."""

import re
from pathlib import Path

import pytest

from beamwright.search import STRATEGIES
from beamwright.sections import ModelSettings
from beamwright.verify.find import show_verifier
from prm_checkpoints import write_qwen
from restored import restored

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "extend.md"
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


def test_the_reward_model_is_read_as_its_file_says(tmp_path):
    (written,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    write_qwen(tmp_path)
    (tmp_path / "verifier.yaml").write_text(written)
    report = show_verifier(ModelSettings(verifier=str(tmp_path)))
    assert report["format"] == "my-prm"
    assert report["text"].startswith("Problem: Paul")
    assert [step["read"] for step in report["steps"]] == [["<extra_0>"]] * 3
    scores = [step["score"] for step in report["steps"]]
    assert report["score"] == min(scores)
    assert len(set(scores)) == 3
