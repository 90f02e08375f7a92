"""What README and docs tell people to type: every example runs as its reader would run it.

`documents.py` says how. What needs a server, a card or a network is parsed, down to options and
their values; what is promised of it cannot be checked, and so is an error. A program of an unknown
kind fails, as does a fence in an unknown language.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import documents
import stand_ins
from beamwright import Settings, Solver
from beamwright.cli import app as cli_app
from beamwright.cli.demo import PROBLEM
from beamwright.search.doubts import doubts_about_problem
from beamwright_lab.site import GENERATED
from declared import restored
from documents import PAGES, ROOT, Fence, commands, fences, parts_of

RUN = {"demo", "doctor", "eval", "plan", "report", "simulate", "solve", "verify"}
ELSEWHERE = re.compile(
    r"(^|[ =])(hf|openai|https?):|cuda|--(ray|replicas|probe)\b|measured|random:|"
    r"\b(FILE|FOLDER|PATH|NAME|DIR|RUN|CODE)\b|\.\.\.|(^| )/"
)
"""Models, machines and files of one's own that no stand-in is written for."""

OTHERS = {
    *("cd", "curl", "docker", "export", "git", "hf", "lm-eval", "lms", "llama-server", "make"),
    *("npx", "nvidia-smi", "ollama", "open-webui", "pip", "pipx", "source", "uv", "uvx", "vllm"),
    *(".", "claude", "for", "done"),
}
MOST_NOT_RUN = 6
SMALLER = {
    "solve": ("--max-tokens", "24"),
    "eval": ("--max-tokens", "24", "--limit", "2"),
}
"""Behind a command with own models, or of many problems, that promises no output."""

ALL = [fence for page in PAGES for fence in fences(page)]
BY_PAGE = {
    page: [fence for fence in ALL if fence.page == page]
    for page in dict.fromkeys(fence.page for fence in ALL)
}


# --- what runs -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kinds(tmp_path_factory):
    """Where a tiny checkpoint of each kind is kept, once it is made."""
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture
def reader(monkeypatch, tmp_path):
    """Sits in a folder with nothing but the recipes."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def give(folder: Path, read: list[Fence], kinds: Path) -> None:
    """Write the models and problems that a page takes for granted, and the files that it shows."""
    text = "\n".join(fence.text for fence in read)
    for name in set(stand_ins.OWN_MODEL.findall(text)):
        stand_ins.write_model(name, folder / "models", kinds)
    for name in set(stand_ins.PROBLEM_FILE.findall(text)):
        stand_ins.write_problems(name, folder)
    for fence in read:
        if fence.title is not None:
            (folder / fence.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / fence.title).write_text(fence.text)


def runs(words):
    if words[0] == "beamwright":
        return words[1] in RUN and not ELSEWHERE.search(" ".join(words[1:]))
    return words[0] in documents.TOOLS or (words[0] == "python" and words[1] == "-c")


def run_ours(words, promises):
    """`beamwright` here; of its own models and many problems less, where no output is promised."""
    many = words[0] == "eval" or any(stand_ins.OWN_MODEL.search(word) for word in words)
    smaller = SMALLER.get(words[0], ()) if many and not promises else ()
    return cli_app.main([*words, *smaller])


def run_shell(fence: Fence, variables: dict[str, str]) -> Iterator[str]:
    for command in commands(fence):
        printed, parts = None, parts_of(command.line, variables)
        if fence.language in documents.SHELL and fence.not_run is None:
            printed = documents.run_line(
                parts, lambda words, has=command.prints: run_ours(words, has), runs
            )
        if printed is None:
            check(parts)
            if command.prints and fence.not_run is None:
                yield f"{fence.where}: {command.line}: promises what is not run"
        else:
            for text in documents.missing(command, printed):
                yield f"{fence.where}: {command.line}: no {text!r} in\n{printed}"


@pytest.mark.parametrize("page", BY_PAGE)
@pytest.mark.filterwarnings("ignore")
def test_examples_of_a_page_do_what_it_says(page, reader, kinds):
    names, variables, wrong = {"__name__": "example"}, {}, []
    give(reader, BY_PAGE[page], kinds)
    with restored():
        for fence in BY_PAGE[page]:
            if fence.title is not None:
                continue
            if fence.language in documents.SHELL | {""}:
                wrong += run_shell(fence, variables)
            elif fence.language == "python" and fence.not_run is None:
                wrong += documents.run_python(fence, names)
            elif fence.language == "python":
                compile(fence.text, fence.where, "exec")
    for value in names.values():
        if isinstance(value, Solver):
            value.close()
    assert not wrong, "\n".join(wrong)


# --- what is parsed --------------------------------------------------------------------------


def check(parts):
    """Every program of a line is one that exists, with its options."""
    for part in parts:
        name = part.words[0].rpartition("/")[2]
        if name in CHECKS:
            CHECKS[name](part.words[1:])
        else:
            assert name in OTHERS | documents.TOOLS, f"{name}: neither known to this test nor ours"


def check_beamwright(words):
    if words[0].startswith("--"):
        assert words[0] in {"--version", "--help"}, words
        return
    group = typer.main.get_command(cli_app.make_app())
    with group.make_context("beamwright", [words[0]], resilient_parsing=True) as parent:
        _, command, _ = group.resolve_command(parent, words)
        command.make_context(words[0], words[1:], parent=parent)


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


CHECKS = {
    "beamwright": check_beamwright,
    "make": check_make,
    "python": check_python,
    "python3": check_python,
}


def test_few_examples_are_not_run():
    left = [f"{fence.where}: {fence.not_run}" for fence in ALL if fence.not_run]
    assert len(left) <= MOST_NOT_RUN, left


def test_every_fence_is_in_a_known_language():
    assert not [fence.where for fence in ALL if fence.language not in documents.LANGUAGES]


def test_every_module_that_is_named_exists():
    """In running text, too, where nothing is parsed as a command."""
    others = ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "lab/beamwright_lab/README.md")
    named = re.compile(r"(?<![:/])\blab/[\w/]+\.(?:py|sh)|(?<=-m )beamwright_lab[\w.]+\w")
    log = ROOT.glob("docs/log/*.md")
    for file in [*PAGES, *log, *(ROOT / name for name in others)]:
        for name in named.findall(file.read_text(encoding="utf-8")):
            path = name if "/" in name else f"lab/{name.replace('.', '/')}.py"
            assert (ROOT / path).is_file(), f"{file.name}: there is no {name}"


# --- what is written by hand -----------------------------------------------------------------

SITE = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "training/README.md")
LOG = sorted(ROOT.glob("docs/log/*.md"))
WRITTEN = [*PAGES, *LOG, *(ROOT / file for file in (*FILES, "lab/beamwright_lab/README.md"))]
MADE = {f"docs/reference/{name}.md" for name in GENERATED}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_short_and_links_lead_somewhere(page):
    """Rows of tables may be longer."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    assert not [number for number, x in lines if len(x) > 120 and not x.startswith("|")]
    assert not [*documents.broken_links(page, MADE)]


def test_the_site_is_read_in_an_afternoon_and_readme_at_once():
    pages = [*SITE, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    assert sum(documents.num_words(documents.prose(page)) for page in pages) <= 18_000
    readme = documents.COMMENT.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(readme.split()) <= 700


# --- problems --------------------------------------------------------------------------------

PLAIN = re.compile(r'"([A-Z][^"{]*How many [a-z][^"{]*\?)"')
CUT = re.compile(r'"\n *"')  # one text of Python over two lines
PROBLEMS = sorted(
    {PROBLEM}
    | {
        problem
        for file in [*PAGES, ROOT / "src" / "beamwright" / "__init__.py"]
        for problem in PLAIN.findall(CUT.sub("", file.read_text(encoding="utf-8")))
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


# --- the test itself -------------------------------------------------------------------------


def fence(language, text):
    return Fence("page.md", 1, language, text)


def test_a_wrong_answer_is_found():
    text = "for x in (1, 2):\n    print(\n        x\n    )  # 1 ...\nprint(3)  # 4\nprint(5)\n"
    (wrong,) = documents.run_python(fence("python", text), {})
    assert wrong == "page.md:5: print says '3\\n', not '4'"
    assert documents.run_python(fence("python", "if 0: print(1)  # 1"), {})


def test_a_wrong_output_is_found(reader):
    said = 'B="a  b"\necho "$B" | cat > "x y"; cat "x y"\n# -> a ...\n# -> c\n'
    (wrong,) = run_shell(fence("bash", said), {})
    assert "no 'c' in\na  b" in wrong
    assert (reader / "x y").read_text() == "a  b\n"
    assert list(run_shell(fence("bash", "beamwright solve --model hf:a/b x\n# -> 1\n"), {}))
    with pytest.raises(AssertionError):
        list(run_shell(fence("bash", "beamwright solve --n 3 --width 4 'x'"), {}))


WRONG = {
    "make no-such-target": "no-such-target",
    "python lab/beamwright_lab/no_such_file.py": "there is no",
    "python -m beamwright_lab.no_such_module": "there is no",
    "beamwright plan --no-such-option": "no-such-option",
    "frobnicate": "neither known",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_commands_are_found(line):
    with pytest.raises(Exception, match=WRONG[line]):
        check(parts_of(line))
