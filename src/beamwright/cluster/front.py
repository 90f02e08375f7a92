"""Front: what the process that has searches knows of its replicas' engines, without their weights.

What is wrong with a request is said at once, and needs no replica; but of a generator that runs
elsewhere, which replicas ask, nothing is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from beamwright.cluster.replica import EngineFacts
from beamwright.config import Settings
from beamwright.engine.prompts import Prompts, with_system_prompt
from beamwright.models.config import read_shape, resolve_folder
from beamwright.models.shape import capped, shape_from_text
from beamwright.models.tokenizer import TextCodec
from beamwright.solver.request import ProblemSettings, UserParts
from beamwright.tree import Problem, RawPrompt


class Front:
    """Reads problems and options as a Solver with these settings would.

    Raises:
        InputError: what it would.
    """

    def __init__(self, settings: Settings) -> None:
        default, known = ProblemSettings.of(settings, UserParts()), _known(settings)
        self.codec, self.context = known.codec, known.context
        self.settings = with_system_prompt(default.settings, known.codec)
        self._default = default.settled(self.settings)
        self._prompts = Prompts(known.codec, known.context, known.vocab, self.settings.model)
        if self.context:
            self._prompts.check_turns(default.strategy)

    def prompt_tokens(self, problem: Problem) -> int:
        """Tokens of its prompt; raises what is wrong with it."""
        return len(self._prompts.tree(0, problem).root.token_ids)

    def requested(self, options: dict[str, Any], facts: EngineFacts) -> ProblemSettings:
        """What is asked with these options. facts: of the engines."""
        changed = self._default.changed(options)  # what `auto` stands for is every replica's affair
        if self.context:
            changed.check_served(
                self._prompts,
                probabilities=facts.probabilities,
                kept=facts.token_stats,
                whose="these replicas do not keep; start them with this search",
            )
        return changed


def length(problem: Problem) -> int:
    """About the tokens of its prompt."""
    given: Sequence[Any] | str = str(problem)
    if isinstance(problem, RawPrompt):
        given = problem.given
    return len(given) // 4 if isinstance(given, str) else len(given)


@dataclass(frozen=True)
class _Known:
    """What prompts need of a generator; no context, where nothing is known of it."""

    codec: TextCodec | None
    context: int
    vocab: int


def _known(settings: Settings) -> _Known:
    """Of the generator that replicas load; reads no weights."""
    model, spec = settings.model, settings.model.model
    if model.runs_elsewhere:
        return _Known(None, 0, 0)
    if spec.startswith("random:"):
        shape = capped(shape_from_text(spec.removeprefix("random:")), model.context)
        return _Known(None, shape.context, shape.vocab)
    folder = resolve_folder(spec, "generator")
    shape = read_shape(folder, model.context)
    return _Known(TextCodec.load(folder, model.chat_template), shape.context, shape.vocab)
