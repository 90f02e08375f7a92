"""A verifier as data: template, where to read, head, activation. Adding a PRM needs no code.

A checkpoint folder says what it is in `verifier.yaml`:

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

`family: NAME` in that file starts from a row of `verify/families` and changes what it names.
"""

from __future__ import annotations

import re
from pathlib import Path, PureWindowsPath
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from beamwright.errors import InputError
from beamwright.sections import Section
from beamwright.yaml_file import read_yaml

SPEC_FILE = "verifier.yaml"

Feature = Literal["previous_hidden", "token_embedding", "logprob", "entropy", "gap"]
STACKS = ("linear", "two_layer", "token_mlp")


_PLACEHOLDER = re.compile(r"(?<![\\\w{])\{\s*([A-Za-z_]\w*)\s*\}(?!\})")


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
    file: safetensors inside the folder that hold them (by default as `layers.0`, `layers.1`, ...);
    without it they are in the checkpoint itself.
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
    combine: Literal["last", "min", "prod", "mean"] = "last"
    aggregate: Literal["last", "min", "prod", "mean"] = "last"

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


def read_spec_file(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        InputError: if it is not YAML, or not a mapping.
    """
    found = read_yaml(file, "verifier")
    if not isinstance(found, dict):
        raise InputError(f"verifier {file}: spec: a mapping is expected")
    return found


def parse_spec(written: dict[str, Any], where: str) -> VerifierSpec:
    """The spec that a mapping says.

    where: what an error names.

    Raises:
        InputError: if it is not valid.
    """
    try:
        return VerifierSpec.model_validate(written)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "spec"
        raise InputError(f"verifier {where}: {place}: {first['msg']}") from error
