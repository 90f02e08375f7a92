"""One table of the options that fill `Settings`, shared by every command.

A row gives an option its words; its name, type and default come from the settings themselves.
`None` always means "not given", so that a recipe's value stands unless the user overrides it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table

import beamwright.schedule  # noqa: F401 (what it declares are options)
from beamwright.cli.guard import guard
from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.registry import TableRow, declared_names, declared_rows, declared_under, flag_of
from beamwright.search import STRATEGIES

_PANELS = {
    "model": "Models",
    "sampling": "Sampling",
    "step": "Steps",
    "search": "Search",
    "stop": "Stopping early, with the best so far",
    "memory": "Memory",
    "schedule": "Schedule (never changes the tree)",
    "sparse": "Sparse decoding (changes the tree)",
}
_DECLARED_PANELS = {
    "model": "Models: options of one verifier",
    "search": "Search: options of one strategy",
    "stop": "Stopping early: options of one stop",
    "schedule": "Schedule: options of one",
}

_CHOICE = "CHOICE"
_SPLIT = "SPLIT"
_SELECT = "TOKENS|SHARE"
_TEXTS = "TEXT"  # given once for each
_PARSED = ("SIZE", "SIZE/s", "TOKENS,...", "NAME,...", "DURATION", _SPLIT, _SELECT)
_KINDS: dict[str | None, Any] = {**dict.fromkeys(_PARSED, str), _TEXTS: list[str]}
_ESCAPED = ("delimiter", "stop_strings")

# option: (metavar or None, help)
_WORDS: dict[str, tuple[str | None, str]] = {
    "model": ("MODEL", "Generator: PATH, bundled, bundled:strong, hf:ORG/NAME or random:SHAPE."),
    "verifier": (
        "MODEL",
        "What scores steps: PATH, family:NAME:PATH, judge:PATH, logprob, none, ... "
        "(default: bundled beside --model bundled, else none).",
    ),
    "system_prompt": (
        None,
        r"System message of the chat template (default: to reason step by step and to put the "
        r'answer in \boxed{}; "" for none).',
    ),
    "chat_template": (None, "Jinja chat template, or a file that holds one."),
    "device": (None, "Where the models run: cpu, cuda, cuda:1."),
    "dtype": (
        None,
        "Precision of weights, activations and KV; auto on a CPU is float32, or bfloat16 for a "
        "checkpoint of 100 million parameters and more in it, where the CPU multiplies it exactly.",
    ),
    "attention": (
        None,
        "How decoding attends to shared prefixes; tree and dense run kernels on a GPU.",
    ),
    "context": ("TOKENS", "Cap on the model's context."),
    "weights": (
        None,
        "Keep the generator's weights so; auto is their dtype. int8 is faster on most CPUs, int4 "
        "saves memory only.",
    ),
    "verifier_weights": (None, "The same for the verifier's."),
    "deterministic": (
        None,
        "Compute in tiles of a fixed size: the same tree whatever the groups, on a GPU too.",
    ),
    "temperature": (None, "0 is greedy."),
    "top_p": (None, "Keep the most likely tokens up to this probability."),
    "top_k": (None, "Keep this many of the most likely tokens."),
    "min_p": (None, "Drop tokens less likely than this share of the likeliest."),
    "top_logprobs": (None, "Likeliest tokens to keep beside each one (Python, checkpoints)."),
    "delimiter": (None, r"Text that ends a step; \n and \t are understood."),
    "step_tokens": ("TOKENS", "Steps of this fixed length instead of the delimiter."),
    "max_step_tokens": ("TOKENS", "Longest step."),
    "step_limits": ("TOKENS,...", "Longest first, second, ... step; the last stands for the rest."),
    "max_tokens": ("TOKENS", "Longest path after the prompt; revise: longest reply."),
    "ignore_eos": (None, "Go on after the end-of-text token."),
    "stop_strings": (
        _TEXTS,
        "A path ends, complete, where its reply holds this; its text ends before it. May be given "
        r"several times; \n and \t are understood.",
    ),
    "search": (
        "NAME",
        "Strategy; list explains them all (default: beam; majority where there is no verifier).",
    ),
    "n": (None, "Candidates per round."),
    "width": (None, "Children per survivor; n / width survive a round."),
    "max_rounds": (
        None,
        "Most rounds of a search; lookahead, mcts, deepconf: most steps of a path.",
    ),
    "filter_duplicates": (None, "Keep one of several candidates with the same text."),
    "aggregate": (None, "From step scores to a path's score (default: the verifier's)."),
    "choose": (None, "How the final answer is chosen (default: the strategy's own)."),
    "compat": (None, "beam: another project's rules of selection, replication and padding."),
    "seed": (None, "Seed of every random draw."),
    "deadline": ("DURATION", "Stop this long after the search starts or is resumed: 30s, 2m, 1h."),
    "token_budget": ("TOKENS", "Stop once this many tokens are generated."),
    "stop_votes": (None, "Stop once the vote is settled; with --choose majority or weighted."),
    "stop_score": ("SCORE", "Stop once a finished candidate scores at least this."),
    "stop": ("NAME,...", "Stop where these say so, which a --plugin declares."),
    "memory": ("SIZE", "All that may be used on the device, such as 7GiB."),
    "kv_memory": ("SIZE", "Device KV cache alone; overrides the plan."),
    "host_memory": (
        "SIZE",
        "Most KV kept in host memory (default: half of it; for a GPU at most 16 GiB).",
    ),
    "split": (
        _SPLIT,
        "Who has the KV memory. auto: generator and verifier in turn get what they need, the "
        "other's KV leaving only where it is in the way; roofline: FlashTTS's search over batch "
        "sizes before every round; offload: everything in turn; SHARE: the generator's, fixed.",
    ),
    "schedule": ("NAME", "How beams are arranged on the device."),
    "planner": (None, "Groups by dynamic programming over ranges, or by LBS's Algorithm 1."),
    "inter_beam": (None, "Group beams that share a prefix, and move the prefix once."),
    "balance": (None, "Groups of even size, as few as possible."),
    "prefetch": (None, "Load the next group's KV while a group computes."),
    "reuse": (None, "Keep what is on the device from one step to the next."),
    "evict": (None, "Evicted KV comes back from host memory, or is computed again."),
    "victims": (
        None,
        "Whose KV leaves the device first: what the round does not use, then what it uses last "
        "(tree); least recently used, deepest first (lru, as vLLM); what the round does not use, "
        "then what is cheapest to bring back (cost).",
    ),
    "link_bandwidth": ("SIZE/s", "Throttle the link to this rate (emulated)."),
    "max_batch": ("BEAMS", "Most beams decoded together."),
    "batching": (
        None,
        "Beams join as soon as there is room (continuous), or group by group behind barriers "
        "(grouped, the LBS paper); auto: barriers where the tree outgrows the device and "
        "steps have a fixed length.",
    ),
    "explore": (
        None,
        "Several problems in flight: all decode, are scored and decide together (lockstep, as in "
        "search-and-learn), each goes at its own pace (continuous), or problems are taken in until "
        "the device is busy, and scored together (decoupled).",
    ),
    "min_problems": (
        "N",
        "Others begin only when fewer problems are in flight (default: at once; in lockstep when "
        "all have ended).",
    ),
    "executor": (
        None,
        "Score and decode in turns (plain), or at the same time where several problems are in "
        "flight (overlapped); auto: what is measured to be faster.",
    ),
    "speculation": (
        None,
        "Decode children of complete steps in slots that nobody waits for, before selection has "
        "chosen among those steps (exact: the tree is the same; truncate: it is not, as in "
        "FlashTTS siblings begin with a part of what one of them has); auto: exact where it pays.",
    ),
    "verify_ahead": (
        None,
        "Steps that were decoded ahead are scored, too, while the verifier has nothing else "
        "(slack), or once they are chosen (never).",
    ),
    "write_back": (
        None,
        "Send new KV to the host as soon as it is whole (eager), or shortly before its room is "
        "needed, what is stored already leaving first (lazy: most of what is pruned never goes); "
        "auto: eager where a step needs more than twice the device, or a copy per beam.",
    ),
    "score_cache": (
        "FILE",
        "Keep the verifier's scores in this file, or for as long as the solver lives (memory): "
        "steps that were scored before are not scored again. The same scores.",
    ),
    "graphs": (
        None,
        "Decode steps as CUDA graphs where kernels run (auto, on), or as plain calls (off).",
    ),
    "sparse": (
        None,
        "Which tokens decoding attends to where paths are long: all (off), those with the largest "
        "scores (exact), the same among the best pages (pages), whole pages (quest), without what "
        "was not selected before (tova), by the query of the layer before (ahead, ahead-pages), by "
        "one predicted from earlier tokens (asyncspade, algorithm-1, harmonic, last), or the "
        "newest (window); auto: ahead, corrected, where that would pay. Changes the tree.",
    ),
    "select": (
        _SELECT,
        "Tokens that --sparse selects for each KV head: a number, all, or a share such as 1/8.",
    ),
    "sparse_from": ("TOKENS", "Up to a path of so many tokens --sparse reads all."),
    "sparse_layers": ("LAYERS", "First layers that read all with --sparse."),
    "sparse_lag": ("TOKENS", "How far ahead asyncspade and its like predict."),
    "sparse_window": ("TOKENS", "Queries that they predict from."),
    "sparse_frame": (None, "Queries are predicted behind rotary positions, or before (pre)."),
    "sparse_correct": (
        "COSINE",
        "A head whose query is less like the predicted one selects by its own (FreeKV).",
    ),
    "sparse_home": (
        None,
        "Where all KV is with --sparse: on the device, or on the host, the device having what is "
        "selected (--kv-memory). The same tree.",
    ),
    "sparse_rank": (
        None,
        "Who finds what is selected by a query that is foreseen: the decoding thread (inline) or "
        "one beside it; auto: a thread where KV is on the host. The same tree.",
    ),
    "late": (
        None,
        "Where a thread has not yet found what a layer reads: wait, or read what the token before "
        "did (previous), so that timing chooses tokens.",
    ),
}


def option(flag: str, help_text: str, metavar: str | None = None, **more: Any) -> Any:
    """An option that a command has beside the settings. more: as `typer.Option` takes it."""
    return typer.Option(flag, help=help_text, metavar=metavar, **more)


_RECIPE = option("--recipe", "YAML file of settings.", "FILE")
_PLUGIN = option(
    "--plugin",
    "Python file that declares a strategy, schedule, verifier or stop; it is run.",
    "FILE.py",
)
JSON = option("--json", "Print exactly one JSON object on standard output.")
DEBUG = option("--debug", "Show the traceback of an error.")


@dataclass(frozen=True)
class Invocation:
    """What every command is called with. plugins: the files that were loaded.

    given: the options that the user wrote, by name. as_json: print one JSON object only.
    """

    settings: Settings
    given: dict[str, Any]
    as_json: bool
    plugins: tuple[Path, ...] = ()


def with_settings(
    only: Collection[str] | None = None, recipe: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the settings options (all, or `only` some), --recipe, --json, --debug.

    The command gets an Invocation first, then its own parameters. It runs under `guard`.
    """
    rows: dict[str, inspect.Parameter] = {}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def wrapper(**values: Any) -> None:
            options = {name: values.pop(name) for name in rows}
            path = values.pop("recipe", None)
            plugins = tuple(values.pop("plugin") or ())  # `app` has loaded them
            as_json, debug = values.pop("as_json"), values.pop("debug")
            with guard(debug):
                given = {name: value for name, value in options.items() if value not in (None, [])}
                for name in given.keys() & _ESCAPED:
                    given[name] = _unescape(given[name])
                settings = Settings.build(path, **given)
                if settings.search.search == "list":
                    _print_strategies()
                    return
                command(Invocation(settings, given, as_json, plugins), **values)

        def declare() -> None:
            """Give the command the options that are declared at present."""
            rows.clear()
            rows.update(_settings_parameters(only))
            _, *own = _resolved_parameters(command)
            parameters = [*own, *rows.values(), *_common_parameters(recipe)]
            _check_apart([each.name for each in parameters])
            wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            wrapper.__annotations__ = {each.name: each.annotation for each in parameters}

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.declare_options = declare  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _check_apart(names: Sequence[str]) -> None:
    """Raises InputError if a declared option has the name of one that the command has itself."""
    for name in names:
        if names.count(name) > 1:
            places = ", ".join(row.place for row in declared_rows(name))
            raise InputError(f"{places}: {flag_of(name)} is an option of the command line")


def _resolved_parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    hints = get_type_hints(command, include_extras=True)
    return [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
    ]


def _settings_parameters(only: Collection[str] | None = None) -> dict[str, inspect.Parameter]:
    """Options by name; `only` some, with what is declared under them (`search`: its strategies)."""
    parameters = {}
    for section, info in Settings.model_fields.items():
        fields: dict[str, FieldInfo] = info.annotation.model_fields  # type: ignore[union-attr]
        for name, field in fields.items():
            if only is not None and name not in only:
                continue
            metavar, help_text = _WORDS[name]
            option = typer.Option(
                _flags(name, field),
                help=help_text + _choices(field) + _declared_choices(name) + _shown(field.default),
                metavar=metavar or (_CHOICE if _choices(field) else None),
                rich_help_panel=_PANELS[section],
            )
            kind = _KINDS.get(metavar) or _plain_type(field.annotation)
            parameters[name] = _parameter(name, kind | None, option)
            for own in declared_under(flag_of(name)):
                parameters[own] = _declared_parameter(own, section)
    return parameters


def _declared_parameter(name: str, section: str) -> inspect.Parameter:
    """The option that one or several strategies (or others) declare under this name."""
    rows = declared_rows(name)
    first = rows[0].options[name]
    kind = _plain_type(first.annotation)
    for row in rows:
        if _plain_type(row.options[name].annotation) != kind:
            places = f"{rows[0].place} and {row.place}"
            raise InputError(f"{places} declare {flag_of(name)} with different types")
    option = typer.Option(
        _flags(name, first),
        help=_declared_help(rows, name) + _choices(first),
        metavar=rows[0].metavar(name) or (_CHOICE if _choices(first) else None),
        rich_help_panel=_DECLARED_PANELS[section],
    )
    return _parameter(name, kind | None, option)


def _declared_help(rows: Sequence[TableRow], name: str) -> str:
    """Whose option it is, and what for: `dynamic, particles: Temperature ...`."""
    owners: dict[str, list[str]] = {}
    for row in rows:
        info = row.options[name]
        owners.setdefault(info.description or "", []).append(row.name)
    defaults = {row.name: row.options[name].default for row in rows}
    if len(set(map(repr, defaults.values()))) == 1:
        shown = _shown(next(iter(defaults.values())))
    else:
        shown = _shown(", ".join(f"{owner} {value}" for owner, value in defaults.items()))
    parts = [f"{', '.join(names)}: {text}" for text, names in owners.items()]
    return " ".join(parts) + shown


def _common_parameters(recipe: bool) -> list[inspect.Parameter]:
    return [
        *([_parameter("recipe", Path | None, _RECIPE)] if recipe else []),
        _parameter("plugin", list[Path] | None, _PLUGIN),
        _parameter("as_json", bool, JSON, default=False),
        _parameter("debug", bool, DEBUG, default=False),
    ]


def _parameter(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def _flags(name: str, field: FieldInfo) -> str:
    flag = name.replace("_", "-")
    # Both forms, so that the command line can also switch off what a recipe switched on.
    return f"--{flag}/--no-{flag}" if field.annotation is bool else f"--{flag}"


def _plain_type(annotation: Any) -> Any:
    """`int | None` is int; a Literal stays, for its choices."""
    if get_origin(annotation) in (UnionType, Union):
        (annotation,) = (each for each in get_args(annotation) if each is not type(None))
    if annotation in (bool, int, float, str) or get_origin(annotation) is Literal:
        return annotation
    raise TypeError(f"no command-line form for {annotation!r}")


def _choices(field: FieldInfo) -> str:
    """What can be chosen, for the help: in a column of its own it would leave the help none."""
    kinds = (field.annotation, *get_args(field.annotation))
    names = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    return f" One of {', '.join(names)}." if names else ""


def _declared_choices(name: str) -> str:
    """The same for an option that names a declaration; strategies have a list of their own."""
    names = [] if name == "search" else declared_names(flag_of(name))
    # Built-in verifiers are no declarations.
    return f" {'Or one' if name == 'verifier' else 'One'} of {', '.join(names)}." if names else ""


def _shown(default: Any) -> str:
    """The default as rich markup; the option's own default is None and says nothing."""
    if default is None or default is False or default == ():
        return ""
    text = repr(default) if isinstance(default, str) and "\n" in default else str(default)
    return rf" [dim]\[default: {text}][/dim]"


def _unescape(text: str | list[str]) -> str | list[str]:
    r"""`\n`, `\t` and `\\` as a shell user writes them."""
    if isinstance(text, list):
        return [str(_unescape(each)) for each in text]
    meanings = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: meanings[match[1]], text)


def _print_strategies() -> None:
    """`--search list`: every strategy in a line, with its options."""
    table = Table("--search", "what it does", "options", "answer", box=None, header_style="bold")
    for name, row in STRATEGIES.items():
        shared = ["n", "width"] if row.reads_width else ["n"]
        options = map(flag_of, (*shared, *row.options))
        table.add_row(name, row.meaning, " ".join(options), row.choose)
    Console().print(table)
