"""Declared verifiers and stops: by name in a Solver, checked, and known again by their code."""

import shutil

import pytest

from beamwright.config import Settings
from beamwright.declare import STOPS, VERIFIERS, stop, verifier
from beamwright.errors import InputError
from beamwright.plugins import load_plugin
from beamwright.registry import option, restored
from beamwright.saved.checkpoint import read_checkpoint
from beamwright.saved.resumed import resumed_settings
from beamwright.search import STRATEGIES, strategy
from beamwright.search.best_of_n import BestOfN
from beamwright.sections import ModelSettings, Section
from beamwright.verify.find import known_verifiers, resolve_verifier
from beamwright.verify.scorers import WITHOUT_MODEL
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


class Rounds(Section):
    patience: int = option(2, ge=1, help="Rounds.")

    def __call__(self, tree):
        return f"{self.patience} rounds were enough" if tree.rounds >= self.patience else None


class Plain:
    def score(self, nodes):
        raise ZeroDivisionError

    def __call__(self, tree):
        return "at once"


class Needy(Plain):
    def __init__(self, what):
        pass


def late(tree):
    return "it was late" if tree.rounds >= 2 else None


@pytest.fixture(autouse=True)
def declared():
    with restored():
        verifier("longer", meaning="long steps")(longer)
        verifier("lengths", meaning="short steps")(Lengths)
        stop("late", meaning="after two rounds")(late)
        stop("rounds", meaning="after some rounds")(Rounds)
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
        VERIFIERS._rows.clear()
        object_ = make_solver(**SMALL, verifier=longer)
    assert object_.solve(PROBLEM).tree_hash == found.tree_hash
    assert object_.settings.model.verifier == "none"


def test_a_class_has_options(make_solver):
    scores = {
        half: make_solver(**SMALL, verifier="lengths", half=half).solve(PROBLEM).score
        for half in (1.0, 100.0)
    }
    assert 0 < scores[1.0] < scores[100.0] < 1
    solver = make_solver(**SMALL, verifier=Lengths(half=3))
    assert solver.settings.model.model_extra == {"half": 3}
    assert solver.settings == make_solver(**SMALL, verifier="lengths", half=3).settings
    assert solver.verifier.probabilities
    source = resolve_verifier(solver.settings.model)
    assert (source.model, source.without_model.function) == (None, Lengths(half=3))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("late", "it was late"),
        (late, "it was late"),
        (["late"], "it was late"),
        ([late], "it was late"),
        ("late, rounds", "it was late"),
        ("rounds", "2 rounds"),
        (Rounds, "2 rounds"),
        (Rounds(), "2 rounds"),
        (["rounds", "late"], "2 rounds"),
    ],
)
def test_a_stop_ends_the_search(make_solver, given, why):
    found = make_solver(**SMALL, verifier="longer", stop=given).solve(PROBLEM)
    assert found.rounds == 2
    assert why in found.reason_fewer


def test_names_and_functions_go_together_and_beside_settings(make_solver):
    def early(tree):
        return "it was early"

    solver = make_solver(**SMALL, stop=["late", early])
    assert solver.settings.stop.stop == ("late",)
    assert "it was early" in solver.solve(PROBLEM).reason_fewer
    whole = solver.settings.model_copy(update={"stop": Settings().stop})
    again = type(solver)(whole, stop="rounds")
    assert again.settings.stop.stop == ("rounds",)
    assert again.solve(PROBLEM).rounds == 2
    again = type(solver)(again.settings, stop=["late", early])
    assert again.settings.stop.stop == ("rounds", "late")


def test_options_of_a_stop(make_solver):
    solver = make_solver(**SMALL, stop="rounds,late", patience=1)
    assert solver.solve(PROBLEM).rounds == 1
    assert solver.settings.stop.model_extra == {"patience": 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": "latte"}, r"--stop 'latte': did you mean late\? choose one of late, rounds"),
        ({"stop": "late", "patience": 2}, "--patience is no option of --stop late; it goes with r"),
        ({"patience": 2}, r"--patience is no option of --stop \(not given\); it goes with rounds"),
        ({"stop": "rounds", "patience": 0}, r"stop\.patience \(--patience\): .*greater than or eq"),
        ({"verifier": "lengths", "half": 0}, r"model\.half \(--half\): .*greater than 0"),
        ({"verifier": "longer", "half": 1}, "--half is no option of --verifier longer; it goes w"),
        ({"verifier": "logprob", "half": 1}, "--half is no option of --verifier logprob; it goes"),
        ({"verifier": "longer", "verifier_weights": "int8"}, "--verifier longer has no model"),
        ({"verifier": "longr"}, "no such folder; known: longer, lengths, none, "),
        ({"verifier": "needy"}, "--verifier: Needy raised TypeError: .*'what'"),
        ({"stop": "needy"}, "--stop: Needy raised TypeError: .*'what'"),
    ],
)
def test_mistakes_are_one_line(make_solver, options, words):
    verifier("needy", meaning="x")(Needy)
    stop("needy", meaning="x")(Needy)
    if "needy" not in options.values():
        VERIFIERS._rows.pop("needy"), STOPS._rows.pop("needy")
    with pytest.raises(InputError, match=words) as caught:
        make_solver(**SMALL, **options)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_of_a_section_is_one():
    given = ModelSettings.model_validate({"verifier": "lengths", "halv": 3})
    with pytest.raises(InputError, match=r"unknown option 'model\.halv': did you mean half\?"):
        resolve_verifier(given)


def test_a_stop_where_none_is_declared(make_solver):
    STOPS._rows.clear()
    with pytest.raises(InputError, match="--stop 'late': none is declared; a --plugin declares"):
        make_solver(**SMALL, stop="late")


def test_built_in_names_are_taken():
    known = known_verifiers("").removeprefix("known: ").split(", ")
    names = {*(name.partition(":")[0] for name in known), *WITHOUT_MODEL} - set(VERIFIERS)
    assert {"bundled", "logprob", "family", "judge", "hf"} <= names
    for name in (*names, "random"):
        with pytest.raises(InputError, match=f"--verifier {name} means something else already"):
            verifier(name, meaning="x")(longer)
    with pytest.raises(InputError, match="--search list means something else already"):
        strategy("list", meaning="x")(type("Mine", (BestOfN,), {}))


@pytest.mark.parametrize("declare", [verifier, stop, strategy])
@pytest.mark.parametrize("name", ["family:x", "a/b", "a,b", "-x", "", "two words"])
def test_a_name_is_one_word(declare, name):
    with pytest.raises(InputError, match="a name is of letters, digits"):
        declare(name, meaning="x")


def test_declarations_are_checked():
    with pytest.raises(InputError, match="--verifier x: Rounds has no method score"):
        verifier("x", meaning="x")(Rounds)
    with pytest.raises(InputError, match="--stop x: Lengths has no method __call__"):
        stop("x", meaning="x")(Lengths)
    with pytest.raises(InputError, match=r"--stop late is declared twice: .*\.late and .*\.longer"):
        stop("late", meaning="x")(longer)

    class Wide(Section):
        width: int = option(1, help="x")

        def score(self, nodes):
            return []

    class Half(Rounds):
        half: float = option(1.0, help="x")

    with pytest.raises(InputError, match="--width is a setting of its own"):
        verifier("x", meaning="x")(Wide)
    with pytest.raises(InputError, match="--half is an option of the model settings"):
        stop("x", meaning="x")(Half)


def test_what_a_class_raises_is_an_error_with_its_name(make_solver):
    verifier("plain", meaning="x")(Plain)
    with pytest.raises(InputError, match="verifier Plain: it raised ZeroDivisionError"):
        make_solver(**SMALL, verifier="plain").solve(PROBLEM)
    stop("plain", meaning="x")(Plain)
    assert make_solver(**SMALL, stop="plain").solve(PROBLEM).rounds == 1


# --- checkpoints -----------------------------------------------------------------------------

PLUGIN = """
from beamwright.config import Section
from beamwright.declare import stop, verifier
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


@stop("twice", meaning="after two rounds")
def twice(tree):
    return "two rounds" if tree.rounds >= 2 else None
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


def test_the_code_is_that_which_ran(make_solver, plugin, tmp_path):
    solver = make_solver(**SMALL, plugins=[plugin], verifier="by-length")
    plugin.write_text("1 / 0")  # saved in an editor, while the search goes on
    file, expected = saved(solver, tmp_path)
    plugin.write_text(PLUGIN)
    again = make_solver(**SMALL, plugins=[plugin], verifier="by-length")
    assert again.resume(file).tree_hash == expected.tree_hash


def test_a_search_whose_plugin_is_not_loaded_names_it(make_solver, plugin, tmp_path):
    options = {**SMALL, "plugins": [plugin], "search": "alone"}
    file, _ = saved(make_solver(**options), tmp_path)
    with restored():
        del STRATEGIES._rows["alone"]
        words = "--search alone of the plugin mine.Alone, which is not loaded here"
        with pytest.raises(InputError, match=words):
            resumed_settings(file, Settings())
        with pytest.raises(InputError, match=words):
            make_solver(**SMALL).resume(file)


def test_a_stop_is_no_part_of_the_tree(make_solver, plugin, tmp_path):
    options = {**SMALL, "plugins": [plugin], "verifier": "by-length"}
    file, expected = saved(make_solver(**options), tmp_path)
    short = make_solver(**options, stop="twice").resume(file)
    assert short.rounds == 2 < expected.rounds


def test_the_command_line_takes_name_and_options_from_the_file(make_solver, plugin, tmp_path):
    options = {**SMALL, "plugins": [plugin], "verifier": "in-batches", "scale": 3.0}
    file, _ = saved(make_solver(**options), tmp_path)
    found = resumed_settings(file, Settings())
    assert (found.model.verifier, found.model.model_extra) == ("in-batches", {"scale": 3.0})
    with pytest.raises(InputError, match=r"was saved with --scale 3\.0, not 2\.0"):
        resumed_settings(file, Settings.build(scale=2.0))
    with restored():
        VERIFIERS._rows.clear()
        words = "--verifier in-batches of the plugin mine.[A-Za-z]+, which is not loaded here"
        with pytest.raises(InputError, match=words):
            resumed_settings(file, Settings())
    plugin.write_text(PLUGIN.replace("len(steps", "3 + len(steps"))
    load_plugin(plugin)
    with pytest.raises(InputError, match="was saved with --verifier-code"):
        resumed_settings(file, Settings())
