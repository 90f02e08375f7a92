"""A verifier inside the generator: a small head on the hidden states that tokens were drawn from.

ReProbe and STEP (2601.09093): what a generator knows of its own path is in its hidden states, which
are there anyway. Of each token the head reads the final state that it was drawn from, the token's
embedding and its log-probability, and says how likely it is right; a step's score is the product
over its tokens. No second model, no KV, no token read. The state at a step's end alone, as in STEP,
tells problems apart and not paths, on the bundled models (docs/log/2026-11.md#probe).
The lab trains one (`beamwright probe`). Knows the head's file and its scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from beamwright.engine.row import state_of
from beamwright.errors import InputError, message_of
from beamwright.io import write_whole
from beamwright.models.decoder import Decoder, Linear, in_tiles
from beamwright.models.digest import digest_later
from beamwright.models.linear import prepack
from beamwright.models.load import LoadedModel
from beamwright.models.weights import check_finite
from beamwright.protocols import Traits
from beamwright.tree import Node
from beamwright.verify.scorers import PROBE

OWNER = "verifier"
FORMAT = "beamwright probe 1"
_NAMES = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
_TILE = 32
"""Rows of a product, and of the sigmoid behind it: always so many, so that a value's bits do not
depend on what is scored beside it."""


def features(decoder: Decoder, hidden: Tensor, token_ids: Tensor, logprobs: Tensor) -> Tensor:
    """What a head reads of tokens [tokens, 2 * hidden + 1].

    hidden: [tokens, hidden], what each was drawn from; logprobs: [tokens]. Of half precisions the
    head's own sums are float32.
    """
    dtype = torch.promote_types(decoder.dtype, torch.float32)
    parts = hidden, decoder.embedded(token_ids), logprobs[:, None]
    return torch.cat([part.to(dtype) for part in parts], 1)


@dataclass(frozen=True)
class ProbeHead:
    """Two layers: `features` to `width` numbers, ReLU, to the logit that a token is right.

    tensors: float32 [width, features], [width], [1, width], [1]. generator: SHA-256 of the model's
    files that it reads; model: how that was named. report: of its training.
    """

    tensors: Sequence[Tensor]
    generator: str
    model: str
    report: Mapping[str, Any]

    def save(self, file: Path) -> None:
        """Raises InputError if the file cannot be written."""
        facts = {"format": FORMAT, "generator": self.generator, "model": self.model}
        facts["report"] = json.dumps(self.report)
        tensors = dict(zip(_NAMES, (t.contiguous() for t in self.tensors), strict=True))
        write_whole(file, save(tensors, facts))


def read_head(file: Path) -> ProbeHead:
    """Raises InputError if it is not there, damaged, or no head of this format."""
    where = f"--verifier {PROBE}:{file}"
    if not file.is_file():
        raise InputError(f"{where}: no such file; `beamwright probe train` makes one")
    try:
        with safe_open(file, "pt") as stored:
            facts = stored.metadata() or {}
            if facts.get("format") != FORMAT:
                found = facts.get("format", "no head of `beamwright probe train`")
                raise InputError(f"{where}: {found}; this program reads {FORMAT}")
            tensors = [stored.get_tensor(name) for name in _NAMES]
            head = ProbeHead(
                tensors, facts["generator"], facts["model"], json.loads(facts["report"])
            )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{where}: cannot be read ({message_of(error)})") from error
    shapes = [list(tensor.shape) for tensor in tensors]
    width = len(tensors[1])
    if shapes != [[width, shapes[0][-1]], [width], [1, width], [1]]:
        raise InputError(f"{where}: is damaged (its layers are {shapes})")
    for name, tensor in zip(_NAMES, tensors, strict=True):
        check_finite(tensor, tensor, f"{where}: {name}")
    return head


class ProbeVerifier:
    """Scores a step by the chance that all its tokens are right, and those of steps above it that
    nobody has scored: a path's score is the product.

    A path is all that a score depends on. digest: of the head's file.
    """

    default_aggregate = "prod"
    probabilities = True
    traits = Traits(reads_drawn=True, reads_states=True, sees="both")

    def __init__(self, file: Path, generator: LoadedModel, named: str) -> None:
        """named: the generator. Raises InputError for a bad file, or another generator's head."""
        head, decoder = read_head(file), generator.decoder
        self.name, self.head = f"{PROBE}:{file}", head
        digest = generator.digest and generator.digest.result()
        width = 2 * decoder.shape.hidden + 1
        if (digest and digest["sha256"]) != head.generator or head.tensors[0].shape[1] != width:
            raise InputError(
                f"--verifier {self.name}: reads hidden states of the generator {head.model}; "
                f"the files of --model {named} are others"
            )
        self.digest, self._decoder = digest_later(file), decoder
        dtype = torch.promote_types(decoder.dtype, torch.float32)
        first, first_bias, last, last_bias = (
            tensor.to(decoder.device, dtype) for tensor in head.tensors
        )
        self._layers = prepack(Linear(first, first_bias)), prepack(Linear(last, last_bias))

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """A chance per step; None of one without a token."""
        paths = [_unscored(node) for node in nodes]
        self._read([step for path in paths for step in path if OWNER not in step.handles])
        return [
            math.exp(math.fsum(step.handles[OWNER] for step in path)) if node.token_ids else None
            for node, path in zip(nodes, paths, strict=True)
        ]

    def _read(self, steps: Sequence[Node]) -> None:
        """Put the log of each step's chance in its place; its states are needed no more."""
        hidden, counts = list[Tensor](), list[int]()
        ids, logprobs = list[int](), list[float]()
        for step in steps:
            states = () if (state := state_of(step)) is None else state.drawn_from
            count = sum(map(len, states))
            counts.append(count)
            if state is not None and count:
                state.drawn_from = ()
                hidden += states
                # Of tokens taken from a sibling (`--speculation truncate`) there are none.
                ids += step.token_ids[-count:]
                logprobs += step.logprobs[-count:]
        values = list[float]()
        if hidden:
            device = hidden[0].device
            known = torch.tensor(ids, device=device), torch.tensor(logprobs, device=device)
            rows = features(self._decoder, torch.cat(hidden), *known)
            values = in_tiles(_TILE, self._logs, rows)[0].tolist()
        for step, count in zip(steps, counts, strict=True):
            step.handles[OWNER] = math.fsum(values[:count])
            del values[:count]

    def _logs(self, rows: Tensor) -> tuple[Tensor]:
        first, last = self._layers
        return (F.logsigmoid(last(first(rows).relu_())[:, 0]),)

    def release(self, nodes: Sequence[Node]) -> None:
        """Forget what is known of these nodes."""
        for node in nodes:
            node.handles.pop(OWNER, None)


def _unscored(node: Node) -> list[Node]:
    """A step, and those right above it that have no score."""
    steps = [node]
    for above in reversed(node.reply()[:-1]):
        if above.step_score is not None:
            break
        steps.append(above)
    return steps
