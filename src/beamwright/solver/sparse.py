"""Sparse decoding as the settings ask for it: the rule, and attention that follows it."""

from __future__ import annotations

from beamwright.attention.tree import TreeAttention
from beamwright.config import Settings, SparseSettings
from beamwright.errors import InputError, format_bytes
from beamwright.models import LoadedModel, TreeModel
from beamwright.protocols import AttentionBackend
from beamwright.sparse import PREDICTORS, HomeStore, Rotary, SparseAttention, SparseRule

_AUTO, _AUTO_CORRECT = "ahead", 0.8
"""Right on the ledger of 1,024 tokens from 32 on; a third of the heads select by their own query
(docs/experiments.md)."""


def sparse_attention(
    settings: Settings, loaded: LoadedModel, backend: AttentionBackend, schedule: str
) -> AttentionBackend:
    """The generator's attention: `backend`, where all tokens are read. schedule: that was chosen.

    Raises:
        InputError: for options that do not go together.
    """
    rule = sparse_rule(settings.sparse)
    if rule is None:
        if settings.sparse.sparse_home == "host":
            raise InputError("--sparse-home host: needs --sparse, and --select less than all")
        return backend
    named, home = f"--sparse {settings.sparse.sparse}", settings.sparse.sparse_home
    if schedule == "layerwise":
        raise InputError(f"{named}: not with --schedule {schedule}")
    if home == "host" and settings.schedule.schedule != "auto":
        raise InputError(f"--schedule {schedule}: not with --sparse-home host")
    if settings.schedule.evict == "recompute":
        raise InputError(
            f"{named}: not with --evict recompute, which reads all of a path and writes other KV"
        )
    decoder, asked = loaded.decoder, settings.model.attention
    if asked not in ("auto", "tree"):
        raise InputError(f"{named}: needs --attention tree in plain torch, not {asked}")
    if settings.model.deterministic and decoder.device.type == "cuda":
        raise InputError(f"{named}: not with --deterministic on a GPU, whose products it has not")
    # Kernels read whole paths, and `tree` stands for them where they run.
    inner = backend if isinstance(backend, TreeAttention) else TreeAttention()
    rank = settings.sparse.sparse_rank
    threaded = rank == "thread" or (rank == "auto" and home == "host")
    return SparseAttention(inner, rule, Rotary(*decoder.rotary), threaded=threaded)


def with_most_rows(settings: Settings, model: TreeModel) -> Settings:
    """With no more rows at a time than the device has room for what they select, shared or not.

    Raises:
        InputError: if there is none.
    """
    store, backend = model.store, model.backend
    if not isinstance(store, HomeStore) or not isinstance(backend, SparseAttention):
        return settings
    row_bytes = backend.rule.budget(model.decoder.shape.context) * store.pool.layout.bytes_per_token
    rows = store.device_budget.total_bytes // row_bytes
    if rows < 1:
        size = format_bytes(store.device_budget.total_bytes)
        raise InputError(
            f"--sparse-home host: a row selects up to {format_bytes(row_bytes)}, and {size} are "
            "there for it: raise --kv-memory, or lower --select"
        )
    most = min(rows, settings.schedule.max_batch or rows)
    schedule = settings.schedule.model_copy(update={"max_batch": most})
    return settings.model_copy(update={"schedule": schedule})


def sparse_rule(settings: SparseSettings) -> SparseRule | None:
    """What the settings say; None where decoding reads all: `auto` with KV on the device does.

    Raises:
        InputError: for options that would do nothing.
    """
    _check_meant(settings)
    if settings.sparse == "off" or settings.select == 1.0:
        return None
    auto = settings.sparse == "auto"
    if auto and settings.sparse_home == "device":
        return None
    rule = SparseRule(
        method=_AUTO if auto else settings.sparse,
        select=settings.select,
        first=settings.sparse_from,
        lag=settings.sparse_lag,
        window=settings.sparse_window,
        frame=settings.sparse_frame,
        full_layers=settings.sparse_layers,
        correct=_AUTO_CORRECT if auto else settings.sparse_correct,
    )
    if rule.how.evicts and isinstance(rule.select, float):
        raise InputError(f"--sparse {settings.sparse}: --select has to be a number of tokens")
    return rule


def _check_meant(settings: SparseSettings) -> None:
    # A checkpoint says all of them, so the defaults count as not given.
    defaults, named = SparseSettings(), f"--sparse {settings.sparse}"
    given = {
        name
        for name in settings.model_fields_set - {"sparse"}
        if getattr(settings, name) != getattr(defaults, name)
    }
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
