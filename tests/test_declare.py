"""Declared verifiers: by name in a Solver, checked, known again; plugins that are installed."""

import shutil
import sys

import pytest

from beamwright.cli import main
from beamwright.config import Settings
from beamwright.declare import VERIFIERS, load_plugin, load_plugins, verifier
from beamwright.errors import InputError
from beamwright.registry import option
from beamwright.saved.checkpoint import read_checkpoint, resumed_settings
from beamwright.search import STRATEGIES, strategy
from beamwright.search.best_of_n import BestOfN
from beamwright.sections import ModelSettings, Section
from beamwright.verify.find import resolve_verifier, verifier_hint
from beamwright.verify.scorers import WITHOUT_MODEL
from declared import restored
from engines import PROBLEM

SMALL = {"n": 4, "width": 2, "max_rounds": 3, "dtype": "float64", "search": "beam"}


def longer(problem, steps):
    return len(steps[-1]) / 100


class Lengths(Section):
    """Scores in batches, as probabilities."""

    half: float = option(10.0, gt=0, help="Characters that halve the score.")

    @property
    def probabilities(self):
        return True

    def score(self, nodes):
        return [1 / (1 + len(node.step_text) / self.half) for node in nodes]


class Plain:
    def score(self, nodes):
        raise ZeroDivisionError


class Needy(Plain):
    def __init__(self, what):
        pass


@pytest.fixture(autouse=True)
def declared():
    with restored():
        verifier("longer", meaning="long steps")(longer)
        verifier("lengths", meaning="short steps")(Lengths)
        yield


def test_a_function_scores_by_its_name(make_solver):
    named = make_solver(**SMALL, verifier="longer")
    found = named.solve(PROBLEM)
    scored = [node for node in found.tree.nodes() if node.step_score is not None]
    assert scored
    assert all(node.step_score == len(node.step_text) / 100 for node in scored)
    given = make_solver(**SMALL, verifier=longer)
    assert given.settings == named.settings, "what is declared becomes a setting by its name"
    assert given.solve(PROBLEM).tree_hash == found.tree_hash
    with restored():
        VERIFIERS.clear()
        object_ = make_solver(**SMALL, verifier=longer)
    assert object_.solve(PROBLEM).tree_hash == found.tree_hash
    assert object_.settings.model.verifier == "none"


def test_a_class_has_options(make_solver):
    solver = make_solver(**SMALL, verifier=Lengths(half=3))
    assert solver.settings.model.model_extra == {"half": 3}
    assert solver.settings == make_solver(**SMALL, verifier="lengths", half=3).settings
    assert solver.verifier.probabilities
    source = resolve_verifier(solver.settings.model)
    assert (source.model, source.without_model.function) == (None, Lengths(half=3))


MISTAKES = {
    ("lengths", "half", 0): "--half: must be above 0, got 0",
    ("longer", "half", 1): "--half is not an option of --verifier longer. It belongs",
    ("logprob", "half", 1): "--half is not an option of --verifier logprob. It belongs",
    ("longer", "verifier_weights", "int8"): "--verifier longer, which has no mo",
    ("longr", "seed", 0): "no such folder; known: longer, lengths, none, ",
    ("needy", "seed", 0): "--verifier: Needy raised TypeError: .*'what'",
}


@pytest.mark.parametrize(("name", "option", "value"), MISTAKES)
def test_mistakes_are_one_line(make_solver, name, option, value):
    if name == "needy":
        verifier("needy", meaning="x")(Needy)
    with pytest.raises(InputError, match=MISTAKES[name, option, value]) as caught:
        make_solver(**{**SMALL, "verifier": name, option: value})
    assert "\n" not in str(caught.value)


def test_an_unknown_option_of_a_section_is_one():
    given = ModelSettings.model_validate({"verifier": "lengths", "halv": 3})
    with pytest.raises(InputError, match=r"unknown option 'model\.halv'. Did you mean half\?"):
        resolve_verifier(given)


class Wide(Plain, Section):
    width: int = option(1, help="x")


class Mine(BestOfN):
    half: float = option(1.0, help="x")


BUILT_IN = {name.partition(":")[0] for name in verifier_hint("").split(": ", 1)[1].split(", ")}


@pytest.mark.parametrize(
    ("declare", "name", "what", "words"),
    [
        *(
            (verifier, name, longer, f"--verifier {name} is a built-in name")
            for name in sorted({*BUILT_IN, *WITHOUT_MODEL, "random", "family", "judge", "hf"})
        ),
        (strategy, "list", Mine, "--search list is a built-in name"),
        *(
            (declare, name, longer, "use only letters, digits")
            for declare in (verifier, strategy)
            for name in ("family:x", "a/b", "a,b", "-x", "", "two words")
        ),
        (verifier, "x", Section, "--verifier x: Section has no method score"),
        (verifier, "lengths", longer, r"--verifier lengths is declared twice: .*Lengths and .*"),
        (verifier, "x", Wide, "--width is a setting; rename it"),
        (strategy, "x", Mine, "--half is an option of the model settings"),
    ],
)
def test_declarations_are_checked(declare, name, what, words):
    with pytest.raises(InputError, match=words):
        declare(name, meaning="x")(what)


# --- checkpoints -----------------------------------------------------------------------------

PLUGIN = """
from beamwright.config import Section
from beamwright.declare import verifier
from beamwright.registry import option
from beamwright.search import SearchPolicy, strategy
from beamwright.search.best_of_n import BestOfN


def measured(steps):
    return len(steps[-1])


@verifier("by-length", meaning="the shorter the better")
def by_length(problem, steps):
    return 1 / (1 + measured(steps))


@verifier("in-batches", meaning="the shorter the better")
class InBatches(Section):
    scale: float = option(1.0, gt=0, help="Characters.")

    def score(self, nodes):
        return [1 / (1 + measured([node.step_text]) / self.scale) for node in nodes]


@strategy("alone", meaning="as best-of-n", competes=False)
class Alone(BestOfN):
    pass
"""


@pytest.fixture
def plugin(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    return file


def saved(solver, folder):
    """A checkpoint of the middle of a search, and how the search went on."""
    file, kept = folder / "search.json", folder / "kept.json"
    expected = solver.solve(
        PROBLEM,
        checkpoint=file,
        on_round=lambda report: report.round == 1 and shutil.copy(file, kept),
    )
    return kept, expected


@pytest.mark.parametrize(
    "options",
    [
        {"verifier": "by-length"},
        {"verifier": "in-batches", "scale": 3.0},
        {"verifier": "logprob", "search": "alone"},
    ],
)
def test_other_code_anywhere_in_the_file_is_refused(make_solver, plugin, tmp_path, options):
    options = {**SMALL, **options}
    file, expected = saved(make_solver(**options, plugins=[plugin]), tmp_path)
    code = "search" if options["search"] == "alone" else "verifier"
    assert "beamwright_plugin_mine." in read_checkpoint(file).settings[f"{code}_code"]
    plugin.write_text("# another comment\n\n" + PLUGIN)
    again = make_solver(**options, plugins=[plugin])
    assert again.resume(file).tree_hash == expected.tree_hash
    plugin.write_text(PLUGIN.replace("len(steps[-1])", "2 * len(steps[-1])"))
    with pytest.raises(InputError, match=f"was saved with --{code}-code"):
        make_solver(**options, plugins=[plugin]).resume(file)


@pytest.mark.parametrize(
    ("options", "table", "name"),
    [
        ({"search": "alone"}, STRATEGIES, "search alone"),
        ({"verifier": "in-batches", "scale": 3.0}, VERIFIERS, "verifier in-batches"),
    ],
)
def test_a_search_whose_plugin_is_not_loaded_names_it(
    make_solver, plugin, tmp_path, options, table, name
):
    file, _ = saved(make_solver(**{**SMALL, **options}, plugins=[plugin]), tmp_path)
    with restored():
        del table[name.split()[1]]
        words = f"--{name} of the plugin mine.[A-Za-z]+, which is not loaded"
        with pytest.raises(InputError, match=words):
            resumed_settings(file, Settings())
        with pytest.raises(InputError, match=words if "search" in options else "was saved with"):
            make_solver(**SMALL).resume(file)


def test_the_command_line_takes_name_and_options_from_the_file(make_solver, plugin, tmp_path):
    options = {**SMALL, "plugins": [plugin], "verifier": "in-batches", "scale": 3.0}
    file, _ = saved(make_solver(**options), tmp_path)
    found = resumed_settings(file, Settings())
    assert (found.model.verifier, found.model.model_extra) == ("in-batches", {"scale": 3.0})
    with pytest.raises(InputError, match=r"was saved with --scale 3\.0, not 2\.0"):
        resumed_settings(file, Settings.build(scale=2.0))
    plugin.write_text(PLUGIN.replace("len(steps", "3 + len(steps"))
    load_plugin(plugin)
    with pytest.raises(InputError, match="was saved with --verifier-code"):
        resumed_settings(file, Settings())


# --- packages that are installed declare without being named -----------------------------------

GOOD = """
from beamwright.declare import verifier


@verifier("packaged", meaning="of a package")
def packaged(problem, steps):
    return 0.5
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put packages of one module each on the path, as an installer leaves them."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            points = f"[beamwright.plugins]\n{name}-plugin = {name}\n"
            (info / "entry_points.txt").write_text(points)
        return tmp_path

    before = set(sys.modules)
    with restored():
        yield put
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_broken_package_is_a_line_and_stops_no_other(install, capsys):
    install(
        a_broken="import nowhere_at_all",
        b_broken="import sys; sys.exit(7)",
        good_two=GOOD,
        z_broken="raise ValueError('a\\nb')",
    )
    assert "packaged" not in VERIFIERS
    assert load_plugins() == [
        "plugin a_broken-plugin (a_broken) failed: ModuleNotFoundError: "
        "No module named 'nowhere_at_all'",
        "plugin b_broken-plugin (b_broken) failed: SystemExit: 7",
        "plugin z_broken-plugin (z_broken) failed: ValueError: a b",
    ]
    assert VERIFIERS["packaged"].source == GOOD, "its whole file is known again"
    assert main(["plan", "--model", "opt-2.7b", "--verifier", "packaged", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 3
    assert "plugin a_broken-plugin (a_broken) failed: ModuleNotFoundError" in captured.err
    assert captured.out.startswith("{")
