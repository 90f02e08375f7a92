"""Probe verifier: a small head on the generator's hidden states from which tokens were sampled.

Hidden states show whether a path is right, and decoding computes them anyway (ReProbe; STEP, arXiv
2601.09093). For each token the head reads the final hidden state from which the token was sampled,
the token's embedding and its log-probability. The head predicts the probability that the token is
right, and a step's score is the product over its tokens. No second model, no further KV and no
prefill are needed. If the head read only the state at the end of a step, as in STEP, its scores on
the bundled models would separate problems but not paths (docs/log/2026-11.md#probe). This module
reads head files and scores steps; the lab trains heads with `beamwright probe`.
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

from beamwright.engine.row import get_generator_state
from beamwright.errors import InputError, message_of
from beamwright.io import write_atomically
from beamwright.models.decoder import Decoder, Linear, apply_in_tiles
from beamwright.models.digest import start_digest
from beamwright.models.linear import prepack_linear
from beamwright.models.load import LoadedModel
from beamwright.models.weights import check_finite
from beamwright.protocols import Traits
from beamwright.tree import Node
from beamwright.verify.scorers import PROBE

OWNER = "verifier"
FORMAT = "beamwright probe 1"
_NAMES = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
# Number of rows of each matrix product and of the sigmoid after it, fixed so that a value is
# bitwise equal in every batch.
_TILE = 32


def probe_features(decoder: Decoder, hidden: Tensor, token_ids: Tensor, logprobs: Tensor) -> Tensor:
    """Return the head's inputs for the given tokens [tokens, 2 * hidden + 1].

    The inputs are float32 if the generator computes in half precision.

    hidden: the hidden states from which the tokens were sampled [tokens, hidden].
    logprobs: the log-probabilities of the tokens [tokens].
    """
    dtype = torch.promote_types(decoder.dtype, torch.float32)
    parts = hidden, decoder.embed_tokens(token_ids), logprobs[:, None]
    return torch.cat([part.to(dtype) for part in parts], 1)


@dataclass(frozen=True)
class ProbeHead:
    """A trained head: Linear-ReLU-Linear from `features` to the logit of "the token is right"."""

    # Weights and biases, float32: [width, features], [width], [1, width], [1].
    tensors: Sequence[Tensor]
    generator: str  # SHA-256 of the files of the generator whose hidden states the head reads
    model: str  # name of the generator
    report: Mapping[str, Any]  # data, losses and accuracy of the training

    def save(self, file: Path) -> None:
        """Write the head to `file`.

        Raises:
            InputError: if the file cannot be written.
        """
        facts = {"format": FORMAT, "generator": self.generator, "model": self.model}
        facts["report"] = json.dumps(self.report)
        tensors = dict(zip(_NAMES, (t.contiguous() for t in self.tensors), strict=True))
        write_atomically(file, save(tensors, facts))


def read_head(file: Path) -> ProbeHead:
    """Read a head.

    Raises:
        InputError: if the file does not exist, is damaged, or is not a head of this format.
    """
    where = f"--verifier {PROBE}:{file}"
    if not file.is_file():
        raise InputError(f"{where}: no such file; `beamwright probe train` makes one")
    try:
        with safe_open(file, "pt") as stored:
            facts = stored.metadata() or {}
            if facts.get("format") != FORMAT:
                found = facts.get("format", "unknown")
                raise InputError(f"{where}: the format is {found}, but must be {FORMAT}")
            tensors = [stored.get_tensor(name) for name in _NAMES]
            head = ProbeHead(
                tensors, facts["generator"], facts["model"], json.loads(facts["report"])
            )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{where}: cannot be read ({message_of(error)})") from error
    shapes = [list(tensor.shape) for tensor in tensors]
    width = len(tensors[1])
    if shapes != [[width, shapes[0][-1]], [width], [1, width], [1]]:
        raise InputError(f"{where}: the file is damaged (its layers are {shapes})")
    for name, tensor in zip(_NAMES, tensors, strict=True):
        check_finite(tensor, tensor, f"{where}: {name}")
    return head


class ProbeVerifier:
    """Verifier that scores a step by the probability that all its tokens are right.

    A score includes the tokens of directly preceding steps that have no score. A path's score is
    the product of its step scores. A score depends on the path alone, never on the batch.

    digest: future of the digest of the head's file.
    """

    default_aggregate = "prod"
    probabilities = True
    traits = Traits(reads_drawn=True, reads_states=True, sees="both")

    def __init__(self, file: Path, generator: LoadedModel, named: str) -> None:
        """Read the head from `file`.

        named: the name of the generator, for errors.

        Raises:
            InputError: if the file is not valid, or if the head belongs to another generator.
        """
        head, decoder = read_head(file), generator.decoder
        self.name, self.head = f"{PROBE}:{file}", head
        digest = generator.digest and generator.digest.result()
        width = 2 * decoder.shape.hidden + 1
        if (digest and digest["sha256"]) != head.generator or head.tensors[0].shape[1] != width:
            raise InputError(
                f"--verifier {self.name}: trained for the generator {head.model}, but "
                f"--model {named} has other files"
            )
        self.digest, self._decoder = start_digest(file), decoder
        dtype = torch.promote_types(decoder.dtype, torch.float32)
        first, first_bias, last, last_bias = (
            tensor.to(decoder.device, dtype) for tensor in head.tensors
        )
        self._layers = (
            prepack_linear(Linear(first, first_bias)),
            prepack_linear(Linear(last, last_bias)),
        )

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """Return the probability of each step; None for a step without tokens."""
        paths = [_unscored(node) for node in nodes]
        self._read([step for path in paths for step in path if OWNER not in step.handles])
        return [
            math.exp(math.fsum(step.handles[OWNER] for step in path)) if node.token_ids else None
            for node, path in zip(nodes, paths, strict=True)
        ]

    def _read(self, steps: Sequence[Node]) -> None:
        """Store each step's log-probability in its node's handles; drop the hidden states there."""
        hidden, counts = list[Tensor](), list[int]()
        ids, logprobs = list[int](), list[float]()
        for step in steps:
            states = () if (state := get_generator_state(step)) is None else state.drawn_from
            count = sum(map(len, states))
            counts.append(count)
            if state is not None and count:
                state.drawn_from = ()
                hidden += states
                # With `--speculation truncate`, a step's first tokens may come from its sibling.
                # These tokens have no hidden states, and are left out.
                ids += step.token_ids[-count:]
                logprobs += step.logprobs[-count:]
        values = list[float]()
        if hidden:
            device = hidden[0].device
            known = torch.tensor(ids, device=device), torch.tensor(logprobs, device=device)
            rows = probe_features(self._decoder, torch.cat(hidden), *known)
            values = apply_in_tiles(_TILE, self._log_probabilities, rows)[0].tolist()
        for step, count in zip(steps, counts, strict=True):
            step.handles[OWNER] = math.fsum(values[:count])
            del values[:count]

    def _log_probabilities(self, rows: Tensor) -> tuple[Tensor]:
        """Return the log of the probability that each token is right [rows]."""
        first, last = self._layers
        return (F.logsigmoid(last(first(rows).relu_())[:, 0]),)

    def release(self, nodes: Sequence[Node]) -> None:
        """Drop the values stored on these nodes."""
        for node in nodes:
            node.handles.pop(OWNER, None)


def _unscored(node: Node) -> list[Node]:
    """Return `node` and the steps directly before it that have no score, the last step first."""
    steps = [node]
    for above in reversed(node.reply()[:-1]):
        if above.step_score is not None:
            break
        steps.append(above)
    return steps
