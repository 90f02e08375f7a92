"""Which verifier an option means, and the weights it needs."""

from __future__ import annotations

from dataclasses import dataclass

from beamwright.config import ModelSettings
from beamwright.errors import InputError
from beamwright.models import LoadedModel, load_model
from beamwright.verify.confidence import LogprobVerifier, NoVerifier
from beamwright.verify.spec import LIKELIHOOD_SPEC, VerifierSpec, load_spec

_LIKELIHOOD = "likelihood:"


@dataclass(frozen=True)
class VerifierSource:
    """A spec and its model; both None where `without_model` scores by itself."""

    spec: VerifierSpec | None
    model: LoadedModel | None
    without_model: LogprobVerifier | NoVerifier | None


def resolve_verifier(settings: ModelSettings) -> VerifierSource:
    """Read what `--verifier PATH | bundled | likelihood:PATH | logprob | none` names.

    Raises:
        InputError: if it is not there or has no valid spec.
    """
    name = settings.verifier
    if name == "none":
        return VerifierSource(None, None, NoVerifier())
    if name == "logprob":
        return VerifierSource(None, None, LogprobVerifier())
    likelihood = name.startswith(_LIKELIHOOD)
    model = load_model(name.removeprefix(_LIKELIHOOD), settings, role="verifier")
    if model.folder is None or model.codec is None:
        raise InputError(
            f"--verifier {name}: a verifier needs a tokenizer; random shapes have none"
        )
    spec = LIKELIHOOD_SPEC if likelihood else load_spec(model.folder)
    return VerifierSource(spec, model, None)
