"""Which verifier an option means, and the weights it needs."""

from __future__ import annotations

from dataclasses import dataclass

from beamwright.config import ModelSettings
from beamwright.errors import InputError
from beamwright.models import LoadedModel, load_model
from beamwright.models.load import resolve_folder
from beamwright.protocols import Verifier
from beamwright.verify.confidence import WITHOUT_MODEL
from beamwright.verify.detect import family_spec, load_spec
from beamwright.verify.spec import LIKELIHOOD_SPEC, VerifierSpec

_LIKELIHOOD = "likelihood"
_FAMILY = "family"


@dataclass(frozen=True)
class VerifierSource:
    """A spec and its model; both None where `without_model` scores by itself."""

    spec: VerifierSpec | None
    model: LoadedModel | None
    without_model: Verifier | None


def resolve_verifier(settings: ModelSettings) -> VerifierSource:
    """Read what `--verifier` names.

    `PATH`, `hf:ORG/NAME` or `bundled`: a checkpoint with a `verifier.yaml`, or of a family that is
    recognised. `family:NAME:PATH`: one of the family NAME, whatever it holds. `likelihood:PATH`: a
    language model's own probabilities. `none`, `logprob`, `min-logprob`, `deepconf[:WINDOW]`: no
    model.

    Raises:
        InputError: if it is not there, or nothing says how its scores are read.
    """
    name = settings.verifier
    place = named_checkpoint(name)
    kind, colon, rest = name.partition(":")
    if place is None:
        return VerifierSource(None, None, WITHOUT_MODEL[kind](rest if colon else None))
    spec: VerifierSpec | None = None
    if kind == _LIKELIHOOD and colon:
        spec = LIKELIHOOD_SPEC
    elif kind == _FAMILY and colon:
        spec = family_spec(rest.partition(":")[0])
        if not place:
            raise InputError(f"--verifier {name}: write family:NAME:PATH")
    if place.startswith("random:"):
        raise InputError(
            f"--verifier {name}: a verifier needs a tokenizer; random shapes have none"
        )
    folder = resolve_folder(place, "verifier")
    spec = spec or load_spec(folder)
    return VerifierSource(spec, load_model(str(folder), settings, role="verifier"), None)


def named_checkpoint(verifier: str) -> str | None:
    """The checkpoint that `--verifier` names, without what says how to read it; None if none."""
    kind, colon, rest = verifier.partition(":")
    if kind in WITHOUT_MODEL:
        return None
    if kind == _LIKELIHOOD and colon:
        return rest
    return rest.partition(":")[2] if kind == _FAMILY and colon else verifier
