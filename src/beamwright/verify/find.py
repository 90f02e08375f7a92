"""Which checkpoint `--verifier` names, and its shape. Reads no weights.

Needs torch only where a folder's tensors have to be named to tell whose they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from beamwright.declare import VERIFIERS
from beamwright.errors import InputError
from beamwright.models.find import find_shape, read_shape, resolve_folder
from beamwright.models.named_shapes import named_shape
from beamwright.models.shape import ModelShape
from beamwright.sections import ModelSettings
from beamwright.verify.confidence import WITHOUT_MODEL
from beamwright.verify.detect import family_spec, load_spec

LIKELIHOOD = "likelihood"
FAMILY = "family"
JUDGE = "judge"
_OWN_HEADS = ("skywork-", "qwen2.5-math-prm-")  # known by name alone; the others read logits


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
    shape = find_shape(model, "verifier", name, known_verifiers(name))
    return replace(shape, has_lm_head=_reads_logits(name, place))


def _reads_logits(name: str, place: str) -> bool:
    """False where a head of its own takes the LM head's place; True where nothing says so."""
    kind, colon, rest = name.partition(":")
    if kind == FAMILY and colon:
        return family_spec(rest.partition(":")[0]).head.reads_logits
    if (kind in (LIKELIHOOD, JUDGE) and colon) or place.startswith("random:"):
        return True
    if not Path(place).is_dir() and named_shape(place) is not None:
        return not place.rpartition("/")[2].lower().removeprefix("hf:").startswith(_OWN_HEADS)
    try:
        return load_spec(resolve_folder(place, "verifier", weights=False)).head.reads_logits
    except InputError:  # a config.json alone
        return True


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
