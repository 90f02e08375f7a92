"""`--plugin FILE.py`: what it declares has options, help and a place in the lists."""

import pytest

from declared import restored

PLUGIN = """
from beamwright.registry import option
from beamwright.search import strategy
from beamwright.search.best_of_n import BestOfN


@strategy("mine", meaning="as best-of-n", choose="majority", competes=False)
class Mine(BestOfN):
    zeal: float = option(0.5, ge=0, le=1, metavar="SHARE", help="How hard it tries.")
"""


VERIFIERS = """
from beamwright.config import Section
from beamwright.declare import verifier
from beamwright.registry import option


@verifier("even", meaning="all alike")
def even(problem, steps):
    return 0.5


@verifier("brief", meaning="short steps")
class Brief(Section):
    brevity: float = option(2.5, gt=0, metavar="CHARS", help="Characters that halve a score.")

    def score(self, nodes):
        return [1 / (1 + len(node.step_text) / self.brevity) for node in nodes]
"""


@pytest.fixture
def plugin(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    with restored():
        yield file


def test_its_options_are_the_command_lines_and_a_recipes(cli, fake, plugin, tmp_path):
    words = ["--plugin", plugin, "--search", "mine"]
    assert cli("solve", "p", *words, "--zeal", "0.25").code == 0
    assert fake.settings.search.model_extra == {"zeal": 0.25}
    assert "--zeal" in cli("solve", "--help").out
    assert "as best-of-n" in cli("solve", "--search", "list").out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("search: {search: mine, zeal: 0.75}")
    assert cli("solve", "p", f"--plugin={plugin}", "--recipe", recipe).code == 0
    assert fake.settings.search.model_extra == {"zeal": 0.75}


def test_without_it_they_are_unknown(cli, fake, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("plugin: mine.py\nsearch: {search: mine}")
    outcome = cli("solve", "p", "--recipe", recipe)
    assert (outcome.code, "unknown option 'plugin'" in outcome.complaint) == (2, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "the file raised ZeroDivisionError"),
        ("raise BaseException('all of it')", "the file raised BaseException: all of it"),
        ("raise GeneratorExit", "the file raised GeneratorExit"),
        ("import sys; sys.exit(7)", "the file raised SystemExit: 7"),
        (PLUGIN.replace('"mine"', '"beam"'), "--search beam is declared twice"),
        (PLUGIN.replace("zeal", "width"), "--width is a setting; rename it"),
    ],
)
def test_mistakes_are_one_line(cli, plugin, text, words):
    plugin.write_text(text)
    outcome = cli("solve", "p", "--plugin", plugin)
    assert outcome.code == 2
    assert words in outcome.complaint


def test_verifiers_of_a_plugin_run(cli, plugin):
    plugin.write_text(VERIFIERS)
    shown = " ".join(cli("solve", "--plugin", plugin, "--help-all").out.replace("│", "").split())
    assert "Or one of even, brief." in shown
    assert "--brevity" in shown
    small = ["--n", "2", "--width", "1", "--search", "beam", "--max-step-tokens", "8", "--json"]
    found = cli("solve", "6*7?", "--plugin", plugin, *small, "--verifier", "even").json
    assert found["score"] == 0.5
    sizes = ["--plugin", plugin, "--model", "opt-2.7b", "--n", "4", "--json"]
    assert cli("plan", *sizes, "--verifier", "even").code == 0
    for words, complaint in (
        (["--verifier", "evn"], "no such folder; known: even, brief, none, "),
        (["--brevity", "2"], "not an option of --verifier bundled. It belongs to brief"),
    ):
        outcome = cli("solve", "6*7?", "--plugin", plugin, *words)
        assert (outcome.code, complaint in outcome.complaint) == (2, True), outcome.err
