"""Verifier formats as data: template, positions to read, head and activation.

A new reward model needs no code: its checkpoint folder contains a `verifier.yaml` with the format,
or the checkpoint is detected as one of the families in `families/` (`family.py`). The format of a
judge is a `judge.yaml` or a family.

```yaml
name: my-prm
template:
  prefix: "{problem}\\n\\n"     # before the steps; leave it out to use the chat template
  step_suffix: " ки\\n"        # after every step
  marker: "ки"                # the part of the suffix that scores are read at
  strip: true                 # the step without its delimiter
read: marker                  # every_token | step_end | marker | before_marker | end
head: {kind: logit_pair, good: "+", bad: "-"}
activation: softmax
combine: last                 # tokens of one step to the step's score
aggregate: min                # steps of a path to the path's score
```

With `family: NAME`, a `verifier.yaml` starts from this family's format and replaces single values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from beamwright.errors import InputError
from beamwright.io import describe_fault, read_yaml
from beamwright.sections import Reduction, SamplingSettings, Section
from beamwright.tree import Sees

JUDGE_FILE = "judge.yaml"
PACKAGED_JUDGE = Path(__file__).parent / JUDGE_FILE
# Markup that is removed from a critique before its score is read.
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_EMPHASIS = re.compile(r"[*`$]+")
STACKS = ("linear", "two_layer", "token_mlp")  # kinds of heads that consist of linear layers
_PLACEHOLDER = re.compile(r"(?<![\\\w{])\{\s*([A-Za-z_]\w*)\s*\}(?!\})")

_S = TypeVar("_S", bound=Section)
Feature = Literal["previous_hidden", "token_embedding", "logprob", "entropy", "gap"]
AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
    "mean": lambda scores: sum(scores) / len(scores),
}


def aggregate(step_scores: Sequence[float | None], how: str) -> float | None:
    """Return the score of a path from the scores of its steps.

    Steps without a score, such as empty steps, are skipped, also by "last". Return None if no step
    has a score.
    """
    scores = [score for score in step_scores if score is not None]
    return AGGREGATES[how](scores) if scores else None


def check_placeholders(name: str, text: str | None, known: tuple[str, ...]) -> None:
    """Check that a template contains only the placeholders `known`.

    `\\boxed{answer}` is plain text: a brace directly after a word begins no placeholder.

    Raises:
        ValueError: for an unknown `{word}`, or if `{problem}` is known and does not occur.
    """
    for word in _PLACEHOLDER.findall(text or ""):
        if word not in known:
            which = " or ".join(f"{{{each}}}" for each in known)
            there = f"; use {which}" if known else "; this text has none"
            raise ValueError(f"{name}: unknown placeholder {{{word}}}{there}")
    if text and "problem" in known and "{problem}" not in text:
        raise ValueError(f"{name}: without {{problem}} the verifier would never see the problem")


class Template(Section):
    """The format of the text that the verifier reads for a path.

    In these fields, a special token is written as text, such as `<|im_end|>`.
    """

    # "text": the prefix, then every step with its suffix. "dialogue": each step is a user turn (the
    # first one begins with the problem and a space), and the assistant answers it with `marker`.
    # "answer": the whole answer is one assistant turn. Both chat layouts need a chat template.
    layout: Literal["text", "dialogue", "answer"] = "text"
    bos: bool = Field(False, description="begin with the tokenizer's BOS token, if it has one")
    prefix: str | None = Field(None, description="None: the checkpoint's chat template")
    system: str | None = Field(None, description="system message of the chat template")
    step_suffix: str = ""
    marker: str | None = None
    strip: bool = Field(False, description="remove newlines before, and blanks after each step")
    split: str | None = Field(None, min_length=1, description="cut steps here; each piece is read")
    joint: bool = Field(True, description="tokens may span a step's end; False: encode parts alone")

    @model_validator(mode="after")
    def _fits_the_layout(self) -> Template:
        if self.layout != "text" and (self.prefix or self.step_suffix or self.split):
            raise ValueError("prefix, step_suffix and split need layout: text")
        if self.prefix is not None and self.system is not None:
            raise ValueError("system needs the chat template; drop it or prefix")
        check_placeholders("prefix", self.prefix, ("problem",))
        for name in ("step_suffix", "marker", "system"):
            check_placeholders(name, getattr(self, name), ())
        if self.layout == "dialogue" and not self.marker:
            raise ValueError("layout: dialogue needs a marker as the assistant's answer")
        if self.split is not None and not self.step_suffix:
            raise ValueError("split needs a step_suffix, which replaces the text that was cut")
        return self


def _is_inside(file: str) -> bool:
    """Return True if the relative path `file` stays inside its folder.

    Symbolic links are not checked: the hub's cache consists of links, and the user controls them.
    """
    path = PureWindowsPath(file)  # parses both kinds of slashes, and drive letters
    return bool(path.parts) and not path.anchor and ".." not in path.parts and "\0" not in file


class Head(Section):
    """The head of a reward model: the last layers, which compute a value per token."""

    # logit_pair: two rows of the LM head, those of the tokens `good` and `bad`.
    # linear: one linear layer with one output, or with two for softmax.
    # two_layer: Linear-ReLU-Linear with two classes.
    # token_mlp: Linear-GELU-...-Linear on `features` of each token and its predecessor.
    # token_logprob: the log-probability of the token itself.
    kind: Literal["logit_pair", "linear", "two_layer", "token_mlp", "token_logprob"]
    # File in the checkpoint folder with the head's layers: a safetensors file with tensors of
    # `layers.0`, `layers.1`, ... (default names), or a `.pt` file with these or one unnamed layer.
    # None: the layers are tensors of the checkpoint itself.
    file: str | None = None
    # Names of the linear layers: the tensors are `NAME.weight` and, optionally, `NAME.bias`.
    layers: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()  # inputs of a token_mlp head
    good: str | int | None = None  # the token that means a right step, as text or id
    bad: str | int | None = None  # the token that means a wrong step, as text or id

    @model_validator(mode="after")
    def _complete(self) -> Head:
        if self.file is not None and not _is_inside(self.file):
            raise ValueError(f"file {self.file!r} is outside the verifier's folder")
        if self.kind == "logit_pair" and (self.good is None or self.bad is None):
            raise ValueError("a logit_pair head needs 'good' and 'bad'")
        if self.kind in STACKS and self.file is None and not self.layers:
            raise ValueError(f"a {self.kind} head needs 'file' or 'layers'")
        if self.kind == "token_mlp" and not self.features:
            raise ValueError("a token_mlp head needs 'features'")
        return self

    @property
    def looks_back(self) -> bool:
        """True if the value of a token depends on the hidden state of the token before it."""
        return self.kind in ("token_mlp", "token_logprob")


class VerifierSpec(Section):
    """The format of a reward model, read from its `verifier.yaml` or its family."""

    name: str
    template: Template = Template()
    # The tokens of a step at which values are read. "end": the last token of the whole text.
    read: Literal["every_token", "step_end", "marker", "before_marker", "end"]
    head: Head
    activation: Literal["sigmoid", "softmax", "exp", "identity"]
    # "ended_paths": only the last step of an ended path gets a score, for a model that judges
    # finished answers.
    scores: Literal["every_step", "ended_paths"] = "every_step"
    # The part of a reply that is scored: thoughts, answer or both. Other steps are left out of the
    # verifier's text.
    sees: Sees = "answer"
    combine: Reduction = "last"  # reduces the values of a step's tokens to the step's score
    aggregate: Reduction = "last"  # reduces the scores of a path's steps to the path's score

    @property
    def reads_logits(self) -> bool:
        """True if the head uses the LM head's logits, so that the LM head must be loaded."""
        from_features = {"logprob", "entropy", "gap"} & set(self.head.features)
        return self.head.kind in ("logit_pair", "token_logprob") or bool(from_features)

    @property
    def gives_probabilities(self) -> bool:
        """True if a score lies between 0 and 1 for any weights of the head."""
        of_a_token = self.head.kind == "token_logprob" and self.activation == "exp"
        return of_a_token or self.activation in ("sigmoid", "softmax")

    @model_validator(mode="after")
    def _parts_fit(self) -> VerifierSpec:
        template, layout = self.template, self.template.layout
        at_marker = self.read in ("marker", "before_marker")
        if layout == "text" and at_marker and (template.marker or "\0") not in template.step_suffix:
            raise ValueError(f"read: {self.read} needs a template.marker inside step_suffix")
        if (layout == "dialogue" and not at_marker) or (layout == "answer" and self.read != "end"):
            raise ValueError(f"layout: {layout} cannot be read at {self.read}")
        if template.split is not None and not at_marker:
            raise ValueError("split needs read: marker or before_marker")
        two_classes = ("logit_pair", "two_layer")
        if self.activation == "softmax" and self.head.kind not in (*two_classes, "linear"):
            raise ValueError("softmax needs a logit_pair, two_layer or linear head")
        if self.activation != "softmax" and self.head.kind in two_classes:
            raise ValueError(f"a {self.head.kind} head needs softmax")
        return self


LIKELIHOOD_SPEC = VerifierSpec(
    name="likelihood",
    read="every_token",
    head=Head(kind="token_logprob"),
    activation="exp",
    combine="min",
    aggregate="min",
)


def read_mapping(file: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    Raises:
        InputError: if the file is not valid YAML, or does not contain a mapping.
    """
    written = read_yaml(file, "verifier")
    if not isinstance(written, dict):
        raise InputError(f"verifier {file}: the file must contain a mapping")
    return written


def validate_spec(kind: type[_S], written: dict[str, Any], where: str) -> _S:
    """Validate the declaration `written`, and return it as an instance of `kind`.

    where: name of the declaration's file, for error messages.

    Raises:
        InputError: for the first value that is not valid.
    """
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "spec"
        raise InputError(f"verifier {where}: {place}: {describe_fault(first)}") from error


# --- judges ----------------------------------------------------------------------------------


class JudgeSpec(Section):
    """The format of a judge: its prompt, and how its score is read.

    A `judge.yaml` in the model's folder replaces fields of the packaged one.
    """

    reads_logits: ClassVar[bool] = True

    name: str = "judge"
    system: str | None = None  # text of the system message
    prompt: str  # text of the user turn, with {problem} before {steps}
    step: str  # text of each step, with {step} and its {number}
    drop: str = ""  # regular expression; its matches are removed from each step
    # "one": all steps are in one user turn. "each_step": each step is a user turn, the first one
    # with the problem, and the judge's critique of an earlier step follows that step's turn.
    turns: Literal["one", "each_step"] = "one"
    opening: str = ""  # beginning of the judge's turn; {number} is the number of the step
    # A critique ends before the first of these texts. {next} is the number after the judged step's,
    # so a judge that goes on to invent a further step is stopped.
    stops: tuple[str, ...] = ()
    pattern: str  # regular expression whose only group matches the score in a critique
    out_of: float = Field(gt=0, allow_inf_nan=False)  # best score on the judge's scale, such as 10
    # Text appended to each critique, also to a truncated one, after which the score is the
    # probability of token `good` against token `bad`. None: `pattern` finds the score.
    suffix: str | None = None
    good: str | int | None = None  # the token that means a right step, as text or id
    bad: str | int | None = None  # the token that means a wrong step, as text or id
    closing: str = ""  # text after the likelier of both tokens in the judge's earlier turns
    samples: int = Field(1, ge=1)  # number of critiques per step; the score is their mean
    # How critiques are sampled. The key of a critique's random stream is `seed`, the lineage of the
    # step and the critique's number.
    sampling: SamplingSettings = SamplingSettings(temperature=0.0)
    seed: int = 0
    max_tokens: int = Field(ge=1)  # maximum number of tokens of a critique
    # "ended_paths": only the last step of an ended path is judged.
    scores: Literal["every_step", "ended_paths"]
    sees: Sees = "answer"  # see `VerifierSpec`
    aggregate: Reduction

    @field_validator("prompt")
    @classmethod
    def _names_both(cls, prompt: str) -> str:
        if re.findall(r"\{(?:problem|steps)\}", prompt) != ["{problem}", "{steps}"]:
            raise ValueError("must contain {problem} and then {steps}, once each")
        check_placeholders("prompt", prompt, ("problem", "steps"))
        return prompt

    @field_validator("step")
    @classmethod
    def _names_the_step(cls, step: str) -> str:
        if step.count("{step}") != 1:
            raise ValueError("must contain {step} once")
        check_placeholders("step", step, ("step", "number"))
        return step

    @field_validator("pattern", "drop")
    @classmethod
    def _is_an_expression(cls, pattern: str, field: ValidationInfo) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from error
        if field.field_name == "pattern" and groups != 1:
            raise ValueError(f"must have one group for the score, not {groups}")
        return pattern

    @model_validator(mode="after")
    def _goes_together(self) -> JudgeSpec:
        check_placeholders("opening", self.opening, ("number",))
        for stop in self.stops:
            check_placeholders("stops", stop, ("next",))
        if "" in self.stops:
            raise ValueError("stops: an empty text would end every critique")
        if self.suffix is not None and (self.good is None or self.bad is None):
            raise ValueError("a suffix needs 'good' and 'bad', the tokens that may follow it")
        if self.turns == "each_step" and self.suffix is None:
            raise ValueError("turns: each_step needs a suffix that ends the judge's turns")
        if self.samples > 1 and not self.sampling.temperature:
            raise ValueError("samples: at temperature 0 all samples are equal; use 1")
        return self

    def read_score(self, critique: str) -> float | None:
        """Return the last score in `critique`, scaled to [0, 1]; None if there is no valid one."""
        plain = _EMPHASIS.sub("", _BOXED.sub(r"\1", critique))
        try:
            number = float(re.findall(self.pattern, plain)[-1])
        except (IndexError, ValueError):
            return None
        return number / self.out_of if 0 <= number <= self.out_of else None


def load_judge(folder: Path) -> JudgeSpec:
    """Return the judge of `folder`: its `judge.yaml`, with missing fields from the packaged one.

    Raises:
        InputError: if the file is not valid.
    """
    file = folder / JUDGE_FILE
    written = read_mapping(PACKAGED_JUDGE) | (read_mapping(file) if file.is_file() else {})
    return validate_spec(JudgeSpec, written, str(file))
