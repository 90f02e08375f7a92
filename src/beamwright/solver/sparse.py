"""Sparse decoding as the settings ask for it: the rule, and attention that follows it."""

from __future__ import annotations

from beamwright.attention.tree import TreeAttention
from beamwright.config import Settings
from beamwright.errors import InputError, format_bytes
from beamwright.models.load import LoadedModel
from beamwright.protocols import AttentionBackend
from beamwright.sections import SparseSettings
from beamwright.solver.memory import ModelBytes
from beamwright.sparse.rule import METHODS, SparseRule
from beamwright.sparse.view import SparseAttention


def sparse_attention(
    settings: Settings, loaded: LoadedModel, backend: AttentionBackend
) -> tuple[AttentionBackend, SparseRule | None]:
    """The generator's attention, `backend` where all tokens are read, and the rule that it follows.

    settings: settled.

    Raises:
        InputError: for options that do not go together.
    """
    rule, on_host = sparse_rule(settings.sparse), settings.sparse.sparse_home == "host"
    if rule is None:
        if on_host:
            raise InputError("--sparse-home host: needs --sparse, and --select less than all")
        return backend, None
    named, schedule = f"--sparse {rule.method}", settings.schedule.schedule
    if schedule == "layerwise":
        raise InputError(f"{named}: not with --schedule {schedule}")
    if on_host and schedule != "in-gpu":
        raise InputError(f"--schedule {schedule}: not with --sparse-home host")
    if settings.schedule.evict == "recompute":
        raise InputError(
            f"{named}: not with --evict recompute, which reads all of a path and writes other KV"
        )
    attention, device = settings.model.attention, loaded.decoder.device
    if attention not in ("auto", "tree"):
        raise InputError(f"{named}: needs --attention tree in plain torch, not {attention}")
    if settings.model.deterministic and device.type == "cuda":
        raise InputError(f"{named}: not with --deterministic on a GPU, whose products it has not")
    # Kernels read whole paths, and `tree` stands for them where they run.
    inner = backend if isinstance(backend, TreeAttention) else TreeAttention()
    return SparseAttention(inner, rule, threaded=on_host), rule


def with_most_rows(settings: Settings, generator: ModelBytes, kv_bytes: int) -> Settings:
    """With no more rows at a time than the device has room for what they select, shared or not.

    kv_bytes: of the device, for that.

    Raises:
        InputError: if there is none.
    """
    rule = sparse_rule(settings.sparse)
    if rule is None or settings.sparse.sparse_home != "host":
        return settings
    row_bytes = rule.budget(generator.shape.context) * generator.kv_per_token
    rows = kv_bytes // row_bytes
    if rows < 1:
        raise InputError(
            f"--sparse-home host: a row selects up to {format_bytes(row_bytes)}, and "
            f"{format_bytes(kv_bytes)} are there for it: raise --kv-memory, or lower --select"
        )
    most = min(rows, settings.schedule.max_batch or rows)
    schedule = settings.schedule.model_copy(update={"max_batch": most})
    return settings.model_copy(update={"schedule": schedule})


def sparse_rule(settings: SparseSettings) -> SparseRule | None:
    """What the settings say; None where decoding reads all.

    Raises:
        InputError: for options that would do nothing.
    """
    if settings.sparse == "off":
        idle = settings.model_fields_set - {"sparse"}
    else:
        idle = {"sparse_correct"} if METHODS[settings.sparse].query == "own" else set()
    for name in sorted(idle):
        value = getattr(settings, name)
        if value != getattr(SparseSettings(), name):  # a checkpoint says all of them
            option = f"--{name.replace('_', '-')} {value}"
            raise InputError(f"{option}: does nothing with --sparse {settings.sparse}")
    if settings.sparse == "off" or settings.select == 1.0:
        return None
    return SparseRule(
        settings.sparse, settings.select, settings.sparse_from, settings.sparse_layers,
        settings.sparse_correct,
    )  # fmt: skip
