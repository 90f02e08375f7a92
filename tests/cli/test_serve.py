"""The command: what it refuses before it loads anything, and a server that is told to end."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")
import httpx

import beamwright
from beamwright.cli.serve import _called, share_of_a_key
from beamwright.io import read_toml_beside
from beamwright.sections import ModelSettings


def run(*words):
    command = [sys.executable, "-m", "beamwright", "serve", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("model", "there", "name"), read_toml_beside(__file__)["called"])
def test_what_a_model_is_called(model, there, name):
    remote = SimpleNamespace(name=there) if there else None
    assert _called(ModelSettings(model=model), SimpleNamespace(remote=remote)) == name


def test_keys_have_to_be_there(tmp_path):
    empty = tmp_path / "keys"
    empty.write_text("# none\n\n")
    for file, said in ((empty, "contains no key"), (tmp_path / "no", "No such file")):
        done = run("--api-keys", file)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_search_is_served_until_it_is_told_to_end(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# mine\nsesame\n")
    words = ["--port", "0", "--api-keys", str(keys), "--n", "4", "--width", "2", "--json"]
    own = ("--log-json", "--seed", "5", "--no-receipts", "--system-prompt", "between us")
    command = [sys.executable, "-m", "beamwright", "serve", *words, *own]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(beamwright.__file__).parents[2],
    ) as server:  # fmt: skip
        facts = json.loads(server.stdout.readline())
        assert facts["models"][:2] == ["bundled", "bundled:plain"]
        headers = {"authorization": "Bearer sesame"}
        with httpx.Client(base_url=facts["url"], headers=headers, timeout=60) as http:
            body = {"model": "bundled", "messages": [{"role": "user", "content": "6 * 7?"}]}
            found = http.post("/v1/chat/completions", json=body).json()
            again = run("--port", httpx.URL(facts["url"]).port)
        server.send_signal(signal.SIGTERM)
        said, logged = server.communicate(timeout=60)
    assert server.returncode == 0
    assert said == ""
    assert found["search"]["seed"] == 5
    assert "receipt" not in found["search"]
    assert "between us" not in json.dumps(found)
    assert found["choices"][0]["message"]["content"]
    lines = [json.loads(line) for line in logged.splitlines()]
    (line,) = [each for each in lines if each.get("path") == "/v1/chat/completions"]
    assert (line["status"], line["method"]) == (200, "POST")
    assert "sesame" not in logged
    assert (again.returncode, "in use" in again.stderr) == (2, True)


def test_one_of_several_keys_gets_half_of_the_places():
    assert (
        share_of_a_key(64, []) == share_of_a_key(64, ["a"]) == share_of_a_key(64, ["a", "a"]) == 64
    )
    assert share_of_a_key(64, ["a", "b"]) == 32
    assert share_of_a_key(1, ["a", "b"]) == 1
