import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import beamwright
from beamwright.cli import main
from beamwright.io import read_toml_beside


def flags_in(text):
    return set(re.findall(r"--[a-z][a-z-]*", text))


@pytest.mark.parametrize("command", ["solve", "eval", "serve"])
def test_help_shows_what_most_people_want_and_help_all_the_rest(cli, command):
    short, whole = (flags_in(cli(command, word).out) for word in ("--help", "--help-all"))
    assert {"--model", "--n", "--memory", "--help-all"} <= short
    assert not {"--verify-ahead", "--warmup", "--sparse"} & short
    assert short < whole
    assert {"--verify-ahead", "--warmup", "--sparse"} <= whole


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("so", {"solve"}), ("solve --kv-m", {"--kv-memory"}), ("solve --warm", {"--warmup"})],
)
def test_a_shell_completes_commands_and_options(capsys, monkeypatch, typed, offered):
    """As its function asks for it."""
    words = f"beamwright {typed}"
    monkeypatch.setenv("_BEAMWRIGHT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit, match=r"^0$"):
        main([])
    assert set(capsys.readouterr().out.split()) == offered


TABLES = read_toml_beside(__file__)
UNWANTED = TABLES["not_imported"]


@pytest.mark.parametrize("commands", [[*UNWANTED][:-1], ["doctor"]], ids=len)
def test_a_command_imports_what_it_needs(commands, tmp_path):
    """One process for many, those that need least first: what has been imported stays."""
    code = (
        "import sys; from beamwright.cli import main\n"
        "for words in sys.argv[1:]:\n"
        "    main(words.split())\n"
        "    print('imported:', *sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *commands]
    # In an empty folder: where there are results, a report of them would be written.
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("imported:")]
    for words, line in zip(commands, lines, strict=True):
        imported = set(line.split())
        assert "beamwright.cli" in imported
        assert not imported & {*UNWANTED[words]}, words


def test_version(cli):
    assert cli("--version").out == f"beamwright {beamwright.__version__}\n"
    citation = (Path(__file__).parents[2] / "CITATION.cff").read_text()
    assert f"\nversion: {beamwright.__version__}\n" in citation


def test_make_checks_the_python_before_it_installs_anything(tmp_path):
    old = tmp_path / "python"
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 10, 4)\n'
        "sys.version = '3.10.4 (main)'\n$2\"\n"
    )
    old.chmod(0o755)
    root = Path(__file__).parents[2]
    shutil.copy(root / "Makefile", tmp_path)
    shutil.copy(root / "pyproject.toml", tmp_path)
    command = ["make", "demo", f"PYTHON={old}"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "is Python 3.10.4, and Beamwright needs 3.11 or later" in found.stderr
    assert not (tmp_path / ".venv").exists()


def test_what_cannot_run_is_refused_before_torch_is_loaded(tmp_path):
    """And before anything is said of a search that will not be: its line is the only one."""
    bundled = Path(beamwright.__file__).parent / "bundled" / "generator" / "config.json"
    for name, keys in TABLES["models"].items():
        (tmp_path / name).mkdir()
        written = {**json.loads(bundled.read_text()), **keys}
        (tmp_path / name / "config.json").write_text(json.dumps(written))
    script = (
        "import sys, json; from beamwright.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    assert main(words.split()) == 2, words\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    command = [sys.executable, "-c", script, json.dumps([*TABLES["early"]])]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stderr.splitlines()
    for line, (words, complaint) in zip(lines, TABLES["early"].items(), strict=True):
        assert line.startswith("beamwright: error: "), line
        assert complaint in line, words
