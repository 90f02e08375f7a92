"""`view` as a process: it prints where it serves saved runs, and serves them until Ctrl-C."""

import json
import signal
import socket
import subprocess
import sys

import httpx
import pytest

import beamwright
from beamwright.page.runs import write_tree_page


@pytest.fixture
def page(tmp_path, searched):
    write_tree_page(*searched, tmp_path / "page.html", "A search")
    return tmp_path / "page.html"


def test_saved_runs_are_served_until_it_is_interrupted(page):
    words = [sys.executable, "-m", "beamwright", "view", str(page), str(page), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            said = json.loads(process.stdout.readline())
            assert said["runs"] == [
                {"id": name, "problem": "What is 1+1?", "answer": "2"}
                for name in ("page", "page-2")
            ]
            with httpx.Client(base_url=said["address"]) as client:
                assert "main.js" in client.get("/").text
                listed = client.get("/feed/searches").json()
                assert [each["id"] for each in listed["searches"]] == ["page", "page-2"]
                assert not listed["asks"]
                assert client.get("/feed/searches/page-2").text.count("\n") == 4
                assert client.get("/", headers={"host": "evil.example"}).status_code == 400
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
        finally:
            process.kill()  # or what fails above would wait for it
    assert (process.returncode, out, err) == (0, b"", b"")


def test_a_port_in_use_is_named(cli, page):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = cli("view", page, "--port", port, "--no-browser")
    assert outcome.code == 2
    assert f"--port {port}" in outcome.err


@pytest.mark.parametrize("missing", ["uvicorn", "fastapi"])
def test_without_the_extra_it_says_what_to_install(cli, page, monkeypatch, missing):
    for name in list(sys.modules):
        if name.startswith("beamwright.serve"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(beamwright, "serve", raising=False)  # or it would stay the new one
    monkeypatch.setitem(sys.modules, missing, None)
    outcome = cli("view", page, "--no-browser")
    assert outcome.code == 2
    assert f"needs the package {missing}. Run pip install 'beamwright[serve]'" in outcome.err
