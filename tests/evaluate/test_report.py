"""The page that compares evaluations: self-contained, safe, every run on it; its charts."""

import re
import sys
from html.parser import HTMLParser

import pytest

from beamwright.errors import InputError
from beamwright.evaluate.charts import (
    COLOURS,
    Chart,
    EvaluatedRun,
    Line,
    Point,
    TreeLink,
    draw,
    format_number,
    make_charts,
    method_names,
)
from beamwright.evaluate.report import write_report

HOSTILE = '</title><script>alert(1)</script> & "{{style}}" \u2028 \ud800'


def estimate(value):
    return {"value": value, "interval": [value * 0.9, value * 1.1]}


def summary_of(accuracy=0.5, tokens=1000.0, **changes):
    known = accuracy is not None
    share = {"value": accuracy, "interval": [accuracy - 0.1, accuracy + 0.1]} if known else None
    return {
        "problems": 20,
        "judged": 20,
        "accuracy": accuracy,
        "accuracy_interval": share and share["interval"],
        "top1": dict.fromkeys(("best", "majority", "weighted"), share),
        "pass_at": {"1": share, "2": share},
        "by_level": {"5": {"problems": 20, "accuracy": accuracy, "interval": share["interval"]}}
        if known
        else {},
        "precise_goodput_tok_s": None,
        "latency_s": {"p50": estimate(2.0), "p95": None},
        "per_problem": {
            "tokens": estimate(tokens),
            "seconds": estimate(2.5),
            "kv_device_peak_bytes": estimate(2 * 1024**3),
            "h2d_bytes": None,
        },
        **changes,
    }


def run_of(search="beam", n=4, name=None, summary=None, trees=(), dataset="set", **model):
    settings = {"model": {"model": "bundled", **model}, "search": {"search": search, "n": n}}
    name = f"{search}-n{n}" if name is None else name
    return EvaluatedRun(name, dataset, settings, summary or summary_of(), tuple(trees))


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


@pytest.fixture
def write_page(tmp_path):
    def write(*runs, title="Evaluation"):
        path = tmp_path / "report.html"
        write_report(runs, path, title)
        return Page(path)

    return write


# --- the page --------------------------------------------------------------------------------


def test_nothing_is_loaded_from_anywhere_and_nothing_runs(write_page):
    page = write_page(run_of(), run_of(n=16), trees_run())
    assert not re.search(r"https?:|//cdn|@import|url\(", page.source)
    assert not {"link", "script", "iframe", "object", "embed", "base"} & set(page.tags)
    (policy,) = [a["content"] for _, a in page.elements if "http-equiv" in a]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    images = [attributes["src"] for tag, attributes in page.elements if tag == "img"]
    assert all(image.startswith("data:image/svg+xml;base64,") for image in images)


def trees_run(*links):
    links = links or (TreeLink("How many?", 3, "dvts n4/trees/0003.html", "42", True),)
    return run_of("dvts", trees=links)


def links_of(page):
    return [attributes["href"] for tag, attributes in page.elements if tag == "a"]


def test_links_to_trees_are_relative_addresses(write_page):
    page = write_page(run_of(), trees_run())
    assert links_of(page) == ["dvts%20n4/trees/0003.html"]
    assert "4. How many?" in page.words
    assert "Single trees" not in write_page(run_of()).source


def test_a_tree_stands_in_the_row_of_its_problem_and_the_column_of_its_run(write_page):
    wrong, none = (
        TreeLink("p", 0, "a/0.html", "41", False),
        TreeLink("q", 9, "b/9.html", None, None),
    )
    page = write_page(run_of(name="one", trees=[wrong]), run_of("dvts", name="two", trees=[none]))
    words = page.words[page.words.index("Single trees") :]
    assert [word for word in words if word.strip()] == [
        *("Single trees", "problem", "one", "two"),
        *("1. p", "\u2717 ", "41", "-", "10. q", "-", "no answer"),
    ]


def test_shared_settings_are_listed(write_page):
    page = write_page(run_of(), run_of(n=16, delimiter="\n\n", top_k=None))
    listed = [tag for tag, _ in page.elements if tag in ("dt", "dd")]
    assert len(listed) == 4
    assert "Settings that all of them share" in page.words
    assert {"model", "bundled", "search", "beam"} <= set(page.words)
    assert repr("\n\n") in write_page(run_of(delimiter="\n\n")).words


def test_every_method_has_a_style():
    runs = [run_of(model=f"m{number}") for number in range(len(COLOURS) + 1)]
    (axes,) = draw(make_charts(runs)[0]).axes
    drawn = {(bars[0].get_color(), bars[0].get_linestyle()) for bars in axes.containers}
    assert len(drawn) == len(runs)


def test_hostile_names_are_text(write_page):
    link = TreeLink(HOSTILE, 0, "javascript:alert(1)", HOSTILE, False)
    run = run_of(name=HOSTILE, dataset=HOSTILE, chat_template=HOSTILE, trees=[link])
    page = write_page(run, run_of(n=16, dataset="other"), title=HOSTILE)
    assert "script" not in page.tags
    assert "<script>" in "".join(page.words)
    assert links_of(page) == ["javascript%3Aalert%281%29"]


def test_every_run_has_its_row_and_its_points(write_page):
    page = write_page(run_of(n=4), run_of(n=16), run_of("dvts", 4))
    assert "".join(page.words).count("50.0%") >= 3
    assert page.tags.count("figure") == page.tags.count("img") == 5  # n, tokens, s, KV, pass@k
    assert {"50.0%", "40.0 - 60.0"} <= set(page.words)


def test_figures_that_do_not_apply_are_dashes(write_page):
    bare = summary_of(
        None, pass_at={}, latency_s={"p50": None, "p95": None},
        per_problem=dict.fromkeys(("tokens", "seconds", "kv_device_peak_bytes", "h2d_bytes")),
    )  # fmt: skip
    page = write_page(run_of(summary=bare))
    assert "figure" not in page.tags
    assert "No answer was judged." in page.words
    assert page.words.count("-") == 13


def test_unequal_numbers_of_problems_are_pointed_out(write_page):
    page = write_page(run_of(), run_of(n=16, summary=summary_of(problems=7)))
    assert any("not finished" in words for words in page.words)


def test_a_page_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_report([run_of()], tmp_path / "nowhere" / "r.html", "x", png=True)
    with pytest.raises(ValueError, match="no run"):
        write_report([], tmp_path / "r.html", "x")


# --- methods and charts ----------------------------------------------------------------------


def test_runs_that_differ_in_n_alone_are_one_method():
    assert method_names([run_of(n=4), run_of(n=16), run_of("dvts")]) == ["beam", "beam", "dvts"]


def test_other_differences_are_named():
    runs = [run_of(model="a/small"), run_of(model="a/large"), run_of(model="a/large", top_k=5)]
    assert method_names(runs) == [
        "beam, model small",
        "beam, model large",
        "beam, model large, top-k 5",
    ]
    datasets = [run_of(dataset="x"), run_of(dataset="y")]
    assert method_names(datasets) == ["beam, dataset x", "beam, dataset y"]


def test_the_axes():
    runs = [run_of(n=16, summary=summary_of(tokens=9e4)), run_of(n=4)]
    charts = {chart.name: chart for chart in make_charts(runs)}
    places = {name: [p.x for p in chart.lines[0].points] for name, chart in charts.items()}
    assert places == {
        "n": [4, 16], "tokens": [1000, 9e4], "seconds": [2.5, 2.5], "kv": [2.0, 2.0],
        "pass": [1, 2],
    }  # fmt: skip
    assert "both models" in charts["kv"].x_label, "the figure is a sum"


def test_a_figure_of_nothing_has_no_place_on_a_logarithmic_axis():
    empty = summary_of()
    empty["per_problem"]["tokens"] = {"value": 0.0, "interval": [0.0, 0.0]}
    names = [chart.name for chart in make_charts([run_of(summary=empty)])]
    assert names == ["n", "seconds", "kv", "pass"]


def test_numbers_are_short():
    assert [format_number(x) for x in (0.01234, 5, 1234, 12_345, 2_500_000)] == [
        "0.0123", "5", "1,234", "12.3k", "2.5M",
    ]  # fmt: skip


# --- PNG files -------------------------------------------------------------------------------


def test_a_png_per_chart(tmp_path):
    page = tmp_path / "report.html"
    written = write_report([run_of(), run_of("dvts", 16)], page, "x", png=True)
    names = ["n", "tokens", "seconds", "kv", "pass"]
    assert [file.name for file in written.pngs] == [f"report-{name}.png" for name in names]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in written.pngs)


def test_without_matplotlib_there_are_tables_and_one_line_says_why(write_page, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = write_page(run_of(), run_of(n=16))
    assert "no charts: they need matplotlib (pip install 'beamwright[plot]')" in page.words
    assert "figure" not in page.tags
    assert page.words.count("50.0%") == 14


def test_a_run_says_how_many_of_its_problems_were_judged(tmp_path):
    write_report([run_of(summary=summary_of(judged=17))], tmp_path / "r.html", "t")
    assert "20<br><small>17 judged</small>" in (tmp_path / "r.html").read_text()


def test_bytes_are_said_to_be_of_all_problems_in_flight(tmp_path):
    write_report([run_of()], tmp_path / "r.html", "t")
    (note,) = [each for each in (tmp_path / "r.html").read_text().split(". ") if "KV (" in each]
    assert "loaded" in note
    assert "of all problems in flight together, not divided" in note
    assert "a smaller n may take more" in note


@pytest.mark.parametrize("xs", [(480.0, 520.0), (0.021, 0.024), (3.0, 900.0), (1e-3, 1e5), (7.0,)])
def test_an_axis_has_more_than_one_tick(xs):
    points = tuple(Point(x, 0.5, None, None, "p") for x in xs)
    (axes,) = draw(Chart("tokens", "t", "x", (Line("m", 0, points),), counted=False)).axes
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) > 1


def test_a_run_with_warnings_says_so(tmp_path):
    warned = {"problems": 3, "example": "all <scores> are equal"}
    write_report([run_of(summary=summary_of(warnings=warned))], tmp_path / "r.html", "t")
    text = (tmp_path / "r.html").read_text()
    assert "beam, n = 4: 3 problems with a warning, such as: all &lt;scores&gt; are equal" in text


def test_one_is_no_plural(tmp_path):
    file = tmp_path / "r.html"
    warned = {"problems": 1, "example": "it is odd"}
    write_report([run_of(summary=summary_of(problems=1, warnings=warned))], file, "t")
    text = file.read_text()
    assert "set: 1 problem, 1 setting<" in text
    assert "beam, n = 4: 1 problem with a warning" in text
