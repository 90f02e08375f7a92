"""The search that `beamwright simulate` replays: made up from options, or recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamwright.cli.options import Invocation
from beamwright.errors import InputError
from beamwright.protocols import Foresees
from beamwright.search import strategy_entry
from beamwright.sections import StepSettings
from beamwright_lab.simulator.recorded import RecordedTree, read_recorded
from beamwright_lab.simulator.replay import path_ends

_DEFAULT_STEP_TOKENS = 32
_MADE_UP = ("n", "width", "search", "seed")


@dataclass(frozen=True)
class Case:
    """A tree to replay.

    facts: its parameters, for the report. longest: tokens of its longest path. foresees: predicts
    which nodes the strategy may extend, for speculation; None if unknown.
    """

    tree: RecordedTree
    facts: Mapping[str, Any]
    longest: int
    step: StepSettings
    foresees: Foresees | None = None


def find_case(invocation: Invocation, own: Mapping[str, Any], recorded: Path | None) -> Case:
    """Return the search that a command line describes.

    own: the options of `simulate` that are no settings. recorded: the file of a recorded search.

    Raises:
        InputError: if options conflict, or the file holds no recorded search.
    """
    if recorded is None:
        return _made_up(invocation, own)
    return _recorded(invocation, own, recorded)


def _made_up(invocation: Invocation, own: Mapping[str, Any]) -> Case:
    settings, search = invocation.settings, invocation.settings.search
    row = strategy_entry(search)
    if not row.by_level or row.step_limits is not None:
        raise InputError(
            f"--search {row.name}: a made-up tree needs a search whose rounds are the levels of "
            "the tree; use --recorded-tree or another --search"
        )
    prompt, generate = own["prompt"] or 128, own["generate"] or 1920
    step_tokens = settings.step.step_tokens or min(_DEFAULT_STEP_TOKENS, generate)
    sigma = own["step_spread"] or 0.0
    facts = {
        "n": search.n,
        "width": search.width,
        "prompt": prompt,
        "generate": generate,
        "step_tokens": step_tokens,
        "step_spread": sigma,
        "search": row.name,
        "survival": own["survival"] or "random",
        "seed": search.seed,
        "options": dict(search.model_extra or {}),
        "tree": None,
    }
    tree, foresees = _grow(facts)
    step = _step_settings(tree, step_tokens if sigma == 0 else None, generate)
    return Case(tree, facts, prompt + generate, step, foresees)


def _grow(facts: Mapping[str, Any]) -> tuple[RecordedTree, Foresees | None]:
    """Grow a made-up search. facts: its settings, by their names in `beamwright simulate`.

    Raises:
        InputError: if they conflict.
    """
    from beamwright_lab.simulator.synthetic import SyntheticSearch, foresight, grow

    search = SyntheticSearch(
        num_beams=facts["n"],
        width=facts["width"],
        prompt_tokens=facts["prompt"],
        generate_tokens=facts["generate"],
        step_tokens=facts["step_tokens"],
        step_sigma=facts["step_spread"],
        search=facts["search"],
        survival=facts["survival"],
        seed=facts["seed"],
        options=facts["options"],
    )
    return grow(search), foresight(search)


def _recorded(invocation: Invocation, own: Mapping[str, Any], file: Path) -> Case:
    given = [name for name in _MADE_UP if name in invocation.given]
    given += [name for name, value in own.items() if value is not None]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise InputError(f"{option}: only for made-up searches, not with --recorded-tree")
    tree = read_recorded(file)
    if not tree.nodes:
        raise InputError(f"{file}: the recorded search has no steps")
    longest = max(path_ends(tree).values())
    rounds = [node.round for node in tree.nodes]
    step_tokens = invocation.settings.step.step_tokens
    facts = {
        "n": max(rounds.count(number) for number in set(rounds)),
        "width": None,
        "prompt": tree.prompt_tokens,
        "generate": longest - tree.prompt_tokens,
        "step_tokens": step_tokens,
        "step_spread": None,
        "search": None,
        "survival": None,
        "seed": None,
        "options": None,
        "tree": str(file),
    }
    return Case(tree, facts, longest, _step_settings(tree, step_tokens, None))


def _step_settings(
    tree: RecordedTree, step_tokens: int | None, max_tokens: int | None
) -> StepSettings:
    """Return the step settings that a schedule sees: lengths, and the longest step of the tree."""
    most = max(node.tokens for node in tree.nodes)
    if step_tokens is not None and most > step_tokens:
        raise InputError(f"--step-tokens {step_tokens}: the tree has a step of {most} tokens")
    return StepSettings(step_tokens=step_tokens, max_step_tokens=most, max_tokens=max_tokens)
