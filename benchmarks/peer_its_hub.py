"""its_hub's own beam search over the bundled models, through its public base classes.

its_hub's `beam_width` is the number of survivors (our n / width); it begins with n / beam_width
paths, and finished paths compete with the others and are copied. Its texts come from the same
`transformers` loops, and its scores from the same re-encoding PRM, as those of the other peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from its_hub.api import AbstractLanguageModel, AbstractProcessRewardModel
from its_hub.core.algorithms.beam_search import BeamSearch
from its_hub.core.lms.step_generation import StepGeneration

from peer_prm import ReencodingPrm
from peer_transformers import TransformersStepper

END = "<|ended|>"  # how a finished path is told to its_hub; taken off again before scoring


class StepModel(AbstractLanguageModel):
    """Writes the next step of many chats."""

    def __init__(self, stepper: TransformersStepper) -> None:
        self._stepper = stepper
        self.num_tokens = 0

    async def agenerate(
        self, messages: Any, stop: str | None = None, **kwargs: Any
    ) -> dict[str, str] | list[dict[str, str]]:
        steps = self._stepper.step([self._text(chat) for chat in messages])
        self.num_tokens += sum(step.num_tokens for step in steps)
        ends = ("" if step.stop == "delimiter" else END for step in steps)
        return [
            {"role": "assistant", "content": step.text + end}
            for step, end in zip(steps, ends, strict=True)
        ]

    def _text(self, chat: Sequence[Any]) -> str:
        prompt: str = self._stepper.tokenizer.apply_chat_template(
            [{"role": "user", "content": chat[0].content}],
            add_generation_prompt=True,
            tokenize=False,
        )
        return prompt + "".join(message.content for message in chat[1:])


class StepScorer(AbstractProcessRewardModel):
    """Scores whole texts by encoding them again."""

    def __init__(self, prm: ReencodingPrm) -> None:
        self._prm = prm

    def score(self, prompt_or_messages: Any, steps: list[str]) -> list[float]:
        return self._prm.score(problem_of(prompt_or_messages), steps)

    async def ascore(self, prompt_or_messages: Any, steps: list[str]) -> list[float]:
        return self.score(prompt_or_messages, steps)


def problem_of(prompt: str) -> str:
    """The problem's text in what its_hub hands to a reward model."""
    return prompt.removeprefix("user: ")


def make_search(prm: AbstractProcessRewardModel, survivors: int, max_steps: int) -> BeamSearch:
    """its_hub's beam search with steps that end in a blank line."""
    generation = StepGeneration(
        max_steps=max_steps, step_token="\n\n", stop_token=END, include_stop_str_in_output=True
    )
    return BeamSearch(generation, prm, beam_width=survivors)
