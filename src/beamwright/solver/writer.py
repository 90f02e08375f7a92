"""Who writes the steps of a solver: the running batch, or a generator elsewhere."""

from __future__ import annotations

from collections.abc import Collection

from beamwright.config import Settings
from beamwright.engine.generator import make_running_batch
from beamwright.engine.request import Decoding
from beamwright.errors import InputError
from beamwright.progress import Progress
from beamwright.remote.generator import RemoteGenerator
from beamwright.remote.writer import RemoteSteps
from beamwright.solver.assembly import Parts, Writer


def make_writer(parts: Parts, token_stats: Collection[str], progress: Progress) -> Writer:
    """token_stats: names of what is kept of every token's distribution.

    Raises:
        InputError: for what a generator elsewhere does not say, or has no say in.
    """
    settings = parts.settings
    if isinstance(parts.loaded, RemoteGenerator):
        _check_far(settings, token_stats)
        far, default = (
            parts.loaded,
            Decoding(settings.sampling, settings.step, settings.search.seed),
        )
        most = settings.schedule.max_batch
        return RemoteSteps(far.source, far.codec, far.context, default, most, progress)
    assert parts.generator is not None
    return make_running_batch(
        parts.generator,
        parts.loaded.codec,
        settings,
        token_stats=token_stats,
        progress=progress,
    )


_NOT_FAR = {
    "model": ("weights",),
    "sampling": ("top_logprobs",),
    "memory": ("split",),
    "schedule": (
        "schedule", "planner", "inter_beam", "balance", "prefetch", "reuse", "evict", "victims",
        "link_bandwidth", "batching", "speculation", "verify_ahead", "write_back", "graphs",
    ),
    "sparse": ("sparse",),
}  # fmt: skip
"""Options that are of the generator's KV, or of what it computes."""


def _check_far(settings: Settings, token_stats: Collection[str]) -> None:
    if token_stats:
        raise InputError(
            f"--model {settings.model.model}: does not say {', '.join(sorted(token_stats))} of its "
            "tokens, which this search or verifier reads"
        )
    for section, names in _NOT_FAR.items():
        given, default = getattr(settings, section), type(getattr(settings, section))()
        for name in names:
            value = getattr(given, name)
            if name in given.model_fields_set and value != getattr(default, name):
                raise InputError(
                    f"--{name.replace('_', '-')} {value}: does nothing with --model "
                    f"{settings.model.model}, whose KV is not here"
                )
