"""Turn the settings of `--sparse` into a `KVMethod` of the generator, and check other options."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from beamwright.attention.protocols import AttentionBackend, KVMethod
from beamwright.config import Settings
from beamwright.errors import InputError, format_bytes
from beamwright.sections import SparseSettings
from beamwright.sparse.host import HostStore
from beamwright.sparse.rule import SparseRule
from beamwright.sparse.view import SparseAttention


def sparse_rule(settings: SparseSettings) -> SparseRule | None:
    """Make the rule by which rows select tokens; None if decoding attends to all tokens."""
    if settings.sparse in ("off", "auto") or settings.select == 1.0:
        return None
    how = settings.sparse_from, settings.sparse_layers, settings.sparse_correct
    return SparseRule(settings.sparse, settings.select, *how)


def sparse_method(settings: Settings, method: KVMethod) -> KVMethod:
    """Add sparse decoding to a schedule's KV method, if the settings ask for it.

    Raises:
        InputError: for options that cannot be combined with `--sparse`.
    """
    rule, on_host = sparse_rule(settings.sparse), settings.sparse.sparse_home == "host"
    if rule is None and on_host:
        raise InputError("--sparse-home host needs a --sparse method and a --select other than all")
    if settings.sparse.sparse in ("off", "auto"):
        return method
    schedule = settings.schedule.schedule
    if rule is None:
        return replace(method, option="--sparse")
    if method.home_option is not None:
        raise InputError(f"--sparse {rule.method} cannot be combined with {method.home_option}")
    method = replace(method, option="--sparse", attend=partial(_attend, rule, on_host))
    if not on_host:
        return method
    if schedule not in ("auto", "in-gpu"):
        raise InputError(f"--schedule {schedule} cannot be combined with --sparse-home host")
    return replace(
        method,
        home_option="--sparse-home host",
        has_tier=True,
        make_store=HostStore,
        most_rows=partial(_most_rows, rule),
    )


def _attend(
    rule: SparseRule, on_host: bool, settings: Settings, backend: AttentionBackend, decoder: Any
) -> SparseAttention:
    """Wrap `backend`, which attends to all tokens of a path, in sparse attention.

    Raises:
        InputError: for options that cannot be combined with `--sparse`.
    """
    named, model = f"--sparse {rule.method}", settings.model
    if rule.how.query == "ahead" and decoder.shape.built is not None:
        raise InputError(f"{named} needs Beamwright's own decoder, not --decoder transformers")
    if settings.schedule.evict == "recompute":
        raise InputError(
            f"{named} cannot be combined with --evict recompute, which attends to whole paths"
        )
    if model.attention not in ("auto", "tree"):
        why = f"needs --attention tree, not {model.attention}"
        raise InputError(f"{named} {why}")
    if model.deterministic and decoder.device.type == "cuda":
        raise InputError(f"{named} cannot be combined with --deterministic on a GPU")
    return SparseAttention(backend, rule, threaded=on_host)


def _most_rows(rule: SparseRule, shape: Any, token_bytes: int, kv_bytes: int) -> int:
    """Return how many rows' selected tokens fit the device, if rows share none of them."""
    sets = shape.heads // shape.kv_heads if rule.how.each == "query" else 1
    row_bytes = sets * rule.budget(shape.context) * token_bytes
    rows = kv_bytes // row_bytes
    if rows < 1:
        raise InputError(
            f"--sparse-home host: a row selects up to {format_bytes(row_bytes)}, but the KV budget "
            f"is {format_bytes(kv_bytes)}; raise --kv-memory or lower --select"
        )
    return rows
