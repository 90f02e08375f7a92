"""Pages of documentation as their reader uses them: fences run in order, in one empty folder.

A fence in `python` goes on in the names of those before it on its page; what a `print` writes is
what the comment at its end says, `...` for anything. Commands of a `bash` fence run, and lines
`# -> TEXT` after one are lines of what it prints. A fence with `title="NAME"` is a file of that
name. Where models, a network or a card of one's own are meant, `own_models` has tiny stand-ins
for `models/NAME`, and the rest is parsed. `<!-- not run: REASON -->` before a fence says so of it.
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "recipes" / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("skills/**/*.md")),
]
PAGES = [page for page in PAGES if page.is_file() and page.parent.name != "log"]
SHELL = {"bash", "sh", "console"}
LANGUAGES = {*SHELL, "python", "js", "text", "yaml", "json", "jsonl", "toml", "jinja", ""}
FENCE = re.compile(
    r"(?:^[ ]*<!--[ ]not[ ]run:[ ](?P<why>[^\n]+?)[ ]-->\n\n?)?"
    r"^(?P<indent>[ ]*)```[ ]?(?P<language>[\w-]*)(?P<options>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
TITLE = re.compile(r'title="([\w./-]+\.\w+)"')
OUTPUT = re.compile(r"# ?-> ?(.*)")
TOOLS = {"cat", "cmp", "diff", "echo", "grep", "head", "ls", "mkdir", "mv", "sort", "tail", "wc"}


@dataclass(frozen=True)
class Fence:
    """A fenced block, without its indentation. line: the number of its first one on the page."""

    page: str
    line: int
    language: str
    text: str
    title: str | None = None
    not_run: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def fences(page: Path) -> Iterator[Fence]:
    """All of them, untagged ones too."""
    written = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(written):
        lines = [line.removeprefix(found["indent"]) for line in found["text"].splitlines(True)]
        title = TITLE.search(found["options"])
        yield Fence(
            page.relative_to(ROOT).as_posix(),
            written.count("\n", 0, found.start("text")) + 1,
            found["language"],
            "".join(lines),
            title and title[1],
            found["why"],
        )


def matches(expected: str, output: str) -> bool:
    """Blanks and line ends count alike; `...` is anything."""
    parts = [re.escape(" ".join(part.split())) for part in expected.split("...")]
    wanted = r"\s?.*?\s?".join(parts)
    return re.fullmatch(wanted, " ".join(output.split()), re.DOTALL) is not None


# --- python ----------------------------------------------------------------------------------


def _is_print(node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Name) and function.id == "print"


def promised(text: str) -> dict[int, str]:
    """Line of a print's end -> the comment behind it."""
    lines = text.splitlines()
    ends = [node.end_lineno for node in ast.walk(ast.parse(text)) if _is_print(node)]
    found = {end: re.search(r"\)\s*  # (.*)$", lines[end - 1]) for end in ends}
    return {end: comment[1] for end, comment in found.items() if comment}


def run_python(fence: Fence, names: dict[str, object]) -> list[str]:
    """Run a block in these names. Returns a line for every print that says something else.

    What one print writes several times, in a loop, is compared as a whole.
    """
    tree = ast.parse(fence.text)
    ends = {node.lineno: node.end_lineno for node in ast.walk(tree) if _is_print(node)}
    written: list[tuple[int, str]] = []

    def show(*values: object, sep: str = " ", end: str = "\n", **_: object) -> None:
        line = sys._getframe(1).f_lineno
        written.append((ends.get(line, line), sep.join(map(str, values)) + end))

    names["print"] = show
    exec(compile(tree, fence.where, "exec"), names)
    by_line: dict[int, str] = {}
    for line, text in written:
        by_line[line] = by_line.get(line, "") + text
    return [
        f"{fence.page}:{fence.line + end - 1}: print says {by_line.get(end)!r}, not {comment!r}"
        for end, comment in promised(fence.text).items()
        if not matches(comment, by_line.get(end, "(nothing)"))
    ]


# --- commands --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A line that somebody types, continued lines joined, and the lines that it has to print."""

    line: str
    prints: tuple[str, ...] = ()


def commands(fence: Fence) -> list[Command]:
    """Of a shell fence all of them; of an untagged one those that begin with a word of ours."""
    found: list[tuple[str, list[str]]] = []
    for line in fence.text.replace("\\\n", " ").splitlines():
        words = line.strip().removeprefix("$ ")
        output = OUTPUT.match(words)
        ours = words.split(" ")[0] in {"beamwright", "make"} or words.startswith("python ")
        if output and found:
            found[-1][1].append(output[1])
        elif words and not words.startswith("#") and (fence.language in SHELL or ours):
            found.append((words, []))
    return [Command(line, tuple(prints)) for line, prints in found]


@dataclass(frozen=True)
class Part:
    """One program of a line. pipes: what it prints is read by the next; to: or by a file."""

    words: list[str]
    pipes: bool = False
    to: str | None = None


def parts_of(line: str, variables: dict[str, str] | None = None) -> list[Part]:
    """`A=1 a && b | c > file  # why` are a, b and c; `A=1` alone is none, and kept for later."""
    known = {} if variables is None else variables
    for name, value in known.items():
        line = re.sub(rf"\${name}\b|\${{{name}}}", lambda _, value=value: value, line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    cut = [list(words) for _, words in groupby(lexer, lambda word: set(word) <= set("|&;"))]
    found = []
    for number, words in enumerate(cut):
        if set(words[0]) <= set("|&;"):
            continue
        pipes = number + 1 < len(cut) and cut[number + 1] == ["|"]
        to = words[words.index(">") + 1] if ">" in words else None
        for sign in (">", ">>", "2>", "<"):
            while sign in words:
                at = words.index(sign)
                del words[at : at + 2]
        while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            if not words:
                known[name] = value
        if words:
            found.append(Part(words, pipes, to))
    return found


def run_line(
    parts: list[Part], ours: Callable[[list[str]], int], runs: Callable[[list[str]], bool]
) -> str | None:
    """Run a line, as far as its programs may. Returns everything it printed; None: it did not run.

    ours: the `beamwright` of this source. runs: whether these words, name first, may run here.
    """
    if not all(runs(part.words) for part in parts):
        return None
    heard, told = "", ""
    for part in parts:
        out, err = io.StringIO(), io.StringIO()
        if part.words[0] == "beamwright":
            with redirect_stdout(out), redirect_stderr(err):
                code = ours(part.words[1:])
        else:
            words = [sys.executable, *part.words[1:]] if part.words[0] == "python" else part.words
            done = subprocess.run(words, input=heard, capture_output=True, text=True, check=False)
            code = done.returncode
            out.write(done.stdout)
            err.write(done.stderr)
        assert code == 0, f"{shlex.join(part.words)}: {code}\n{err.getvalue()}"
        heard = out.getvalue() if part.pipes else ""
        if part.to is not None:
            Path(part.to).write_text(out.getvalue())
        told += err.getvalue() + ("" if part.pipes or part.to is not None else out.getvalue())
    return told


def missing(command: Command, printed: str) -> list[str]:
    """The promised lines that are not there, in their order."""
    lines = iter(printed.splitlines())
    return [text for text in command.prints if not any(matches(text, line) for line in lines)]


# --- what is written by hand -----------------------------------------------------------------

COMMENT = re.compile(r"<!-- figures:.*?<!-- end -->|<!--.*?-->", re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
HEADING = re.compile(
    r"^#+ (.*?)(?: \{.*\})?$|\bid=\"([\w-]+)\"|\{[^}\n]*#([\w-]+)[^}\n]*\}", re.MULTILINE
)


def prose(page: Path) -> str:
    """A page without its code, and without what a command writes into it."""
    return COMMENT.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))


def num_words(text: str) -> int:
    """Words that somebody reads: link targets, marks and lines of tables are none."""
    words = LINK.sub("]", text).split()
    return sum(any(letter.isalnum() for letter in word) for word in words)


def anchors(page: Path) -> set[str]:
    """What `#...` may follow a link to it, in the site and on GitHub."""
    found = set()
    for heading, *ids in HEADING.findall(prose(page)):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower()
        found |= {re.sub(r"[-\s]+", "-", words), words.replace(" ", "-"), *ids}
    return found


def broken_links(page: Path, made: set[str]) -> Iterator[str]:
    """Links that lead nowhere. made: pages that a build makes, from the root."""
    for link in LINK.finditer(re.sub(r"`[^`\n]*`", "", prose(page))):
        target = (page.parent / link["target"]).resolve() if link["target"] else page
        if ":" in link["target"] or not target.is_relative_to(ROOT):
            if "://" not in link["target"] and not link["target"].startswith("mailto:"):
                yield f"{page.relative_to(ROOT)}: {link['target']}"
        elif target.relative_to(ROOT).as_posix() in made:
            continue
        elif not target.exists():
            yield f"{page.relative_to(ROOT)}: there is no {link['target']}"
        elif link["anchor"] and target.suffix == ".md" and link["anchor"] not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {link['target']} has no #{link['anchor']}"
