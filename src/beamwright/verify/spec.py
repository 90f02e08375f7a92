"""Verifiers as data: template, where to read, head, activation, and whose checkpoints they are.

Adding a reward model needs no code: a checkpoint folder says what it is in `verifier.yaml`, or it
is recognised as one of the families, a file each in `families/`. What a judge is asked is a
`judge.yaml`.

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

`family: NAME` in that file starts from that family and changes what it names. Knows config.json,
names of tensors and of tokens; no weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PureWindowsPath
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from beamwright.errors import InputError
from beamwright.io import read_object, read_yaml
from beamwright.sections import Section

SPEC_FILE, JUDGE_FILE = "verifier.yaml", "judge.yaml"
_PACKAGED_JUDGE = Path(__file__).parent / JUDGE_FILE
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_EMPHASIS = re.compile(r"[*`$]+")
STACKS = ("linear", "two_layer", "token_mlp")
_FAMILIES = Path(__file__).parent / "families"
_TOKEN_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
_PLACEHOLDER = re.compile(r"(?<![\\\w{])\{\s*([A-Za-z_]\w*)\s*\}(?!\})")

_S = TypeVar("_S", bound=Section)
Feature = Literal["previous_hidden", "token_embedding", "logprob", "entropy", "gap"]
Reduction = Literal["last", "min", "prod", "mean"]
AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
    "mean": lambda scores: sum(scores) / len(scores),
}


def aggregate(step_scores: Sequence[float | None], how: str) -> float | None:
    """One score for a path. Steps without a score (empty ones) are left out; None if all are.

    So "last" never scores an empty step.
    """
    scores = [score for score in step_scores if score is not None]
    return AGGREGATES[how](scores) if scores else None


def check_placeholders(name: str, text: str | None, known: tuple[str, ...]) -> None:
    """Raises ValueError if a template holds `{word}` that nothing is put in place of.

    `\\boxed{answer}` is text: a brace behind a word opens no placeholder.
    """
    for word in _PLACEHOLDER.findall(text or ""):
        if word not in known:
            which = " or ".join(f"{{{each}}}" for each in known)
            there = f"; {which} is one" if known else "; there are none here"
            raise ValueError(f"{name}: {{{word}}} is no placeholder{there}")
    if text and "problem" in known and "{problem}" not in text:
        raise ValueError(f"{name}: without {{problem}} the verifier would never see the problem")


class Template(Section):
    """How a path becomes the verifier's text. Special tokens stand as their text.

    layout: "text" writes prefix, then every step and its suffix. "dialogue" makes each step a
    user's turn (the first after the problem and a blank) that the assistant answers with `marker`;
    "answer" makes the whole answer one turn of the assistant. Both need a chat template.
    """

    layout: Literal["text", "dialogue", "answer"] = "text"
    bos: bool = Field(False, description="the tokenizer's bos, where it has one, goes first")
    prefix: str | None = Field(None, description="None: the checkpoint's chat template")
    system: str | None = Field(None, description="system message of the chat template")
    step_suffix: str = ""
    marker: str | None = None
    strip: bool = Field(False, description="steps without newlines before, and blanks behind")
    split: str | None = Field(None, min_length=1, description="cut steps here; each piece is read")
    joint: bool = Field(True, description="tokens may span a step's end; False: encoded apart")

    @model_validator(mode="after")
    def _fits_the_layout(self) -> Template:
        if self.layout != "text" and (self.prefix or self.step_suffix or self.split):
            raise ValueError("prefix, step_suffix and split go with layout: text only")
        if self.prefix is not None and self.system is not None:
            raise ValueError("a system message goes with the chat template, not with a prefix")
        check_placeholders("prefix", self.prefix, ("problem",))
        for name in ("step_suffix", "marker", "system"):
            check_placeholders(name, getattr(self, name), ())
        if self.layout == "dialogue" and not self.marker:
            raise ValueError("layout: dialogue needs a marker, the assistant's answer")
        if self.split is not None and not self.step_suffix:
            raise ValueError("split needs a step_suffix, which stands for what was cut")
        return self


def _is_inside(file: str) -> bool:
    """Links are followed: the hub's cache is made of them, and they are the user's own."""
    path = PureWindowsPath(file)  # both kinds of slashes, and drives
    return bool(path.parts) and not path.anchor and ".." not in path.parts and "\0" not in file


class Head(Section):
    """What turns hidden states into values.

    logit_pair: two rows of the LM head (tokens `good` and `bad`). linear: one row, or two for
    softmax. two_layer: Linear-ReLU-Linear to two classes. token_mlp: Linear-GELU-...-Linear over
    features of each token and its predecessor. token_logprob: the token's own log-probability.
    layers: names of the linear layers, `NAME.weight` and, where there is one, `NAME.bias`.
    file: safetensors inside the folder that hold them (by default as `layers.0`, `layers.1`, ...),
    or a `.pt` of them or of one bare layer; without it they are in the checkpoint itself.
    """

    kind: Literal["logit_pair", "linear", "two_layer", "token_mlp", "token_logprob"]
    file: str | None = None
    layers: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()
    good: str | int | None = None
    bad: str | int | None = None

    @model_validator(mode="after")
    def _complete(self) -> Head:
        if self.file is not None and not _is_inside(self.file):
            raise ValueError(f"file {self.file!r} lies outside the verifier's folder")
        if self.kind == "logit_pair" and (self.good is None or self.bad is None):
            raise ValueError("a logit_pair head needs 'good' and 'bad'")
        if self.kind in STACKS and self.file is None and not self.layers:
            raise ValueError(f"a {self.kind} head needs 'file' or 'layers'")
        if self.kind == "token_mlp" and not self.features:
            raise ValueError("a token_mlp head needs 'features'")
        return self

    @property
    def looks_back(self) -> bool:
        """True if a token's value needs the hidden state before it."""
        return self.kind in ("token_mlp", "token_logprob")

    @property
    def reads_logits(self) -> bool:
        """True if it needs the LM head."""
        from_features = {"logprob", "entropy", "gap"} & set(self.features)
        return self.kind in ("logit_pair", "token_logprob") or bool(from_features)


class VerifierSpec(Section):
    """One verifier format. See the module's docstring.

    read: "end" is the last token of the whole text. scores: "ended_paths" leaves every step but
    a path's last one without a score (a model that judges finished answers).
    """

    name: str
    template: Template = Template()
    read: Literal["every_token", "step_end", "marker", "before_marker", "end"]
    head: Head
    activation: Literal["sigmoid", "softmax", "exp", "identity"]
    scores: Literal["every_step", "ended_paths"] = "every_step"
    combine: Reduction = "last"
    aggregate: Reduction = "last"

    @property
    def gives_probabilities(self) -> bool:
        """True if a score lies between 0 and 1 whatever the head's weights are."""
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
            raise ValueError("softmax goes with logit_pair, two_layer and linear heads only")
        if self.activation != "softmax" and self.head.kind in two_classes:
            raise ValueError(f"a {self.head.kind} head goes with softmax only")
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
    """The mapping in a YAML file.

    Raises:
        InputError: if it is not YAML, or not a mapping.
    """
    written = read_yaml(file, "verifier")
    if not isinstance(written, dict):
        raise InputError(f"verifier {file}: spec: a mapping is expected")
    return written


def validated(kind: type[_S], written: dict[str, Any], where: str) -> _S:
    """A declaration of that kind; an error is one line about its first mistake."""
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "spec"
        raise InputError(f"verifier {where}: {place}: {first['msg']}") from error


# --- families --------------------------------------------------------------------------------


class Detect(Section):
    """What tells a family's checkpoints; all that is given must hold.

    tensors: names in the weight files. architectures: patterns for config.json's. token: is in the
    tokenizer's files. name: regular expression for the folder's or the hub's name.
    """

    tensors: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    token: str | None = None
    name: str | None = None

    def matches(self, folder: Path) -> bool:
        """True if the checkpoint in this folder looks so."""
        config: dict[str, Any] = {}
        with suppress(InputError):  # what is wrong with it is said when the model is loaded
            config = read_object(folder / "config.json")
        if self.name is not None:
            # The hub's cache, whose folders are named by commit: models--ORG--NAME/snapshots/...
            hub = folder.parent.parent.name
            names = [folder.name, hub if hub.startswith("models--") else ""]
            text = " ".join([*names, str(config.get("_name_or_path", ""))])
            if not re.search(self.name, text, re.IGNORECASE):
                return False
        if self.architectures:
            named = map(str, config.get("architectures") or ())
            if not any(fnmatchcase(n, wanted) for n in named for wanted in self.architectures):
                return False
        if self.token is not None:
            files = [file for name in _TOKEN_FILES if (file := folder / name).is_file()]
            texts = (file.read_text("utf-8", errors="replace") for file in files)
            if not any(json.dumps(self.token) in text for text in texts):
                return False
        if not self.tensors:
            return True
        from beamwright.models.weights import tensor_names  # noqa: PLC0415 (slow import)

        return set(self.tensors) <= tensor_names(folder)


class VerifierFamily(Section):
    """A row. written: its spec as a mapping, for `family: NAME` in a user's file."""

    spec: VerifierSpec
    about: str
    detect: Detect | None
    written: dict[str, Any]


def families(folder: Path = _FAMILIES) -> dict[str, VerifierFamily]:
    """All rows by name.

    Raises:
        InputError: if a row is not valid.
    """
    rows: dict[str, VerifierFamily] = {}
    for file in sorted(folder.glob("*.yaml")):
        written = read_mapping(file)
        about, detect = str(written.pop("about", "")), written.pop("detect", None)
        spec = validated(VerifierSpec, written, str(file))
        looks = None if detect is None else validated(Detect, detect, f"{file}: detect")
        rows[spec.name] = VerifierFamily(spec=spec, about=about, detect=looks, written=written)
    return rows


def family(name: str) -> VerifierFamily:
    """The row of that name.

    Raises:
        InputError: if there is none.
    """
    rows = families()
    if name not in rows:
        raise InputError(f"verifier family {name!r} is not known; there are {', '.join(rows)}")
    return rows[name]


def load_spec(folder: Path) -> VerifierSpec:
    """The spec of a checkpoint folder: its `verifier.yaml`, or the family it is recognised as.

    Raises:
        InputError: if there is neither, or the file is not valid.
    """
    file = folder / SPEC_FILE
    if file.is_file():
        written = read_mapping(file)
        if "family" in written:
            name = written.pop("family")
            if not isinstance(name, str):
                raise InputError(f"verifier {file}: family: a name is expected")
            base = {**family(name).written, "name": f"{name}, changed"}
            for key, value in written.items():  # mappings are merged key by key, others replaced
                old = base.get(key)
                if isinstance(old, dict) and isinstance(value, dict):
                    base[key] = {**old, **value}
                else:
                    base[key] = value
            written = base
        return validated(VerifierSpec, written, str(file))
    rows = families()
    matches = [row.spec for row in rows.values() if row.detect and row.detect.matches(folder)]
    if len(matches) == 1:
        return matches[0]
    several = " and ".join(spec.name for spec in matches)
    raise InputError(
        f"verifier {folder}: no {SPEC_FILE} says how its scores are read, and it is recognised as "
        f"{several or 'no known family'}; name one: --verifier family:NAME:{folder} "
        f"(NAME: {', '.join(rows)})"
    )


# --- judges ----------------------------------------------------------------------------------


class JudgeSpec(Section):
    """One way to ask a judge; a `judge.yaml` in the model's folder changes what it names.

    scores: "ended_paths" leaves every step but a path's last one unjudged.
    """

    system: str | None = None
    prompt: str
    step: str
    pattern: str
    out_of: float = Field(gt=0, allow_inf_nan=False)
    max_tokens: int = Field(ge=1)
    scores: Literal["every_step", "ended_paths"]
    aggregate: Reduction

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
        try:
            number = float(re.findall(self.pattern, plain)[-1])
        except (IndexError, ValueError):
            return None
        return number / self.out_of if 0 <= number <= self.out_of else None


def load_judge(folder: Path) -> JudgeSpec:
    """The folder's `judge.yaml` over the packaged one.

    Raises:
        InputError: if it is not valid.
    """
    file = folder / JUDGE_FILE
    written = read_mapping(_PACKAGED_JUDGE) | (read_mapping(file) if file.is_file() else {})
    return validated(JudgeSpec, written, str(file))
