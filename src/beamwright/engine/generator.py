"""The running batch of a generator model, put together from settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from beamwright.config import Settings
from beamwright.engine.batching import Batching
from beamwright.engine.graphs import make_replay
from beamwright.engine.lengths import StepLengths
from beamwright.engine.request import Decoding, Decodings
from beamwright.engine.running import RunningBatch
from beamwright.engine.tensor_rows import TensorRows
from beamwright.engine.working_memory import WorkingMemory
from beamwright.models import PrefillRequest, TextCodec, TreeModel
from beamwright.progress import Progress


def make_running_batch(
    model: TreeModel,
    codec: TextCodec | None,
    settings: Settings,
    *,
    token_stats: Collection[str] = (),
    progress: Progress | None = None,
) -> RunningBatch:
    """Rows on the model's device, at first none.

    token_stats: names of what is kept of every token's distribution (`sampling.TOKEN_STATS`).
    """
    schedule = settings.schedule

    def not_captured(why: str) -> None:
        batch.graphs_failed = why

    replay = make_replay(schedule.graphs, model, not_captured)
    rows = TensorRows(model, codec, token_stats, replay)
    rows.learn(settings.step)
    default = Decoding(settings.sampling, settings.step, settings.search.seed)

    @torch.inference_mode()
    def prefill(requests: Sequence[PrefillRequest]) -> list[torch.Tensor]:
        # A copy: the last row must not keep a whole prompt's states alive.
        return [hidden[-1:].clone() for hidden in model.prefill(requests)]

    batch = RunningBatch(
        rows,
        model.store,
        prefill,
        StepLengths(Decodings(default), model.decoder.shape.context),
        Batching.of(schedule),
        WorkingMemory.of(model),
        progress,
    )
    return batch
