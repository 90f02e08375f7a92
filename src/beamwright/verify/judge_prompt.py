r"""What a judge is asked and how its answer is read, as data: `judge.yaml`.

A `judge.yaml` in the model's folder starts from the packaged one and changes what it names:

```yaml
system: "You are a strict teacher."   # null: no system turn
prompt: "Problem: {problem}\n\nSolution:\n{steps}\nHow good is it? End with `Grade: N of 5`."
step: "{step}\n\n"
pattern: 'Grade: ([0-9.]+) of 5'      # one group, the number
out_of: 5
max_tokens: 256
```
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from beamwright.errors import InputError
from beamwright.models import TextCodec
from beamwright.models.tokenizer import PLACE
from beamwright.sections import Section
from beamwright.tree import Node
from beamwright.verify.spec import check_placeholders, read_spec_file
from beamwright.verify.write import Bounds

JUDGE_FILE = "judge.yaml"
_PACKAGED = Path(__file__).parent / JUDGE_FILE
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_EMPHASIS = re.compile(r"[*`$]+")


class JudgeSpec(Section):
    """One way to ask a judge. See the module's docstring.

    scores: "ended_paths" leaves every step but a path's last one unjudged.
    """

    system: str | None = None
    prompt: str
    step: str
    pattern: str
    out_of: float = Field(gt=0, allow_inf_nan=False)
    max_tokens: int = Field(ge=1)
    scores: Literal["every_step", "ended_paths"]
    aggregate: Literal["last", "min", "prod", "mean"]

    @field_validator("prompt")
    @classmethod
    def _names_both(cls, prompt: str) -> str:
        if re.findall(r"\{(?:problem|steps)\}", prompt) != ["{problem}", "{steps}"]:
            raise ValueError("it holds {problem} and then {steps}, once each")
        check_placeholders("prompt", prompt, ("problem", "steps"))
        return prompt

    @field_validator("step")
    @classmethod
    def _names_the_step(cls, step: str) -> str:
        if step.count("{step}") != 1:
            raise ValueError("it holds {step} once")
        check_placeholders("step", step, ("step", "number"))
        return step

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from error
        if groups != 1:
            raise ValueError(f"it has {groups} groups, and the score is one")
        return pattern

    def read_score(self, critique: str) -> float | None:
        """The last score in a text, in [0, 1]; None where there is none, or it is out of range."""
        plain = _EMPHASIS.sub("", _BOXED.sub(r"\1", critique))
        found = re.findall(self.pattern, plain)
        try:
            number = float(found[-1])
        except (IndexError, ValueError):
            return None
        return number / self.out_of if 0 <= number <= self.out_of else None


def load_judge(folder: Path) -> JudgeSpec:
    """The folder's `judge.yaml` over the packaged one.

    Raises:
        InputError: if it is not valid.
    """
    file = folder / JUDGE_FILE
    written: dict[str, Any] = read_spec_file(_PACKAGED)
    if file.is_file():
        written |= read_spec_file(file)
    try:
        return JudgeSpec.model_validate(written)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"verifier {file}: {place}: {first['msg']}") from error


@dataclass(frozen=True)
class PathPrompt:
    """A path's whole prompt. num_kept: tokens up to and with the last step."""

    token_ids: list[int]
    num_kept: int


class JudgePrompts:
    """Writes and encodes prompts. Steps that are empty leave no trace.

    end_ids: tokens that end the judge's turn.

    Raises:
        InputError: if the checkpoint has no chat template, or it cannot write such a prompt.
    """

    def __init__(self, spec: JudgeSpec, codec: TextCodec, name: str) -> None:
        self._spec, self._codec, self._name = spec, codec, f"--verifier {name}"
        if codec.tokenizer.chat_template is None:
            raise InputError(f"{self._name}: a judge needs a chat template; its tokenizer has none")
        self._frame("")
        self.end_ids = codec.eos_ids | self._end_of_turn()

    def encode_prefix(self, problem: str) -> list[int]:
        """Token ids of the text before the first step."""
        return self._codec.encode(self._frame(problem)[0])

    def encode(self, problem: str, nodes: Sequence[Node]) -> list[PathPrompt | None]:
        """Prompts about the paths that end in these nodes; None for one that is not judged."""
        head, tail = self._frame(problem)
        asked = [node for node in nodes if self._is_judged(node)]
        written = [head + self._steps(node) for node in asked]
        found: dict[Node, PathPrompt] = {}
        if asked:
            coded = self._codec.encode_with_offsets([text + tail for text in written])
            for node, text, ids, spans in zip(asked, written, *coded, strict=True):
                # At least one token is left to forward: its state writes the first of the answer.
                found[node] = PathPrompt(ids, min(_num_before(spans, len(text)), len(ids) - 1))
        return [found.get(node) for node in nodes]

    def _is_judged(self, node: Node) -> bool:
        if self._spec.scores == "ended_paths":
            return node.ended and any(_own(each) for each in node.reply())
        return bool(_own(node))

    def _steps(self, node: Node) -> str:
        before, _, after = self._spec.step.partition("{step}")
        texts = [text for each in node.reply() if (text := _own(each))]
        return "".join(
            before.replace("{number}", str(number)) + text + after.replace("{number}", str(number))
            for number, text in enumerate(texts, start=1)
        )

    def _frame(self, problem: str) -> tuple[str, str]:
        """The text before the first step, and behind the last one."""
        before, _, rest = self._spec.prompt.partition("{problem}")
        between, _, after = rest.partition("{steps}")
        turns = [{"role": "user", "content": f"{before}{problem}{between}{PLACE}{after}"}]
        head, place, tail = self._render(turns, add_generation_prompt=True).rpartition(PLACE)
        if not place:
            raise InputError(f"{self._name}: its chat template leaves the user's turn out")
        return head, tail

    def _end_of_turn(self) -> frozenset[int]:
        """The special token behind the assistant's turns, if there is one."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACE}]
        _, place, behind = self._render(turns, add_generation_prompt=False).rpartition(PLACE)
        added = self._codec.tokenizer.added_tokens_decoder
        first = self._codec.encode(behind.lstrip())[:1] if place else []
        return frozenset(token for token in first if token in added and added[token].special)

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        if self._spec.system is not None:
            turns = [{"role": "system", "content": self._spec.system}, *turns]
        return self._codec.chat(turns, self._name, add_generation_prompt=add_generation_prompt)


def _num_before(spans: Sequence[Bounds], end: int) -> int:
    """Tokens before the first that reaches beyond this character."""
    return sum(1 for _ in takewhile(lambda span: span[1] <= end, spans))


def _own(node: Node) -> str:
    """A step's text without what only delimits it."""
    return node.step_text.lstrip("\n").rstrip()
