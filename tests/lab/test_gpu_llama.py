"""llama.cpp's own tool as a side of the check's peers: what it is asked, and what is read."""

import os
from types import SimpleNamespace

import pytest

from beamwright_lab.gpu.llama_side import sides
from beamwright_lab.gpu.sides import SMOKE

_TOOL = """#!/bin/sh
case "$*" in *--version*) echo "version: 7.7 (build 1)" >&2; exit 0;; esac
[ -s "$2" ] || exit 1
[ -n "$NO_CARD" ] && echo "warning: no usable GPU found, option ignored" >&2
[ -n "$FAILS" ] && { echo "no room" >&2; exit 1; }
for count in $(echo "$*" | sed 's/.*-npl \\([0-9,]*\\).*/\\1/; s/,/ /g'); do
  echo "noise"
  echo "{\\"pl\\": $count, \\"t_pp\\": 0.25, \\"t_tg\\": 0.75}"
done
"""


@pytest.fixture
def found(tmp_path, monkeypatch):
    tool = tmp_path / "llama-batched-bench"
    tool.write_text(_TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return sides(SimpleNamespace(on_gpu=False, device="cpu", left_s=60.0), SMOKE)[0]


def test_seconds_are_the_better_of_two_runs_with_the_prompt(found):
    assert found.said.startswith("7.7, ")
    assert found.measure(8) == {"s": 1.0, "tokens_per_s": 48.0, "first_s": 1.0}


def test_there_is_no_side_without_the_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sides(SimpleNamespace(on_gpu=False, device="cpu", left_s=60.0), SMOKE) == []
