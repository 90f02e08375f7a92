"""Which verifier an option means, and the weights it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from beamwright.declare import VERIFIERS, declared_values, made
from beamwright.errors import InputError
from beamwright.models import LoadedModel, TreeModel, load_model
from beamwright.models.find import read_shape, resolve_folder
from beamwright.protocols import Verifier
from beamwright.sections import ModelSettings
from beamwright.verify.confidence import WITHOUT_MODEL
from beamwright.verify.detect import family_spec, load_spec
from beamwright.verify.find import FAMILY, JUDGE, LIKELIHOOD, known_verifiers, named_checkpoint
from beamwright.verify.function import CallableVerifier, ObjectVerifier
from beamwright.verify.judge import JudgeVerifier
from beamwright.verify.judge_prompt import JudgeSpec, load_judge
from beamwright.verify.prm import PrmVerifier
from beamwright.verify.spec import LIKELIHOOD_SPEC, VerifierSpec


@dataclass(frozen=True)
class VerifierSource:
    """A spec and its model; both None where `without_model` scores by itself.

    name: how the option names it.
    """

    spec: VerifierSpec | JudgeSpec | None
    model: LoadedModel | None
    without_model: Verifier | None
    name: str = ""

    def on(self, tree_model: TreeModel) -> Verifier:
        """The verifier over its model's KV.

        Raises:
            InputError: if the checkpoint lacks what the spec needs.
            ValueError: if the source has no model.
        """
        if self.model is None or self.spec is None:
            raise ValueError("this verifier has no model")
        if isinstance(self.spec, JudgeSpec):
            return JudgeVerifier(self.spec, self.model, tree_model, self.name)
        return PrmVerifier(self.spec, self.model, tree_model)


def resolve_verifier(settings: ModelSettings) -> VerifierSource:
    """Read what `--verifier` names.

    `PATH`, `hf:ORG/NAME` or `bundled`: a checkpoint with a `verifier.yaml`, or of a family that is
    recognised. `family:NAME:PATH`: one of the family NAME, whatever it holds. `likelihood:PATH`: a
    language model's own probabilities. `judge:PATH`: what a chat model writes. `none`, `logprob`,
    `min-logprob`, `entropy`, `deepconf[:WINDOW]`, `deepconf-bottom[:WINDOW]` and
    `deepconf-tail[:WINDOW]`, and names that are declared: no model.

    Raises:
        InputError: if it is not there, or nothing says how its scores are read.
    """
    name = settings.scorer
    spec, folder = find_format(settings)
    if folder is None:
        declared = declared_verifier(settings)
        if declared is not None:
            return VerifierSource(None, None, declared)
        kind, colon, rest = name.partition(":")
        return VerifierSource(None, None, WITHOUT_MODEL[kind](rest if colon else None))
    reads = isinstance(spec, JudgeSpec) or (spec is not None and spec.head.reads_logits)
    model = load_model(str(folder), settings, role="verifier", reads_logits=reads)
    return VerifierSource(spec, model, None, name)


def declared_verifier(settings: ModelSettings) -> Verifier | None:
    """The verifier of a declaration that `--verifier` names; None where it names no such.

    Raises:
        InputError: for an option of another verifier, or a value that this one cannot use.
    """
    rows = [VERIFIERS[settings.scorer]] if settings.scorer in VERIFIERS else []
    values = declared_values(VERIFIERS, rows, settings, named=settings.scorer)
    for row, given in zip(rows, values, strict=True):
        owner = made(VERIFIERS, row.make, given)
        return ObjectVerifier(owner) if isinstance(row.make, type) else CallableVerifier(owner)
    return None


def find_format(settings: ModelSettings) -> tuple[VerifierSpec | JudgeSpec | None, Path | None]:
    """What `--verifier` names, and its folder, no weights read; None twice where it has no model.

    Raises:
        InputError: as `resolve_verifier`.
    """
    name = settings.scorer
    place = named_checkpoint(name)
    if place is None:
        return None, None
    kind, colon, rest = name.partition(":")
    spec: VerifierSpec | None = None
    if kind == LIKELIHOOD and colon:
        spec = LIKELIHOOD_SPEC
    elif kind == FAMILY and colon:
        spec = family_spec(rest.partition(":")[0])
        if not place:
            raise InputError(f"--verifier {name}: write family:NAME:PATH")
    elif kind == JUDGE and colon and not place:
        raise InputError(f"--verifier {name}: write judge:PATH or judge:hf:ORG/NAME")
    if place.startswith("random:"):
        raise InputError(
            f"--verifier {name}: a verifier needs a tokenizer; random shapes have none"
        )
    folder = resolve_folder(place, "verifier", name, known_verifiers(name))
    read_shape(folder, settings.context, "verifier")  # what cannot run has no format to look for
    if kind == JUDGE and colon:
        return load_judge(folder), folder
    return spec or load_spec(folder), folder
