"""What README and docs tell people to type: every command is one that exists, with its options.

Cheap commands run. The others (long, or in need of a network, a GPU or a model of one's own) are
parsed, down to their options and values. A command of an unknown kind fails, as does a fence in an
unknown language. Lines of untagged fences count where they begin with one of the commands.
"""

import re
import shlex
from itertools import dropwhile
from pathlib import Path

import pytest
import typer

from beamwright import Solver
from beamwright.cli import app as cli_app
from beamwright.cli.demo import PROBLEM
from beamwright.config import Settings
from beamwright.search.doubts import doubts_about_problem

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "recipes" / "README.md", *ROOT.glob("docs/**/*.md")])
DOCUMENTS = [file for file in DOCUMENTS if file.is_file() and file.parent.name != "log"]
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHELL, PYTHON = {"bash", "sh", "console"}, {"python"}
NOT_RUN = {"js", "text", "yaml", "json", "jsonl", "toml", "jinja"}
RUN = {"demo", "plan", "simulate", "solve"}
OF_ONES_OWN = {"measured", "--model", "--problem-file", "--recipe", "--resume", "--verifier"}
OWN_FILES = re.compile(r"model=(?!.bundled)|/|\.jsonl?|plugin|\.\.\.")
SETUP = {"git", "cd", "pip", "export", "source", ".", "uv"}
COMMANDS = {"curl", "lm-eval", "open-webui", "beamwright", "make", "python", *SETUP}


def fences():
    for file in DOCUMENTS:
        for match in FENCE.finditer(file.read_text(encoding="utf-8")):
            yield file.relative_to(ROOT), match[2], match[3]


def shell_lines(language, text):
    """Whole commands; of an untagged fence those that begin with a command that people type."""
    for line in text.replace("\\\n", " ").splitlines():
        words = line.strip().removeprefix("$ ")
        named = words.split(" ")[0] in {"beamwright", "make"} or words.startswith("python ")
        if words and not words.startswith("#") and (language in SHELL or (not language and named)):
            yield words


COMMAND_LINES = [
    (f"{file}: {line}"[:90], line)
    for file, language, text in fences()
    for line in shell_lines(language, text)
]
PYTHON_BLOCKS = [(str(file), text) for file, language, text in fences() if language in PYTHON]


def parts_of(line):
    """The commands of a line, as words: `a && b | c > file` are a, b and c."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words, found = list(lexer), [[]]
    for number, word in enumerate(words):
        if set(word) <= set("|&;"):
            found.append([])
        elif set(word) <= set("<>") or (number and set(words[number - 1]) <= set("<>")):
            continue
        else:
            found[-1].append(word)
    return [words for words in found if words]


def check_beamwright(words):
    """Parse the options of a command, and run it if it is cheap."""
    if words[:1] and words[0].startswith("--"):
        assert words[0] in {"--version", "--help"}, words
        return
    group = typer.main.get_command(cli_app.make_app())
    with group.make_context("beamwright", [words[0]], resilient_parsing=True) as parent:
        _, command, _ = group.resolve_command(parent, words)
        command.make_context(words[0], words[1:], parent=parent)
    named = OF_ONES_OWN & set(words) if words[0] == "solve" else {"measured"} & set(words)
    if words[0] in RUN and not named and not any("/" in word for word in words):
        assert cli_app.main(words) == 0


def check_make(words):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = [word for word in words if "=" not in word]
    assert wanted, "make without a target"
    assert set(wanted) <= targets


def check_python(words):
    if words[:1] == ["-m"] and words[1].startswith("beamwright_lab."):
        words = [f"lab/{words[1].replace('.', '/')}.py"]
    if words[:1] == ["-m"]:
        assert words[1] in {"pytest", "venv", "pip", "build", "beamwright"}
        words = [word for word in words[2:] if words[1] == "pytest" and "/" in word]
    for word in words[:1]:
        assert (ROOT / word.split("::")[0]).exists(), f"there is no {word}"


PLAIN = re.compile(r'"([A-Z][^"{]*How many [a-z][^"{]*\?)"')
PROBLEMS = sorted(
    {PROBLEM}
    | {
        problem
        for file in [*DOCUMENTS, ROOT / "src" / "beamwright" / "__init__.py"]
        for problem in PLAIN.findall(file.read_text(encoding="utf-8"))
    }
)
GAINED, LOST = {"gets", "buys", "finds", "wins"}, {"sells", "gives away", "loses", "drops"}


def exact_answer(problem):
    """What a problem of one person, whose events gain or lose a number of things, comes to."""
    sentences = problem.rstrip("?").split(". ")
    value = int(re.search(r"\d+", sentences[0])[0])
    for sentence in sentences[1:-1]:
        verb, number = re.search(r"n [A-Z]\w+ \w+ ([a-z ]+) (\d+) ", sentence).groups()
        assert verb in GAINED | LOST, verb
        value += int(number) if verb in GAINED else -int(number)
    return str(value)


CHECKS = {"beamwright": check_beamwright, "make": check_make, "python": check_python}


@pytest.mark.parametrize("line", [line for _, line in COMMAND_LINES], ids=lambda line: line[:60])
@pytest.mark.usefixtures("capsys")
def test_a_command_is_one_that_exists(line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for part in parts_of(line):
        words = [*dropwhile(re.compile(r"[A-Z_0-9]+=.*").fullmatch, part)]
        name = words[0].rpartition("/")[2]
        assert name in COMMANDS, f"{name}: neither known to this test nor ours"
        if name in CHECKS:
            CHECKS[name](words[1:])


@pytest.mark.parametrize(("file", "text"), PYTHON_BLOCKS)
@pytest.mark.usefixtures("capsys")
def test_python_runs_or_at_least_compiles(file, text, monkeypatch, tmp_path):
    """README's first lines run; blocks of docs may go on from one another, and are compiled."""
    code = compile(text, file, "exec")
    if file == "README.md" and not OWN_FILES.search(text):
        monkeypatch.chdir(tmp_path)
        exec(code, {})


def test_every_problem_that_people_read_is_of_the_bundled_kind():
    assert len(PROBLEMS) >= 5
    assert {"60", "79", "113"} <= {exact_answer(problem) for problem in PROBLEMS}
    for problem in PROBLEMS:
        assert doubts_about_problem(problem, Settings.build()) == [], problem
        assert int(exact_answer(problem)) >= 0


def test_every_problem_that_people_read_is_solved():
    """By the search that README shows; in float64, where another CPU's rounding flips no token."""
    with Solver(n=16, width=4, dtype="float64") as solver:
        found = solver.solve_many(PROBLEMS)
    answers = {each.problem: each.answer for each in found}
    assert answers == {problem: exact_answer(problem) for problem in PROBLEMS}
    assert not any(each.warnings for each in found)


PLANNED = re.findall(r"^# .*?: (.*)\nbeamwright (plan .*)$", (ROOT / "README.md").read_text(), re.M)


@pytest.mark.parametrize(("said", "words"), PLANNED)
def test_plan_prints_what_readme_says(said, words, capsys):
    assert cli_app.main(shlex.split(words)) == 0
    assert capsys.readouterr().out.startswith(said)
    assert len(PLANNED) == 3


def test_every_benchmark_that_is_named_exists():
    """In running text, too, where nothing is parsed as a command."""
    others = ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "lab/beamwright_lab/README.md")
    named = re.compile(r"(?<![:/])\blab/[\w/]+\.(?:py|sh)|(?<=-m )beamwright_lab[\w.]+\w")
    log = ROOT.glob("docs/log/*.md")
    for file in [*DOCUMENTS, *log, *(ROOT / name for name in others)]:
        for name in named.findall(file.read_text(encoding="utf-8")):
            path = name if "/" in name else f"lab/{name.replace('.', '/')}.py"
            assert (ROOT / path).is_file(), f"{file.name}: there is no {name}"


def test_every_fence_is_in_a_known_language():
    known = {*SHELL, *PYTHON, *NOT_RUN, ""}
    assert not [(str(file), language) for file, language, _ in fences() if language not in known]


def test_the_test_sees_commands_and_finds_wrong_ones():
    assert len(COMMAND_LINES) >= 3
    assert PYTHON_BLOCKS
    assert parts_of("A=1 make x && beamwright plan 'a b' > f  # why") == [
        ["A=1", "make", "x"],
        ["beamwright", "plan", "a b"],
    ]
    with pytest.raises(AssertionError):
        check_make(["no-such-target"])
    with pytest.raises(AssertionError):
        check_python(["lab/beamwright_lab/no_such_file.py"])
    with pytest.raises(AssertionError):
        check_python(["-m", "beamwright_lab.no_such_module"])
    with pytest.raises(Exception, match="no-such-option"):
        check_beamwright(["plan", "--no-such-option"])
