"""What settings leave open, settled for the models and the machine at hand, and what does not fit.

The faster schedule, the attention that sparse decoding asks for, and how many rows it has room
for. Knows settings, sizes and this machine; loads no models (LBS, section 4; AsyncSpade).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from beamwright.attention.protocols import AttentionBackend
from beamwright.attention.tree import TreeAttention
from beamwright.config import Settings
from beamwright.errors import InputError, format_bytes
from beamwright.models.adapter import AdaptedDecoder
from beamwright.models.decoder import Decoder
from beamwright.models.hf_config import find_shape
from beamwright.models.load import LoadedModel
from beamwright.plan.costs import Roofline
from beamwright.plan.fits import Scorer
from beamwright.plan.machines import (
    DEFAULT_PROFILE,
    HardwareProfile,
    captured,
    card_of_device,
    card_profile,
    find_profile,
    over_link,
    processor,
)
from beamwright.plan.sparse import Choice, choose_sparse
from beamwright.plan.workload import Workload
from beamwright.sections import SparseSettings
from beamwright.solver.memory import MemoryPlan, ModelBytes
from beamwright.sparse.rule import SparseRule
from beamwright.sparse.view import SparseAttention

TYPICAL_PROMPT_TOKENS = 128
_TYPICAL_STEP_TOKENS = 32


def schedule_name(settings: Settings) -> str:
    """The schedule that `--schedule` stands for.

    `auto` is locality: where everything fits it is one group and never touches the link, and it
    gives the same bits on any budget. Layer-wise offloading is a baseline, never a default.
    """
    schedule = settings.schedule.schedule
    if schedule != "auto":
        return schedule
    # With all KV on the host, nothing has to leave the device.
    return "in-gpu" if settings.sparse.sparse_home == "host" else "locality"


def check_verifiers(settings: Settings, decoder: Decoder) -> None:
    """Raises InputError if there are to be several verifiers, and their model is one thread's."""
    count = settings.schedule.verifiers
    if count > 1 and isinstance(decoder, AdaptedDecoder):
        why = "runs transformers' modules, which one thread at a time may call"
        raise InputError(f"--verifiers {count}: --verifier {settings.model.scorer} {why}")


def check_layers(settings: Settings) -> None:
    """Raises InputError if what was asked for does not know the model's layers."""
    asked = "--schedule layerwise" if settings.schedule.schedule == "layerwise" else None
    kept, on_host = settings.model.kv_dtype, settings.sparse.sparse_home == "host"
    if kept != "auto" and (asked or on_host):
        raise InputError(f"--kv-dtype {kept}: not with {asked or '--sparse-home host'}")
    asked = asked if settings.sparse.sparse in ("off", "auto") else "--sparse"
    attention = settings.model.attention
    copies = f"--attention {attention}" if attention.endswith("dense") else None
    if asked is None and copies is None:
        return
    shape = find_shape(settings.model)
    if shape.states or (asked and shape.groups):
        own = "recurrent layers"
        if not shape.states:
            own = "layers with windows, soft caps or sizes of their own"
        raise InputError(
            f"{asked or copies}: --model {settings.model.model} has {own}, which it does not know"
        )


def expected_workload(settings: Settings, context: int) -> Workload:
    """The longest search that the settings allow, behind a prompt of usual length."""
    search = settings.search
    step_tokens = settings.step.step_tokens or _TYPICAL_STEP_TOKENS
    longest = context - TYPICAL_PROMPT_TOKENS
    most_steps = search.max_rounds * search.verify_every
    limits = [longest, most_steps * step_tokens, settings.step.max_tokens or longest]
    return Workload(
        num_beams=search.n,
        width=search.width if search.n % search.width == 0 else 1,
        prompt_tokens=TYPICAL_PROMPT_TOKENS,
        generate_tokens=max(1, min(limits)),
        step_tokens=step_tokens,
    )


def machine_profile(device: str, *, graphs: bool = True) -> HardwareProfile:
    """The card by its data sheet; the CPU as `doctor --probe` found it, else a named one.

    A card that nobody has listed is taken for the default one, with its own memory. graphs: its
    steps are captured.
    """
    if torch.device(device).type == "cuda":
        found = torch.cuda.get_device_properties(device)
        card = card_of_device(found.name, found.total_memory)
        profile = find_profile(DEFAULT_PROFILE) if card is None else card_profile(card)
        profile = replace(profile, device_memory_bytes=found.total_memory)
        return captured(profile) if graphs else profile
    return processor()


# --- sparse decoding --------------------------------------------------------------------------


def generator_attention(
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
    if rule.how.query == "ahead" and loaded.decoder.shape.built is not None:
        raise InputError(f"{named}: foresees queries, which --decoder transformers cannot")
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


def with_sparse(
    settings: Settings,
    loaded: LoadedModel,
    backend: AttentionBackend,
    sizes: ModelBytes,
    plan: MemoryPlan,
    scored_by: ModelBytes | None,
) -> tuple[Settings, str]:
    """What `--sparse auto` stands for (`plan.sparse`), and why."""
    model, schedule, sparse = settings.model, settings.schedule, settings.sparse
    # Rows that read everything would have all of it cross the link.
    usual = sparse.sparse_from == SparseSettings().sparse_from
    known = {"sparse": "exact", "sparse_home": "host"} | ({"sparse_from": 0} if usual else {})
    found = settings.model_copy(update={"sparse": sparse.model_copy(update=known)})
    on_device = schedule.model_copy(update={"schedule": "in-gpu"})
    profiles = (machine_profile(model.device, graphs=graphs) for graphs in (True, False))
    full, plain = (
        Roofline(sizes.costs, over_link(profile, schedule.link_bandwidth)) for profile in profiles
    )
    scorer, kv_bytes = None, plan.generator_kv_bytes
    if scored_by is not None:
        scorer = Scorer(scored_by.costs, plan.verifier_kv_bytes // scored_by.parts)
    try:
        if schedule.schedule != "auto":
            raise InputError(f"--schedule {schedule.schedule} says where KV is")
        generator_attention(found.model_copy(update={"schedule": on_device}), loaded, backend)
        with_most_rows(found, sizes, kv_bytes)
        check_layers(found)
        workload = expected_workload(settings, sizes.shape.context)
        here = full, plain, processor(), kv_bytes
        choice = choose_sparse(workload, *here, sparse.select, scorer)
    except InputError as error:
        choice = Choice("off", str(error))
    if choice.method == "off":
        sparse = sparse.model_copy(update={"sparse": "off"})
        return settings.model_copy(update={"sparse": sparse}), choice.why
    return found, choice.why


def with_most_rows(settings: Settings, generator: ModelBytes, kv_bytes: int) -> Settings:
    """With no more rows at a time than the device has room for what they select, shared or not.

    kv_bytes: of the device, for that.

    Raises:
        InputError: if there is none.
    """
    rule = sparse_rule(settings.sparse)
    if rule is None or settings.sparse.sparse_home != "host":
        return settings
    sets = generator.shape.heads // generator.shape.kv_heads if rule.how.each == "query" else 1
    row_bytes = sets * rule.budget(generator.shape.context) * generator.kv_per_token
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
    """What the settings say; None where decoding reads all."""
    if settings.sparse in ("off", "auto") or settings.select == 1.0:
        return None
    how = settings.sparse_from, settings.sparse_layers, settings.sparse_correct
    return SparseRule(settings.sparse, settings.select, *how)
