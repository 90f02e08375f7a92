"""`beamwright verify`: repeats searches from their receipts and compares the trees.

A receipt records the settings, the models and the tree hash of a search. This module reads files
with receipts. Options that do not change the tree, such as memory and schedule, may differ from the
receipt. Models and all other settings are those of the receipt.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from beamwright.cli.options import Invocation, number_or_auto, option, with_settings
from beamwright.cli.output import (
    LONGEST_LINE,
    one_line,
    pause_gc_for_import,
    print_error_line,
    print_json,
    quiet_stdout,
)
from beamwright.config import Settings, option_sections, removed_options, section_fields
from beamwright.errors import InputError
from beamwright.evaluate.run import parse_records
from beamwright.io import read_file, read_json_object
from beamwright.registry import flag_of, option_extra
from beamwright.saved.identity import CODE_KEYS, plugin_fingerprints
from beamwright.tree import find_first_difference, first_differing_round, round_digests
from beamwright.verify.find import check_models

if TYPE_CHECKING:
    from beamwright.saved.receipt import Receipt
    from beamwright.solver.solution import Solution
    from beamwright.solver.solver import Solver
    from beamwright.tree import Problem, SearchTree

# Maximum difference of equal scores, which the tree hash excludes (docs/concepts/sameness.md).
_SCORE_TOLERANCE = 1e-4
# Fields beside a receipt that are compared with the repeated search. `solve --json` also has
# `candidates`.
_SAID = ("problem", "seed", "answer", "text", "score", "stop", "rounds", "tree_hash")
_OF_TREE = ("problem", "seed", "rounds", "tree_hash")
_RECOMPUTED = "KV that was computed again"
_SHOWN = 10  # digits of a tree hash in readable output
# Settings that `verify` takes as options: the place of the models, and settings that change only
# the time or the last bits of scores.
_OPTIONS = (
    *("model", "verifier", "chat_template", "template_args", "device", "attention", "sparse_home"),
    *(
        name
        for section in ("memory", "schedule")
        for name, each in section_fields()[section].items()
        if not option_extra(each, "recipe_only")
    ),
)


@dataclass(frozen=True)
class Claim:
    """An answer with its receipt, as read from a file.

    place: the file and the answer's place in the file, for messages.
    problem: the problem, or the number of tokens of a synthetic prompt.
    said: values in the file about the answer, by the names in `_SAID` and `candidates`.
    tree: the saved tree, if the file is a checkpoint.
    """

    place: str
    receipt: Receipt
    problem: Problem | int
    said: Mapping[str, Any]
    tree: SearchTree | None = None


@with_settings(only=_OPTIONS, recipe=False)
def verify(
    invocation: Invocation,
    run: Path = typer.Argument(
        ...,
        metavar="RUN",
        help="Output of `solve --json`, a folder of `eval --out`, a server's reply, or the "
        "checkpoint of an ended search.",
    ),
    limit: int | None = option(None, "Check only the first N answers of a folder.", "N", min=1),
    problem: str | None = option(None, "Check only the answer to this problem of a folder.", "ID"),
    in_flight: str = option(
        "auto", "Problems in flight (auto: as many as keep the device busy).", "N"
    ),
) -> None:
    """Repeat searches from the receipts of their answers, and compare the trees.

    Memory and schedule may differ from the receipts.

    Exit code: 0 if all trees are equal, 1 if one differs, 2 if no search can be repeated.
    """
    if invocation.given.get("speculation") == "truncate":
        raise InputError("--speculation truncate cannot be verified: the tree depends on time")
    together = number_or_auto("--in-flight", in_flight, least=1)
    out = sys.stdout
    with quiet_stdout():
        with pause_gc_for_import("beamwright.solver.solver"):
            from beamwright.solver.solver import Solver
        claims, skipped = list[Claim](), list[str]()
        for claim in read_claims(run, limit, problem):
            if (why := claim.receipt.unrepeatable) is None:
                claims.append(claim)
            else:
                skipped.append(f"{claim.place}: cannot be repeated ({why})")
        if not claims:
            raise InputError(skipped[0])
        settings = _settings_of(claims, invocation.given)
        check_models(settings.model)
        with Solver(settings) as solver:
            for claim in claims:
                _check_models_are(claim, solver.identities())
            solver.most_submitted = together
            report = _Report(claims, skipped, invocation.given, solver)
            begun = deque((claim, _begin(solver, claim)) for claim in claims)
            while begun:  # `popleft` frees each tree once it has been compared
                claim, solve = begun.popleft()
                line = report.compare(claim, solve())
                if not invocation.as_json:
                    typer.echo(f"{one_line(line):.{LONGEST_LINE}}", file=out)
    if invocation.as_json:
        print_json(report.content())
    else:
        print_error_line(report.summary())
    if report.parted:
        raise typer.Exit(1)


# --- reading receipts ------------------------------------------------------------------------


def read_claims(run: Path, limit: int | None = None, problem: str | None = None) -> Iterator[Claim]:
    """Yield the answers with receipts in a file or folder.

    limit: for a folder, maximum number of answers to read; None for all.
    problem: for a folder, the id of the only problem to read; None for all problems.

    Raises:
        InputError: if there is no receipt, or none of `problem`; the message names the file.
    """
    if run.is_dir() or run.suffix == ".jsonl":
        yield from _claims_in_folder(run, limit, problem)
        return
    if limit is not None or problem is not None:
        raise InputError(f"{run}: --limit and --problem need a folder of `eval --out`")
    content = read_json_object(run, "JSON with a receipt")
    form, searches = str(content.get("format")), content.get("search")
    if form == "beamwright checkpoint":
        yield _claim_of_checkpoint(run, content)
    elif form.startswith("beamwright receipt"):  # a receipt without an answer
        yield _claim(str(run), content, {})
    elif not isinstance(searches, dict | list):
        yield _claim(str(run), content.get("receipt"), content)
    else:
        several = searches if isinstance(searches, list) else [searches]
        for number, each in enumerate(several):
            place = str(run) if len(several) == 1 else f"{run}, search {number}"
            if not isinstance(each, dict):
                raise InputError(f"{place}: not a server's reply")
            yield _claim(place, each.get("receipt"), {**each, **_message(content)})


def _claims_in_folder(run: Path, limit: int | None, problem: str | None) -> Iterator[Claim]:
    file = run / "results.jsonl" if run.is_dir() else run
    if not file.exists():
        raise InputError(f"{file}: no such file. Give a folder of `eval --out`.")
    records, _ = parse_records(file, read_file(file))
    if problem is not None and problem not in records:
        raise InputError(f"{file}: contains no problem {problem!r}")
    names = [name for name, record in records.items() if record.receipt is not None]
    names = names[:limit] if problem is None else [name for name in names if name == problem]
    if not names:
        raise InputError(f"{file}: contains no answer with a receipt")
    for name in names:
        yield _claim(f"{file}, {name}", records[name].receipt, asdict(records[name]))


def _claim_of_checkpoint(file: Path, content: Mapping[str, Any]) -> Claim:
    from beamwright.saved.checkpoint import ENDED, read_checkpoint

    tree, ended = read_checkpoint(file).tree, content.get(ENDED)
    if not isinstance(ended, dict) or "receipt" not in ended:
        raise InputError(f"{file}: the search has not ended. Continue it with solve --resume.")
    found = _claim(str(file), ended["receipt"], {"answer": ended.get("answer")}, tree)
    if round_digests(tree) != [*found.receipt.rounds]:
        raise InputError(f"{file}: the receipt does not match the tree")
    return found


def _claim(
    place: str, receipt: Any, said: Mapping[str, Any], tree: SearchTree | None = None
) -> Claim:
    from beamwright.saved.receipt import problem_from_json, read_receipt

    if receipt is None:
        raise InputError(f"{place}: contains no receipt")
    read = read_receipt(receipt, place)
    several = said.get("candidates")
    stated = {name: said[name] for name in _SAID if name in said}
    # If Beamwright no longer has the receipt's `--choose`, compare the tree but not the answer.
    if f"--choose {read.settings.get('choose')}" in removed_options():
        for name in ("choose", "compare_budget"):
            read.settings.pop(name, None)
        stated, several = {name: stated[name] for name in _OF_TREE if name in stated}, None
    if isinstance(several, list) and all(isinstance(c, dict) and "lineage" in c for c in several):
        stated["candidates"] = several
    return Claim(place, read, problem_from_json(read.problem, place), stated, tree)


def _message(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text of a chat completion, to be compared; {} if there is none.

    For a reply with tool calls the result is {}, since calls are removed from a reply's text.
    """
    match reply:
        case {"choices": [{"message": {"content": str() as text, **rest}}, *_]}:
            return {} if rest.get("tool_calls") else {"text": text}
    return {}


# --- repeating searches ------------------------------------------------------------------------


def _settings_of(claims: Sequence[Claim], given: Mapping[str, Any]) -> Settings:
    """Return the settings of one solver for all claims.

    Raises:
        InputError: if claims differ in a setting of the whole solver, such as the models.
    """
    from beamwright.solver.options import SHARED

    several = [_settings(claim, given) for claim in claims]
    for claim, settings in zip(claims, several, strict=True):
        if any(getattr(settings, name) != getattr(several[0], name) for name in SHARED):
            raise InputError(
                f"{claim.place}: models or --sparse differ from {claims[0].place}; verify it alone"
            )
    return several[0]


def _settings(claim: Claim, given: Mapping[str, Any]) -> Settings:
    from beamwright.saved.checkpoint import DECISIVE_SECTIONS, check_no_objects, check_plugins

    saved, owners = claim.receipt.settings, option_sections()
    check_no_objects(saved, claim.place, ", which cannot be loaded; declare it in a plugin")
    check_plugins(saved, claim.place)
    kept = {name: value for name, value in saved.items() if name not in CODE_KEYS}
    for name, value in kept.items():
        if owners.get(name) not in (*DECISIVE_SECTIONS, "stop"):
            raise InputError(f"{claim.place}: unknown option {name!r:.80} in the receipt")
        # For safety, a receipt must not choose what is downloaded, or which local file is read as a
        # template. The user must name these.
        fetched = name in ("model", "verifier") and "hf:" in str(value)
        if name not in given and (fetched or (name == "chat_template" and "{" not in str(value))):
            flag = f"{flag_of(name)} {value}"
            raise InputError(f"{claim.place}: a receipt may not load files. Add {flag:.200}")
    try:
        settings = Settings.build(**{**kept, **given})
        code = plugin_fingerprints(settings)
    except InputError as error:
        raise InputError(f"{claim.place}: {error}") from error
    if settings.model.runs_elsewhere:  # a receipt may not choose where prompts are sent
        elsewhere = f"--model {settings.model.model} runs on a server"
        raise InputError(f"{claim.place}: {elsewhere}, so the search cannot be repeated")
    for name, named in CODE_KEYS.items():
        if code.get(name) != saved.get(name):
            was = f"the code of --{named} {saved.get(named)} here is not that of the receipt"
            raise InputError(f"{claim.place}: {was}; pass the original file with --plugin")
    return settings


def _check_models_are(claim: Claim, here: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Check that the models of the receipt and of the solver have the same files.

    here: the identities of the solver's models by role.

    Raises:
        InputError: for the first model that differs; the message names its differing files.
    """
    for role, now in here.items():
        was = getattr(claim.receipt, role)
        if was is None or now is None or was.get("sha256") == now["sha256"]:
            continue
        then = was["files"] if isinstance(was.get("files"), dict) else {}
        names = [name for name in then | now["files"] if then.get(name) != now["files"].get(name)]
        by = ", ".join(names) or "its sha256"
        by += f" (the receipt has revision {was['revision']})" if was.get("revision") else ""
        raise InputError(f"{claim.place}: the {role} here differs in {by}; pass the original one")


def _begin(solver: Solver, claim: Claim) -> Callable[[], Solution]:
    """Submit a claim's search, and return a function that waits for the solution."""
    from beamwright.solver.options import SHARED

    problem, owners = claim.problem, option_sections()
    if isinstance(problem, int):
        return lambda: solver.synthetic(problem)
    saved = claim.receipt.settings.items()
    options: Any = {name: value for name, value in saved if owners.get(name, "model") not in SHARED}
    handle = solver.submit(problem, problem_id=claim.receipt.problem_id, **options)
    return handle.result


# --- comparing ---------------------------------------------------------------------------------


@dataclass
class _Report:
    """Compares answers with their repeated searches, and collects the results.

    skipped: one line for each answer that cannot be repeated.
    given: the options that the user set.
    equal: number of equal trees.
    recomputed: True if a search recomputed dropped KV, which may change last bits.
    parted: one entry for each tree that differs.
    differs: properties of machine and versions that differ, as [receipt's value, value here].
    """

    claims: Sequence[Claim]
    skipped: Sequence[str]
    given: Mapping[str, Any]
    solver: Solver
    equal: int = 0
    recomputed: bool = False
    parted: list[dict[str, Any]] = field(default_factory=list)
    differs: dict[str, list[str | None]] = field(default_factory=dict)

    def compare(self, claim: Claim, solution: Solution) -> str:
        """Compare a claim with its repeated search, and return the result as a readable line."""
        was, now = claim.receipt, solution.receipt
        for then, here in ((was.machine, now["machine"]), (was.versions, now["versions"])):
            pairs = {name: [then.get(name), here.get(name)] for name in then | here}
            self.differs |= {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        self.recomputed |= was.recomputed or now["recomputed"]
        found, line = self._difference(claim, solution)
        if found:
            self.parted.append({"problem_id": was.problem_id, **found})
            return f"differs {was.problem_id}: {line}"
        self.equal += 1
        answer = "" if solution.answer is None else f", answer {solution.answer}"
        return f"equal {was.problem_id}: tree {was.tree_hash[:_SHOWN]}{answer}"

    def _difference(self, claim: Claim, solution: Solution) -> tuple[dict[str, Any], str]:
        """Return the first difference as a report entry and as text; ({}, "") if all is equal."""
        was, now = claim.receipt, solution.receipt
        if was.prompt != now["prompt"]:
            return {"what": "prompt"}, "the prompt's tokens differ"
        number = first_differing_round(was.rounds, now["rounds"])
        if number is None:
            if was.tree_hash != solution.tree_hash:
                line = "all steps are equal, but other steps were pruned"
                return {"what": "decisions"}, line
            content = {name: getattr(solution, name) for name in claim.said}
            if "candidates" in content:
                content["candidates"] = [each.to_json() for each in solution.candidates]
            said = [name for name, here in content.items() if not _same(claim.said[name], here)]
            words = (
                f"{name} is {content[name]!r:.60}" if name != "candidates" else "candidates differ"
                for name in said
            )
            line = f"the tree is equal, but its {', '.join(words)}"
            return ({"what": "answer", "said": said}, line) if said else ({}, "")
        parting = None if claim.tree is None else find_first_difference(claim.tree, solution.tree)
        if parting is None:
            line = f"in round {number} of {len(was.rounds)}"
            return {"what": "round", "round": number}, line
        tokens = [self._token(token) for token in (parting.was, parting.now)]
        said_of = {
            "tokens": f"position {parting.position} was {tokens[0]}, is {tokens[1]}",
            "stop": "the stop reason differs",
            "steps": "only one tree has it; the round before selected other steps",
        }
        step = ".".join(map(str, parting.lineage))
        line = (
            f"in round {parting.round} of {len(was.rounds)}, step {step}: {said_of[parting.what]}"
        )
        return asdict(parting), line

    def _token(self, token: int | None) -> str:
        if token is None:
            return "the step's end"
        codec = self.solver.codec
        return f"token {token}" + (f" {codec.decode_raw([token])!r}" if codec else "")

    @property
    def exact(self) -> bool:
        """True if all searches were exact: those of the receipts, and the repeated ones."""
        return self.solver.exact and all(claim.receipt.exact for claim in self.claims)

    @property
    def promise_sentence(self) -> str:
        """Sentence that says if trees must be equal, and why (docs/concepts/sameness.md)."""
        settings = self.solver.settings.model
        loose = settings.device.startswith("cuda") and not settings.deterministic
        also = {_RECOMPUTED: self.recomputed, "a GPU without --deterministic": loose}
        # Trees were equal at all numbers of threads that were tried, but no self-test checks this.
        # Name another number of threads as a cause only if a tree differs.
        differs = [name for name in self.differs if name != "threads" or self.parted]
        others = [*differs, *(name for name, holds in also.items() if holds)]
        is_double = settings.dtype == "float64"
        if not self.exact and not self.recomputed:
            return "equal trees are not required: on one side results depend on the batch"
        if not others or (is_double and {*others} <= {"attention", "processor", _RECOMPUTED}):
            return "equal trees are required: both sides are exact"
        often = "very rarely" if is_double else "sometimes"
        named = ", ".join(others)
        return f"equal trees are not required: {named} may change last bits, and {often} a token"

    def summary(self) -> str:
        """Return all results as one line."""
        changed = "".join(f", {flag_of(name)} {value}" for name, value in self.given.items())
        left = f", {len(self.skipped)} cannot be repeated" if self.skipped else ""
        return f"{self.equal} of {len(self.claims)} equal{changed}{left}; {self.promise_sentence}"

    def content(self) -> dict[str, Any]:
        """Return the content of `--json`."""
        return {
            "checked": len(self.claims),
            "equal": self.equal,
            "parted": self.parted,
            "skipped": self.skipped,
            "changed": self.given,
            "differs": self.differs,
            "exact": self.exact,
            "promised": self.promise_sentence,
        }


def _same(was: Any, now: Any) -> bool:
    """Return True if two JSON values are equal, with `_SCORE_TOLERANCE` for floats.

    All floats in the compared values are scores, whose last digits may differ.
    """
    match was, now:
        case float(), float():
            return abs(was - now) <= _SCORE_TOLERANCE
        case [*first], [*second]:
            return len(first) == len(second) and all(map(_same, first, second))
        case dict(), dict():
            return was.keys() == now.keys() and all(_same(was[k], now[k]) for k in was)
    return bool(was == now)
