"""Resolve settings that are `auto`: the schedule, sparse decoding, and the number of rows.

The functions derive these values from the models' sizes and this machine, and raise InputError for
settings that a model does not support. They load no model (LBS, section 4; AsyncSpade).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from beamwright.attention.protocols import AttentionBackend, KVMethod
from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.models.decoder import Decoder
from beamwright.models.hf_config import find_shape
from beamwright.plan.costs import Roofline
from beamwright.plan.fits import VerifierCosts
from beamwright.plan.machines import (
    DEFAULT_PROFILE,
    HardwareProfile,
    card_of_device,
    card_profile,
    cpu_profile,
    find_profile,
    with_cuda_graphs,
    with_link_bandwidth,
)
from beamwright.plan.sparse import SparseChoice, choose_sparse
from beamwright.plan.workload import Workload
from beamwright.schedule import schedule_entry
from beamwright.sections import SparseSettings
from beamwright.solver.memory import MemoryPlan
from beamwright.solver.model_bytes import ModelBytes
from beamwright.sparse.method import sparse_method

_PROMPT_TOKENS, _STEP_TOKENS = 128, 32  # assumed tokens of a prompt, and of a step


def resolve_schedule(settings: Settings) -> Settings:
    """Return the settings with a concrete schedule, and with settings that follow from it.

    `auto` becomes locality. If all KV fits the device, locality decodes one group and never uses
    the link, and its results are bitwise equal for any KV budget. If all KV is on the host, `auto`
    becomes in-gpu, because there is no KV to move between host and device.
    """
    schedule = settings.schedule
    if schedule.schedule == "auto":
        name = "locality" if kv_method(settings).make_store is None else "in-gpu"
        schedule = schedule.model_copy(update={"schedule": name})
    return settings.model_copy(
        update={"schedule": schedule_entry(schedule).with_fixed_settings(schedule)}
    )


def kv_method(settings: Settings) -> KVMethod:
    """Return the store and attention of the generator's KV, as schedule and `--sparse` need them.

    Raises:
        InputError: if the options of schedule and sparse decoding exclude each other.
    """
    entry = schedule_entry(settings.schedule)
    method = KVMethod(has_tier=not entry.resident) if entry.kv_method is None else entry.kv_method()
    return sparse_method(settings, method)


def check_layers(settings: Settings) -> None:
    """Check that the requested options support the layers of the model.

    Raises:
        InputError: for an option that does not support a layer.
    """
    kept, method = settings.model.kv_dtype, kv_method(settings)
    if kept != "auto" and method.home_option is not None:
        raise InputError(f"--kv-dtype {kept} cannot be combined with {method.home_option}")
    asked = method.option
    attention = settings.model.attention
    copies = f"--attention {attention}" if attention.endswith("dense") else None
    if asked is None and copies is None:
        return
    shape = find_shape(settings.model)
    if shape.states or (asked and shape.groups):
        own = "recurrent layers"
        if not shape.states:
            own = "layers with attention windows, soft caps or different sizes"
        raise InputError(
            f"{asked or copies} does not support --model {settings.model.model}, which has {own}"
        )


def machine_profile(device: str, *, graphs: bool = True) -> HardwareProfile:
    """Return the hardware profile of a device.

    A known GPU has a profile from its data sheet. An unknown GPU gets the default GPU's profile
    with its own memory size. A CPU has the profile that `doctor --probe` measured, or else a
    default one.

    graphs: True if decode steps run as captured CUDA graphs.
    """
    if torch.device(device).type == "cuda":
        device_facts = torch.cuda.get_device_properties(device)
        card = card_of_device(device_facts.name, device_facts.total_memory)
        profile = find_profile(DEFAULT_PROFILE) if card is None else card_profile(card)
        profile = replace(profile, device_memory_bytes=device_facts.total_memory)
        return with_cuda_graphs(profile) if graphs else profile
    return cpu_profile()


def expected_workload(settings: Settings, context: int) -> Workload:
    """Return the longest search that the settings allow, after a prompt of usual length.

    context: the generator's context in tokens.
    """
    search, step_tokens = settings.search, settings.step.step_tokens or _STEP_TOKENS
    longest = max(1, context - _PROMPT_TOKENS)
    most = search.max_rounds * search.verify_every * step_tokens
    tokens = max(1, min(longest, most, settings.step.max_tokens or longest))
    width = search.width if search.n % search.width == 0 else 1
    return Workload(search.n, width, _PROMPT_TOKENS, tokens, min(step_tokens, tokens))


# --- sparse decoding --------------------------------------------------------------------------


def with_sparse(
    settings: Settings,
    decoder: Decoder,
    backend: AttentionBackend,
    models: Sequence[ModelBytes],
    plan: MemoryPlan,
) -> tuple[Settings, str]:
    """Return the settings with a method in place of `--sparse auto`, and the reason, as text.

    `plan.sparse` decides for the longest search that the settings allow, after a prompt of
    `_PROMPT_TOKENS` tokens.

    models: the generator and, if it keeps KV, the verifier.
    """
    schedule, sparse, generator = settings.schedule, settings.sparse, models[0]
    # With KV on the host, a row that reads all tokens would transfer all of its KV over the link.
    usual = sparse.sparse_from == SparseSettings().sparse_from
    known = {"sparse": "exact", "sparse_home": "host"} | ({"sparse_from": 0} if usual else {})
    hosted = settings.model_copy(update={"sparse": sparse.model_copy(update=known)})
    full, plain = (
        Roofline(generator.costs, with_link_bandwidth(profile, schedule.link_bandwidth))
        for profile in (machine_profile(settings.model.device, graphs=on) for on in (True, False))
    )
    scorer, kv_bytes = None, plan.generator_kv_bytes
    for verifier in models[1:]:
        scorer = VerifierCosts(verifier.costs, plan.verifier_kv_bytes // verifier.parts)
    try:
        if schedule.schedule != "auto":
            raise InputError(f"--schedule {schedule.schedule} decides where KV is kept")
        method = kv_method(hosted)
        assert method.attend is not None
        method.attend(hosted, backend, decoder)
        with_row_limit(hosted, method, generator, kv_bytes)
        check_layers(hosted)
        workload = expected_workload(settings, generator.shape.context)
        here = full, plain, cpu_profile(), kv_bytes
        choice = choose_sparse(workload, *here, sparse.select, scorer)
    except InputError as error:
        choice = SparseChoice("off", str(error))
    if choice.method == "off":
        sparse = sparse.model_copy(update={"sparse": "off"})
        return settings.model_copy(update={"sparse": sparse}), choice.why
    return hosted, choice.why


def with_row_limit(
    settings: Settings, method: KVMethod, generator: ModelBytes, kv_bytes: int
) -> Settings:
    """Return the settings with `max_batch` lowered to the rows that fit the device's KV memory.

    Raises:
        InputError: if not even one row fits.
    """
    if method.most_rows is None:
        return settings
    rows = method.most_rows(generator.shape, generator.kv_per_token, kv_bytes)
    schedule = settings.schedule
    most = min(rows, schedule.max_batch or rows)
    return settings.model_copy(update={"schedule": schedule.model_copy(update={"max_batch": most})})
