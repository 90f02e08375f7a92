"""A verifier as data: template, where to read, head, activation. Adding a PRM needs no code.

A checkpoint folder says what it is in `verifier.yaml`:

```yaml
name: my-prm
template:
  prefix: "{problem}\\n\\n"     # before the steps; leave it out to use the chat template
  step_suffix: " ки\\n"        # after every step
  marker: "ки"                # the part of the suffix that scores are read at
read: marker                  # every_token | step_end | marker | before_marker
head: {kind: logit_pair, good: "+", bad: "-"}
activation: softmax
combine: last                 # tokens of one step to the step's score
aggregate: min                # steps of a path to the path's score
```
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from beamwright.config import Section
from beamwright.errors import InputError

SPEC_FILE = "verifier.yaml"

Feature = Literal["previous_hidden", "token_embedding", "logprob", "entropy", "gap"]


class Template(Section):
    """How a path becomes the verifier's text. Special tokens stand as their text."""

    prefix: str | None = Field(None, description="None: the checkpoint's chat template")
    step_suffix: str = ""
    marker: str | None = None


class Head(Section):
    """What turns hidden states into values.

    logit_pair: two rows of the LM head (tokens `good` and `bad`). linear: one row. two_layer:
    Linear-ReLU-Linear to two classes. token_mlp: Linear-GELU-...-Linear over features of each
    token and its predecessor. token_logprob: the token's own log-probability.
    file: safetensors with `layers.N.weight` and `layers.N.bias`.
    """

    kind: Literal["logit_pair", "linear", "two_layer", "token_mlp", "token_logprob"]
    file: str | None = None
    features: tuple[Feature, ...] = ()
    good: str | int | None = None
    bad: str | int | None = None

    @model_validator(mode="after")
    def _complete(self) -> Head:
        if self.kind == "logit_pair" and (self.good is None or self.bad is None):
            raise ValueError("a logit_pair head needs 'good' and 'bad'")
        if self.kind in ("linear", "two_layer", "token_mlp") and self.file is None:
            raise ValueError(f"a {self.kind} head needs 'file'")
        if self.kind == "token_mlp" and not self.features:
            raise ValueError("a token_mlp head needs 'features'")
        return self

    @property
    def looks_back(self) -> bool:
        """True if a token's value needs the hidden state before it."""
        return self.kind in ("token_mlp", "token_logprob")


class VerifierSpec(Section):
    """One verifier format. See the module's docstring."""

    name: str
    template: Template = Template()
    read: Literal["every_token", "step_end", "marker", "before_marker"]
    head: Head
    activation: Literal["sigmoid", "softmax", "exp", "identity"]
    combine: Literal["last", "min", "prod", "mean"] = "last"
    aggregate: Literal["last", "min", "prod", "mean"] = "last"

    @model_validator(mode="after")
    def _marker_is_there(self) -> VerifierSpec:
        marker = self.template.marker
        if self.read in ("marker", "before_marker") and (
            marker is None or marker not in self.template.step_suffix
        ):
            raise ValueError(f"read: {self.read} needs a template.marker inside step_suffix")
        if (self.activation == "softmax") != (self.head.kind in ("logit_pair", "two_layer")):
            raise ValueError("softmax goes with logit_pair and two_layer heads, and only with them")
        return self


LIKELIHOOD_SPEC = VerifierSpec(
    name="likelihood",
    read="every_token",
    head=Head(kind="token_logprob"),
    activation="exp",
    combine="min",
    aggregate="min",
)


def load_spec(folder: Path) -> VerifierSpec:
    """The spec in a checkpoint folder.

    Raises:
        InputError: if there is none, or it is not valid.
    """
    file = folder / SPEC_FILE
    if not file.is_file():
        raise InputError(f"verifier {folder}: no {SPEC_FILE} says how its scores are read")
    try:
        return VerifierSpec.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise InputError(f"verifier {file}: not YAML ({' '.join(str(error).split())})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "spec"
        raise InputError(f"verifier {file}: {where}: {first['msg']}") from error
