"""Which checkpoint `--verifier` names, and its shape. Reads no weights, needs no torch."""

from __future__ import annotations

from beamwright.declare import VERIFIERS
from beamwright.models.find import find_shape, read_shape, resolve_folder
from beamwright.models.shape import ModelShape
from beamwright.sections import ModelSettings
from beamwright.verify.confidence import WITHOUT_MODEL

LIKELIHOOD = "likelihood"
FAMILY = "family"
JUDGE = "judge"


def known_verifiers(verifier: str) -> str:
    """What `--verifier` takes besides folders; nothing where a folder is meant for sure."""
    if ":" in verifier or "/" in verifier:
        return ""
    names = [*VERIFIERS, *WITHOUT_MODEL, "bundled", "hf:ORG/NAME"]
    names += [f"{LIKELIHOOD}:PATH", f"{FAMILY}:NAME:PATH", f"{JUDGE}:PATH"]
    return f"known: {', '.join(names)}"


def named_checkpoint(verifier: str) -> str | None:
    """The checkpoint that `--verifier` names, without what says how to read it; None if none."""
    kind, colon, rest = verifier.partition(":")
    if kind in WITHOUT_MODEL or verifier in VERIFIERS:
        return None
    if kind in (LIKELIHOOD, JUDGE) and colon:
        return rest
    return rest.partition(":")[2] if kind == FAMILY and colon else verifier


def find_verifier_shape(settings: ModelSettings) -> ModelShape | None:
    """The shape that `--verifier` means, as `find_shape`; None where it has no weights.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading the verifier would.
    """
    name = settings.scorer
    place = named_checkpoint(name)
    if place is None:
        return None
    model = settings.model_copy(update={"model": place})
    return find_shape(model, "verifier", name, known_verifiers(name))


def check_models(settings: ModelSettings) -> None:
    """Raises what loading both models would for the names or the config.json of their folders.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: as loading them would.
    """
    if not settings.runs_elsewhere and not settings.is_random:
        folder = resolve_folder(settings.model, "generator", weights=False)
        read_shape(folder, settings.context)
    name = settings.scorer
    place = named_checkpoint(name)
    if place and not place.startswith("random:"):
        folder = resolve_folder(place, "verifier", name, known_verifiers(name), weights=False)
        read_shape(folder, settings.context, "verifier")
