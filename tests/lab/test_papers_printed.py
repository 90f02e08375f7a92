"""All figures of the papers by one command (`beamwright_lab.papers`)."""

import json

import pytest

from beamwright_lab import papers, publish


def test_every_figure_of_a_paper_has_a_command():
    names = papers.sources(list(publish.PAPERS))
    assert {"lbs_figures", "flashtts_figures", "decoupled_cache", "sparse_paper"} <= set(names)
    for name in names:
        assert publish.read(name)["command"].startswith("python -m beamwright_lab."), name


@pytest.mark.parametrize(
    ("now", "same"),
    [
        ("1.43x of 1,024", True),
        ("1.45x of 1,024", True),
        ("1.50x of 1,024", False),
        ("1.43x", False),
    ],
)
def test_a_figure_is_another_by_more_than_two_in_a_hundred(now, same):
    before, after = {"a: b": ("1.43x of 1,024", "partly")}, {"a: b": (now, "partly")}
    assert (not list(papers.changed(before, after))) == same
    after["a: b"] = "1.43x of 1,024", "reproduced"
    assert list(papers.changed(before, after)), "the verdict is another"


def test_what_this_commit_has_printed_is_not_run_again(monkeypatch, tmp_path):
    ran, of = [], {"x": {"command": "python -m beamwright_lab.x --n 'a b'"}}
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    monkeypatch.setattr(papers, "commit", lambda: "1")
    monkeypatch.setattr(publish, "read", of.__getitem__)
    monkeypatch.setattr(papers.subprocess, "run", lambda words, **_: ran.append(words[1:]))
    papers.printed("x")
    assert ran == [["-m", "beamwright_lab.x", "--n", "a b"]]
    for commit, runs in (("0", 2), ("1", 2)):
        (tmp_path / "x.json").write_text(json.dumps({**of["x"], "commit": commit}))
        papers.printed("x")
        assert len(ran) == runs
