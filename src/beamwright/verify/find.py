"""Resolve `--verifier` to a checkpoint and its format, or to a scorer without a model.

Only `resolve_verifier` and `show_verifier` read weights. The other functions import torch only to
read names of tensors, by which some families are detected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamwright.declare import VERIFIERS, declared_values, make_declared
from beamwright.errors import InputError
from beamwright.models.hf_config import find_shape, read_shape
from beamwright.models.hub import resolve_folder
from beamwright.models.named import named_shape
from beamwright.models.shape import ModelShape
from beamwright.protocols import Verifier
from beamwright.sections import ModelSettings
from beamwright.tree import SearchTree, make_given_path
from beamwright.verify.family import AnySpec, family, load_spec
from beamwright.verify.scorers import (
    PROBE,
    WITHOUT_MODEL,
    CallableVerifier,
    ObjectVerifier,
    make_scorer,
)
from beamwright.verify.spec import LIKELIHOOD_SPEC, JudgeSpec, VerifierSpec, aggregate, load_judge

if TYPE_CHECKING:
    from beamwright.models.load import LoadedModel
    from beamwright.models.offload import WeightOffload
    from beamwright.models.tree_model import TreeModel

_LIKELIHOOD, _FAMILY, _JUDGE = "likelihood", "family", "judge"
# If only a model's name is available: prefixes of known names whose models have a value head in
# place of the LM head. All other known models score with the LM head's logits.
_OWN_HEADS = ("skywork-", "qwen2.5-math-prm-")
_KV_TOKENS = 4096  # size of the KV budget of `show_verifier`, in tokens
# The sample problem and solution of `show_verifier`.
PROBLEM = (
    "Paul starts with 106 pears. Then in June Paul gives away 41 pears. "
    "Later in July Paul doubles the number of pears. How many pears does Paul have now?"
)
STEPS = ("June: Paul 106-41=65.", "In July Paul has 65*2=130 pears.", "The answer is \\boxed{130}.")


def _split_checkpoint(verifier: str) -> tuple[str, str, str] | None:
    """Split `[KIND:[NAME:]]PLACE` into the kind, the family's name, and the checkpoint's place.

    Kind and name are "" if they are not given. The result is None for a scorer without a model.
    """
    kind, colon, rest = verifier.partition(":")
    if kind in WITHOUT_MODEL or verifier in VERIFIERS:
        return None
    if not colon or kind not in (_LIKELIHOOD, _FAMILY, _JUDGE):
        return "", "", verifier
    name, _, place = rest.partition(":") if kind == _FAMILY else ("", "", rest)
    return kind, name, place


def verifier_hint(verifier: str) -> str:
    """Return a hint that lists the known values of `--verifier`; "" if `verifier` is a folder."""
    if ":" in verifier or "/" in verifier:
        return ""
    names = [*VERIFIERS, *WITHOUT_MODEL, "bundled", "hf:ORG/NAME"]
    names += [f"{_LIKELIHOOD}:PATH", f"{_FAMILY}:NAME:PATH", f"{_JUDGE}:PATH", f"{PROBE}:HEAD"]
    return f"known: {', '.join(name for name in names if name != PROBE)}"


def find_verifier_shape(settings: ModelSettings) -> ModelShape | None:
    """Return the shape of the verifier's model, without loading it; None if it has no model.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: the error that loading would raise.
    """
    name = settings.verifier_or_default
    named = _split_checkpoint(name)
    if named is None:
        return None
    model = settings.model_copy(update={"model": named[2]})
    shape = find_shape(model, "verifier", name, verifier_hint(name))
    return replace(shape, has_lm_head=_reads_logits(*named))


def _reads_logits(kind: str, name: str, place: str) -> bool:
    """Return True if the verifier scores with the LM head's logits, or if this is not known.

    The result is False if the model has a value head of its own.
    """
    if kind == _FAMILY:
        return family(name).spec.reads_logits
    if kind or place.startswith("random:"):
        return True
    if not Path(place).is_dir() and named_shape(place) is not None:
        return not place.rpartition("/")[2].lower().removeprefix("hf:").startswith(_OWN_HEADS)
    try:
        return load_spec(resolve_folder(place, "verifier", weights=False)).reads_logits
    except InputError:  # the folder has only a config.json, so no family can be detected
        return True


def check_models(settings: ModelSettings) -> None:
    """Check the names of both models and their config.json, without loading them.

    Raises:
        InputError, UnsupportedModelError, UnavailableError: the error that loading would raise.
    """
    if not settings.runs_elsewhere and not settings.is_random:
        folder = resolve_folder(settings.model, "generator", weights=False)
        read_shape(folder, settings.context, decoder=settings.decoder)
    _head_of(settings)
    named = _split_checkpoint(settings.verifier_or_default)
    if named is not None and named[2] and not named[2].startswith("random:"):
        _folder_of(settings, named[2], weights=False)


def _folder_of(settings: ModelSettings, place: str, *, weights: bool = True) -> Path:
    """Return the verifier's folder, after checking that its model can run.

    Callers check the format afterwards, so that the user sees the more important error first.
    """
    name = settings.verifier_or_default
    folder = resolve_folder(place, "verifier", name, verifier_hint(name), weights=weights)
    read_shape(folder, settings.context, "verifier", settings.decoder)
    return folder


def find_format(settings: ModelSettings) -> tuple[AnySpec | None, Path | None]:
    """Return the spec and the folder of the verifier without reading weights.

    Both are None for a scorer without a model.

    Raises:
        InputError: if the verifier does not exist, or if its format is not known.
    """
    name = settings.verifier_or_default
    named = _split_checkpoint(name)
    if named is None:
        return None, None
    kind, of_family, place = named
    spec = family(of_family).spec if kind == _FAMILY else None
    if kind in (_FAMILY, _JUDGE) and not place:
        ways = {_FAMILY: "family:NAME:PATH", _JUDGE: "judge:PATH or judge:hf:ORG/NAME"}
        raise InputError(f"--verifier {name}: write {ways[kind]}")
    if place.startswith("random:"):
        raise InputError(
            f"--verifier {name}: random models have no tokenizer, which a verifier needs; give a "
            "folder"
        )
    folder = _folder_of(settings, place)
    if kind == _JUDGE:
        return load_judge(folder), folder
    if kind == _LIKELIHOOD:
        return LIKELIHOOD_SPEC, folder
    return spec or load_spec(folder), folder


@dataclass(frozen=True)
class VerifierSource:
    """A resolved verifier: either a spec with its loaded model, or a verifier without a model."""

    spec: AnySpec | None  # None if `without_model` is set
    model: LoadedModel | None  # None if `without_model` is set
    without_model: Verifier | None
    name: str = ""  # the value of `--verifier`

    def make_verifier(self, tree_model: TreeModel) -> Verifier:
        """Create the verifier over `tree_model`, its model with a KV store.

        Raises:
            InputError: if the checkpoint lacks what the spec needs.
            ValueError: if the source has no model.
        """
        from beamwright.verify.judge import JudgeVerifier  # noqa: PLC0415 (imports torch)
        from beamwright.verify.prm import PrmVerifier  # noqa: PLC0415 (imports torch)

        if self.model is None or self.spec is None:
            raise ValueError("this verifier has no model")
        if isinstance(self.spec, JudgeSpec):
            return JudgeVerifier(self.spec, self.model, tree_model, self.name)
        return PrmVerifier(self.spec, self.model, tree_model)


def resolve_verifier(
    settings: ModelSettings,
    generator: LoadedModel | None = None,
    offload: WeightOffload | None = None,
) -> VerifierSource:
    """Resolve `--verifier`, and load its model if it has one. The values are:

    - `PATH`, `hf:ORG/NAME` or `bundled`: a checkpoint with a `verifier.yaml` or of a known family.
    - `family:NAME:PATH`: a checkpoint that is read as family NAME, without detection.
    - `likelihood:PATH`: the probabilities that a language model gives to the tokens of a step.
    - `judge:PATH`: a chat model that writes critiques.
    - `probe:HEAD`: a head on the generator's hidden states.
    - `none`, `logprob`, `min-logprob`, `entropy`, `deepconf[:WINDOW]`, `deepconf-bottom[:WINDOW]`,
      `deepconf-tail[:WINDOW]`, and the names of declared verifiers: no second model.

    generator: the loaded generator; None if it runs on a remote server.
    offload: takes the weights of the verifier's layers that do not stay on the device.

    Raises:
        InputError: if the verifier does not exist, or if its format is not known.
    """
    name = settings.verifier_or_default
    spec, folder = find_format(settings)
    if folder is None:
        kind, colon, rest = name.partition(":")
        alone = declared_verifier(settings)
        if alone is None and (head := _head_of(settings)) is not None:
            from beamwright.verify.probe import ProbeVerifier  # noqa: PLC0415 (imports torch)

            if generator is None:
                raise InputError(f"--verifier {name}: needs --model, whose hidden states it reads")
            alone = ProbeVerifier(head, generator, settings.model)
        return VerifierSource(None, None, alone or make_scorer(kind, rest if colon else None))
    from beamwright.models.load import load_model  # noqa: PLC0415 (imports torch)

    reads = spec is not None and spec.reads_logits
    model = load_model(str(folder), settings, role="verifier", reads_logits=reads, offload=offload)
    return VerifierSource(spec, model, None, name)


def _head_of(settings: ModelSettings) -> Path | None:
    """Return the file that `--verifier probe:HEAD` names; None for any other verifier.

    Raises:
        InputError: if HEAD is missing, or if the generator runs on a remote server.
    """
    kind, _, head = settings.verifier_or_default.partition(":")
    if kind != PROBE:
        return None
    if not head:
        raise InputError(
            f"--verifier {PROBE}: write {PROBE}:HEAD, a file of `beamwright probe train`"
        )
    if settings.runs_elsewhere:
        raise InputError(
            f"--verifier {PROBE}:{head}: needs the generator's hidden states, which a server "
            f"(--model {settings.model}) does not return"
        )
    return Path(head)


def declared_verifier(settings: ModelSettings) -> Verifier | None:
    """Return the declared verifier that `--verifier` names; None if it names no declaration.

    Raises:
        InputError: for an option of another verifier, or for a value that is not valid.
    """
    rows = (
        [VERIFIERS[settings.verifier_or_default]]
        if settings.verifier_or_default in VERIFIERS
        else []
    )
    values = declared_values(VERIFIERS, rows, settings, named=settings.verifier_or_default)
    for row, given in zip(rows, values, strict=True):
        owner = make_declared(VERIFIERS, row.make, given)
        return ObjectVerifier(owner) if isinstance(row.make, type) else CallableVerifier(owner)
    return None


# --- a sample in the verifier's format --------------------------------------------------------


def show_verifier(settings: ModelSettings) -> dict[str, Any]:
    """Score a sample solution of three steps, and return a JSON object for `doctor --show`.

    text: the decoded tokens of the whole path.
    steps: for each step, the positions at which its score is read and the tokens at these
        positions, in the path that ends with this step.
    score: the score of the whole path.

    Raises:
        InputError: if the verifier is not a reward model, or if its format does not fit its
            checkpoint.
    """
    from beamwright.attention import make_attention  # noqa: PLC0415 (imports torch)
    from beamwright.models.tree_model import TreeModel  # noqa: PLC0415 (imports torch)
    from beamwright.verify.path_encoder import PathEncoder  # noqa: PLC0415 (slow import)

    spec, folder = find_format(settings)
    if folder is None or not isinstance(spec, VerifierSpec):
        raise InputError(
            f"--show needs a reward model; --verifier {settings.verifier_or_default} is not one"
        )
    root = SearchTree(0, (0,), PROBLEM).root
    nodes = make_given_path(root, 0, [*(f"{step}\n\n" for step in STEPS[:-1]), STEPS[-1]])
    source = resolve_verifier(settings)
    assert source.model is not None
    assert source.model.codec is not None
    decoder, codec = source.model.decoder, source.model.codec
    budget = _KV_TOKENS * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
    verifier = source.make_verifier(TreeModel(decoder, make_attention(settings.attention), budget))
    encodings = PathEncoder(spec, codec).encode(PROBLEM, nodes)
    scores, steps = [verifier.score([node])[0] for node in nodes], []
    for number, (node, path, score) in enumerate(zip(nodes, encodings, scores, strict=True), 1):
        read = [codec.decode_raw([path.token_ids[at]]) for at in path.read_at]
        shown = {"step": number, "text": node.step_text, "read_at": path.read_at, "read": read}
        steps.append({**shown, "score": score})
    names = ("read", "activation", "combine", "aggregate", "scores")
    return {
        "verifier": settings.verifier_or_default,
        "folder": str(folder),
        "format": spec.name,
        **{name: getattr(spec, name) for name in names},
        "head": spec.head.kind,
        "problem": PROBLEM,
        "text": codec.decode_raw(encodings[-1].token_ids),
        "steps": steps,
        "score": aggregate(scores, spec.aggregate),
    }
