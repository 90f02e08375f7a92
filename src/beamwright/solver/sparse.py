"""Sparse decoding as the settings ask for it: the rule, and attention that follows it."""

from __future__ import annotations

from beamwright.attention.tree import TreeAttention
from beamwright.config import Settings
from beamwright.errors import InputError, format_bytes
from beamwright.models.load import LoadedModel
from beamwright.plan.compare import LEAST_GAIN, SparseCase, beside_full_attention
from beamwright.plan.costs import ModelCosts, Shape
from beamwright.plan.sparse import Scored
from beamwright.protocols import AttentionBackend
from beamwright.sections import SparseSettings
from beamwright.solver.memory import ModelBytes
from beamwright.solver.tiers import expected_workload, machine_profile
from beamwright.sparse.rule import METHODS, PREDICTORS, Rotary, SparseRule
from beamwright.sparse.view import SparseAttention

_AUTO, _AUTO_CORRECT = "ahead", 0.8
"""Right on the ledger of 1,024 tokens from 32 on; a third of the heads select by their own query
(docs/experiments.md)."""
_ATTENTION = ("auto", "tree")


def sparse_attention(
    settings: Settings, loaded: LoadedModel, backend: AttentionBackend
) -> tuple[AttentionBackend, SparseRule | None]:
    """The generator's attention, `backend` where all tokens are read, and the rule that it follows.

    settings: settled.

    Raises:
        InputError: for options that do not go together.
    """
    rule = sparse_rule(settings.sparse)
    if rule is None:
        if settings.sparse.sparse_home == "host":
            raise InputError("--sparse-home host: needs --sparse, and --select less than all")
        return backend, None
    named, home = f"--sparse {settings.sparse.sparse}", settings.sparse.sparse_home
    schedule = settings.schedule.schedule
    if schedule == "layerwise":
        raise InputError(f"{named}: not with --schedule {schedule}")
    if home == "host" and schedule != "in-gpu":
        raise InputError(f"--schedule {schedule}: not with --sparse-home host")
    if settings.schedule.evict == "recompute":
        raise InputError(
            f"{named}: not with --evict recompute, which reads all of a path and writes other KV"
        )
    decoder, asked = loaded.decoder, settings.model.attention
    if asked not in _ATTENTION:
        raise InputError(f"{named}: needs --attention tree in plain torch, not {asked}")
    if settings.model.deterministic and decoder.device.type == "cuda":
        raise InputError(f"{named}: not with --deterministic on a GPU, whose products it has not")
    # Kernels read whole paths, and `tree` stands for them where they run.
    inner = backend if isinstance(backend, TreeAttention) else TreeAttention()
    rank = settings.sparse.sparse_rank
    threaded = rank == "thread" or (rank == "auto" and home == "host")
    if rule.late == "previous" and not threaded:
        raise InputError("--late previous: needs --sparse-rank thread; nothing else is late")
    return SparseAttention(inner, rule, Rotary(*decoder.rotary), threaded=threaded), rule


def settled_sparse(settings: Settings, generator: ModelBytes, kv_bytes: int) -> SparseSettings:
    """What `--sparse auto` stands for: off, unless the cost model promises enough for its error.

    It promises something only where there are a device and a host, and KV outgrows the device. With
    `--sparse-home host` it is on whatever that costs. kv_bytes: that the device has for KV.
    """
    asked = settings.sparse
    if asked.sparse != "auto" or asked.select == 1.0:
        return asked
    on = chosen_by_auto(asked)
    if asked.sparse_home == "host":
        return on
    if not _could_be_sparse(settings):
        return SparseSettings()
    shape, rule = generator.shape, sparse_rule(on)
    assert rule is not None
    costs = ModelCosts.of(shape, generator.element_bytes, generator.storage)
    workload = expected_workload(settings, shape.context)
    profile = machine_profile(settings.model.device)
    found = beside_full_attention(workload, costs, profile, kv_bytes, sparse_case(rule, shape))
    return on if found.gain >= LEAST_GAIN else SparseSettings()


def chosen_by_auto(asked: SparseSettings) -> SparseSettings:
    """What `auto` is where it is not off.

    Raises:
        InputError: for options that would do nothing.
    """
    _check_meant(asked)
    rule = {"sparse": _AUTO, "sparse_correct": _AUTO_CORRECT, "sparse_home": "host"}
    return SparseSettings.model_validate(asked.model_dump() | rule)


def _could_be_sparse(settings: Settings) -> bool:
    """Nothing else that was asked for rules it out, and the host is not the device."""
    model, schedule = settings.model, settings.schedule
    return (
        model.device != "cpu"
        and model.attention in _ATTENTION
        and not model.deterministic
        and schedule.schedule == "auto"
        and schedule.evict != "recompute"
    )


def sparse_case(rule: SparseRule, shape: Shape) -> SparseCase:
    """A rule as the cost model knows it: keys, or bounds of pages, are scored on the host."""
    how = rule.how
    scored = Scored.HOST_KEYS if how.scores == "keys" else Scored.HOST_BOUNDS
    reads_on = how.query == "none" or how.evicts  # what is attended to anyway, or nothing
    by_layers = how.query == "ahead"
    foreseen = by_layers or how.query in PREDICTORS
    return SparseCase(rule, shape, None if reads_on else scored, foreseen, by_layers)


def with_most_rows(settings: Settings, generator: ModelBytes, kv_bytes: int) -> Settings:
    """With no more rows at a time than the device has room for what they select, shared or not.

    kv_bytes: of the device, for that. Sparse decoding is settled.

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
    """What the settings say; None where decoding reads all. `auto` is settled before.

    Raises:
        InputError: for options that would do nothing.
    """
    _check_meant(settings)
    if settings.sparse == "off" or settings.select == 1.0:
        return None
    rule = SparseRule(
        method=settings.sparse,
        select=settings.select,
        first=settings.sparse_from,
        lag=settings.sparse_lag,
        window=settings.sparse_window,
        frame=settings.sparse_frame,
        full_layers=settings.sparse_layers,
        correct=settings.sparse_correct,
        late=settings.late,
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
        query = METHODS[settings.sparse].query if settings.sparse != "auto" else "auto"
        predicts = query in PREDICTORS
        ignored = set() if predicts else given & {"sparse_lag", "sparse_window", "sparse_frame"}
        if not predicts and query != "ahead":
            ignored |= given & {"sparse_correct", "late"}
        if settings.sparse_rank == "inline":
            ignored |= given & {"late"}
    for name in sorted(ignored):
        value = getattr(settings, name)
        raise InputError(f"--{name.replace('_', '-')} {value}: does nothing with {named}")
