"""Sparse decoding as the settings ask for it: the rule, and attention that follows it."""

from __future__ import annotations

from beamwright.attention.tree import TreeAttention
from beamwright.config import Settings, SparseSettings
from beamwright.errors import InputError
from beamwright.models import LoadedModel
from beamwright.protocols import AttentionBackend
from beamwright.sparse import PREDICTORS, Rotary, SparseAttention, SparseRule

_AUTO = "pages"


def sparse_attention(
    settings: Settings, loaded: LoadedModel, backend: AttentionBackend
) -> AttentionBackend:
    """The generator's attention: `backend`, where all tokens are read.

    Raises:
        InputError: for options that do not go together.
    """
    rule = sparse_rule(settings.sparse)
    if rule is None:
        return backend
    if not isinstance(backend, TreeAttention):
        raise InputError(
            f"--sparse {settings.sparse.sparse}: needs --attention tree in plain torch, not "
            f"{backend.name}"
        )
    decoder = loaded.decoder
    return SparseAttention(backend, rule, Rotary(*decoder.rotary))


def sparse_rule(settings: SparseSettings) -> SparseRule | None:
    """What the settings say; None where decoding reads all.

    Raises:
        InputError: for options that would do nothing.
    """
    _check_meant(settings)
    if settings.sparse == "off" or settings.select == 1.0:
        return None
    auto = settings.sparse == "auto"
    layers = settings.sparse_layers
    rule = SparseRule(
        method=_AUTO if auto else settings.sparse,
        select=settings.select,
        first=settings.sparse_from,
        lag=settings.sparse_lag,
        window=settings.sparse_window,
        frame=settings.sparse_frame,
        full_layers=int(auto) if layers is None else layers,
        correct=settings.sparse_correct,
    )
    if rule.how.evicts and isinstance(rule.select, float):
        raise InputError(f"--sparse {settings.sparse}: --select has to be a number of tokens")
    return rule


def _check_meant(settings: SparseSettings) -> None:
    given, named = settings.model_fields_set - {"sparse"}, f"--sparse {settings.sparse}"
    if settings.sparse == "off":
        ignored = given
    else:
        predicts = settings.sparse in PREDICTORS
        ignored = set() if predicts else given & {"sparse_lag", "sparse_window", "sparse_frame"}
        if not predicts and settings.sparse != "ahead":
            ignored |= given & {"sparse_correct"}
    for name in sorted(ignored):
        value = getattr(settings, name)
        raise InputError(f"--{name.replace('_', '-')} {value}: does nothing with {named}")
