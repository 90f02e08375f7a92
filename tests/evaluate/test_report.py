"""The page that compares evaluations: self-contained, safe, every run on it; its charts."""

import re
from html.parser import HTMLParser

import pytest

from beamwright.evaluate.metrics import Record, summarise
from beamwright.evaluate.report import (
    EvaluatedRun,
    draw,
    format_number,
    make_charts,
    name_runs,
    write_report,
)

HOSTILE = '</title><script>alert(1)</script> & "{{style}}" \u2028 \ud800'


def record(index, correct, **changes):
    given = {"tokens": {"generated": 1000}, "time": {"total_s": 2.5}, "num_correct": int(correct)}
    given |= {"kv": {"device_peak_bytes": 2 * 1024**3}, "candidates": [{}], **changes}
    return Record(str(index), index, "p", "1", None, correct=correct, **given)


def summary_of(*records, **changes):
    return {**summarise(records or [record(0, True), record(1, False)]), **changes}


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.source = path.read_bytes().decode("ascii")
        self.elements = []
        self.words = []
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def tags(self):
        return [tag for tag, _ in self.elements]

    @property
    def links(self):
        return [attributes["href"] for tag, attributes in self.elements if tag == "a"]


@pytest.fixture
def run_of(tmp_path):
    def make(search="beam", n=4, name=None, summary=None, dataset="set", records=(), **model):
        settings = {"model": {"model": "bundled", **model}, "search": {"search": search, "n": n}}
        name = f"{search}-n{n}" if name is None else name
        folder = tmp_path / f"{search} n{n}"
        for each in records:
            (folder / "trees").mkdir(parents=True, exist_ok=True)
            (folder / "trees" / f"{each.index:04d}.html").touch()
        return EvaluatedRun(name, folder, dataset, settings, records, summary or summary_of())

    return make


@pytest.fixture
def write_page(tmp_path):
    def write(*runs, title="Evaluation"):
        path = tmp_path / "report.html"
        write_report(runs, path, title)
        return Page(path)

    return write


def solved(index, problem, answer, correct):
    return Record(str(index), index, problem, None, None, answer, correct)


# --- the page --------------------------------------------------------------------------------


def test_nothing_is_loaded_from_anywhere_and_nothing_runs(write_page, run_of):
    page = write_page(run_of(), run_of(n=16), run_of("dvts", records=[solved(3, "p", "1", True)]))
    assert not re.search(r"https?:|//cdn|@import|url\(", page.source)
    assert not {"link", "script", "iframe", "object", "embed", "base"} & set(page.tags)
    (policy,) = [a["content"] for _, a in page.elements if "http-equiv" in a]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    images = [attributes["src"] for tag, attributes in page.elements if tag == "img"]
    assert all(image.startswith("data:image/svg+xml;base64,") for image in images)


def test_a_tree_stands_in_the_row_of_its_problem_and_the_column_of_its_run(write_page, run_of):
    one = run_of(name="one", records=[solved(0, "p", "41", False)])
    two = run_of("dvts", name="two", records=[solved(9, "q", None, None)])
    page = write_page(one, two)
    words = [word.strip() for word in page.words[page.words.index("Single trees") :]]
    assert [word for word in words if word] == [
        *("Single trees", "problem", "one", "two"),
        *("1. p", "\u2717", "41", "-", "10. q", "-", "no answer"),
    ]
    assert page.links == ["beam%20n4/trees/0000.html", "dvts%20n4/trees/0009.html"]
    assert "Single trees" not in write_page(run_of(n=2)).source


def test_figures_and_shared_settings_are_listed(write_page, run_of):
    page = write_page(run_of(), run_of(n=16, delimiter="\n\n", top_k=None))
    assert page.tags.count("figure") == page.tags.count("img") == 4  # n, tokens, s, KV
    assert {"50.0%", "9.5% - 90.5%"} <= set(page.words)
    assert [tag for tag, _ in page.elements if tag in ("dt", "dd")] == ["dt", "dd"] * 3
    assert "Settings that all methods share" in page.words
    assert {"model", "bundled", "search", "beam"} <= set(page.words)
    assert repr("\n\n") in write_page(run_of(delimiter="\n\n")).words


def test_hostile_names_are_text(write_page, run_of):
    summary = summary_of(warnings={"problems": 3, "example": HOSTILE})
    record = solved(0, HOSTILE, HOSTILE, False)
    given = {"name": HOSTILE, "dataset": HOSTILE, "chat_template": HOSTILE, "summary": summary}
    page = write_page(run_of(**given, records=[record]), run_of(n=16, dataset="x"), title=HOSTILE)
    assert "script" not in page.tags
    assert "<script>" in "".join(page.words)


def test_figures_that_do_not_apply_are_dashes(write_page, run_of):
    page = write_page(run_of(summary=summary_of(solved(0, "p", None, None))))
    assert "figure" not in page.tags
    assert "No answer was judged." in page.words
    assert page.words.count("-") == 13


def test_what_a_reader_has_to_know_is_said(write_page, run_of):
    warned = summary_of(
        problems=1, judged=0, warnings={"problems": 3, "example": "all <scores> are equal"}
    )
    page = write_page(run_of(n=16, summary=warned), run_of())
    assert "problems with a warning: 3, such as: all &lt;scores&gt; are equal" in page.source
    assert "1<br><small>0 judged</small>" in page.source
    assert "set: 1 to 2 problems, 2 settings; some settings are unfinished" in page.source
    assert "all problems in flight together (64 / n" in page.source


# --- methods and charts ----------------------------------------------------------------------


def test_runs_that_differ_in_n_alone_are_one_method_and_other_differences_are_named(run_of):
    assert name_runs([run_of(n=4), run_of(n=16), run_of("dvts")])[0] == ["beam", "beam", "dvts"]
    runs = [run_of(model="a/small"), run_of(model="a/large"), run_of(model="a/large", top_k=5)]
    names = ["beam, model small", "beam, model large", "beam, model large, top-k 5"]
    assert name_runs(runs)[0] == names
    datasets = [run_of(dataset="x"), run_of(dataset="y")]
    assert name_runs(datasets)[0] == ["beam, dataset x", "beam, dataset y"]


def test_every_method_has_a_style_and_its_place_on_every_axis(run_of):
    methods = [(f"m{number}", run_of()) for number in range(11)]
    charts = {name: figure.axes[0] for name, _, figure in make_charts(methods)}
    assert list(charts) == ["n", "tokens", "seconds", "kv"]
    drawn = {(bars[0].get_color(), bars[0].get_linestyle()) for bars in charts["n"].containers}
    assert len(drawn) == len(methods)
    places = {name: axes.containers[5][0].get_xdata().tolist() for name, axes in charts.items()}
    assert places == {"n": [4], "tokens": [1000], "seconds": [2.5], "kv": [2.0]}
    assert "both models" in charts["kv"].get_xlabel(), "the figure is a sum"


def test_a_figure_of_nothing_has_no_place_on_a_logarithmic_axis(run_of):
    empty = summary_of(record(0, True, tokens={"generated": 0}))
    charts = make_charts([("beam", run_of(summary=empty))])
    assert [name for name, _, _ in charts] == ["n", "seconds", "kv"]


def test_numbers_are_short():
    assert [format_number(x) for x in (0.01234, 5, 1234, 12_345, 2_500_000)] == [
        "0.0123", "5", "1,234", "12.3k", "2.5M",
    ]  # fmt: skip


@pytest.mark.parametrize("xs", [(480.0, 520.0), (0.021, 0.024), (3.0, 900.0), (1e-3, 1e5), (7.0,)])
def test_an_axis_has_more_than_one_tick(xs):
    (axes,) = draw({"m": [(x, 0.5, [0.4, 0.6]) for x in xs]}, "t", "x").axes
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) > 1
