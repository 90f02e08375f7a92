"""PrmVerifier: a process reward model whose KV stays on the tree, and the head that it reads.

A node's encoding shares the longest common token prefix with its parent's; only the rest is
prefilled, and belongs to the node (search-and-learn re-encodes whole paths).
A head makes one value per token of hidden states, as `spec.Head` declares it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby, islice, takewhile
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from beamwright.errors import InputError
from beamwright.kv.segments import Path as KVPath
from beamwright.kv.segments import PathPart, Segment, truncate_path
from beamwright.models.decoder import Linear
from beamwright.models.linear import prepack
from beamwright.models.load import LoadedModel, is_out_of_memory
from beamwright.models.prefill import PrefillRequest
from beamwright.models.shape import HEAD_TOKENS
from beamwright.models.tree_model import TreeModel
from beamwright.models.weights import check_finite, read_tensors
from beamwright.protocols import Traits
from beamwright.tree import Node, by_root
from beamwright.verify.encode import Encoded, PathEncoder, common_prefix
from beamwright.verify.spec import AGGREGATES, Head, VerifierSpec

OWNER = "verifier"
ValueHead = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Values of chosen tokens.

From hidden states [tokens, hidden] of one step's encoding, in order, their token ids [tokens],
and indices of the tokens to read. A head that looks back reads hidden[at - 1].
"""
_LEAST_PIECE = 32  # tokens whose values are made together, see `_in_pieces`
_BROKEN = (SafetensorError, UnpicklingError, OSError, EOFError, ValueError, RuntimeError)
_ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda values: values.softmax(-1)[:, 1],  # of [tokens, 2], the second column
    "sigmoid": lambda values: values[:, 0].sigmoid(),
    "exp": lambda values: values[:, 0].exp(),
    "identity": lambda values: values[:, 0],
}


@dataclass(eq=False)
class VerifierState:
    """What nodes of equal paths hold: their tokens, the last step's segment, and all segments.

    Equal tokens, cut into equal segments, since cuts decide last bits, and read at equal places.
    score: of the last step. users: nodes that hold it. below: the states that follow it, by what
    they add; beside: the one of these tables that it is in itself.
    """

    token_ids: list[int]
    segment: Segment
    path: KVPath
    key: tuple[object, ...] = ()
    beside: dict[tuple[object, ...], VerifierState] = field(default_factory=dict)
    below: dict[tuple[object, ...], VerifierState] = field(default_factory=dict)
    score: float | None = None
    users: int = 1


class PrmVerifier:
    """Scores steps by a declared format (`VerifierSpec`)."""

    def __init__(self, spec: VerifierSpec, model: LoadedModel, tree_model: TreeModel) -> None:
        if model.codec is None:
            raise ValueError("a verifier needs a tokenizer")
        self.spec, self.model = spec, model
        self.name = spec.name if model.folder is None else str(model.folder)
        self.default_aggregate: str = spec.aggregate
        self.traits = Traits(beside_decoding=True, takes_paths=True, sees=spec.sees)
        self.probabilities = spec.gives_probabilities
        self.tree_model = tree_model
        self._encoder = PathEncoder(spec, model.codec)
        self._head = make_head(spec, model)
        # A head that looks back needs the hidden state before the first new token.
        self._look_back = 1 if spec.head.looks_back else 0

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """A score per step; None for an empty step or one beyond the verifier's context.

        Steps above that were not scored are read with it, and their path's score is its own.
        Steps of one path may come together, parents first: they are read in one pass.
        Steps whose paths are the same tokens are computed once, as long as one of them is there.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold the new tokens.
        """
        work = self._enter(nodes)
        hidden = self.tree_model.prefill([request for _, _, request in work])
        values = self._read([(encoded, request) for _, encoded, request in work], hidden)
        for (state, _, _), value in zip(work, values, strict=True):
            state.score = value
        return [node.handles[OWNER].score for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Free the segments of these nodes that no other holds."""
        for node in nodes:
            state: VerifierState | None = node.handles.pop(OWNER, None)
            if state is None:
                continue
            state.users -= 1
            if not state.users:
                self.tree_model.store.free(state.segment)
                state.beside.pop(state.key, None)

    @torch.inference_mode()
    def restore(self, nodes: Sequence[Node]) -> None:
        """Give scored nodes of a rebuilt tree their KV again; no score is read.

        nodes: parents come first; all ancestors that were scored are among them. Tokens that this
        costs count as recomputed, not as the nodes' own.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold them.
        """
        scored = (node for node in nodes if node.turn is None and node.answers)
        for _, same in groupby(scored, key=lambda node: node.depth):
            level = list(same)
            usages = [node.usage.copy() for node in level]
            self._begin(node for node in level if node.parent is None)
            work = self._enter(node for node in level if node.parent is not None)
            self.tree_model.prefill([request for _, _, request in work])
            for node, usage in zip(level, usages, strict=True):
                spent = node.usage["verifier_prefilled"] - usage["verifier_prefilled"]
                self.tree_model.store.counts.recomputed_tokens += spent
                node.usage = usage
                node.handles[OWNER].score = node.step_score

    def _enter(self, nodes: Iterable[Node]) -> list[tuple[VerifierState, Encoded, PrefillRequest]]:
        """Put the handles of these in place; what must be computed for them."""
        work, trees = [], by_root(nodes)
        self._begin(trees)
        for root, below in trees.items():
            scored = partial(_scored_above, beside=frozenset(below))
            encodings = self._encoder.encode(root.problem_text, below, scored)
            for node, encoded in zip(below, encodings, strict=True):
                if (request := self._request(node, encoded)) is not None:
                    work.append((node.handles[OWNER], encoded, request))
        return work

    def _begin(self, roots: Iterable[Node]) -> None:
        """Give every root the KV of its problem's prefix, once.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold it.
        """
        new = [root for root in roots if OWNER not in root.handles]
        requests = []
        for root in new:
            token_ids = self._encoder.encode_prefix(root)
            if len(token_ids) > self.tree_model.decoder.shape.context:
                token_ids = []  # no path of this problem fits: none will be scored
            segment = self.tree_model.store.create()
            path = (PathPart(segment, len(token_ids)),)
            root.handles[OWNER] = VerifierState(token_ids, segment, path)
            if token_ids:
                root.usage["verifier_prefilled"] += len(token_ids)
                requests.append(PrefillRequest((), segment, token_ids, 0, read=()))
        try:
            self.tree_model.prefill(requests)
        except BaseException:
            self.release(new)
            raise

    def _request(self, node: Node, encoded: Encoded) -> PrefillRequest | None:
        """What must be computed for this node; its handle is in place afterwards."""
        token_ids, shape, store = (
            encoded.token_ids,
            self.tree_model.decoder.shape,
            self.tree_model.store,
        )
        parent: VerifierState = _scored_above(node).handles[OWNER]
        if not encoded.read_at or len(token_ids) > shape.context:  # the node is where its parent is
            node.handles[OWNER] = VerifierState(parent.token_ids, store.create(), parent.path)
            return None
        if max(token_ids) >= shape.vocab:
            raise InputError(
                f"verifier {self.name}: its tokenizer has tokens that it does not know"
            )
        shared = common_prefix(parent.token_ids, token_ids)
        shared = min(shared, len(token_ids) - 1, *encoded.read_at)
        start = max(0, shared - self._look_back)
        new = token_ids[start:]
        key = (start, *new, None, *encoded.read_at, None, *encoded.sizes)
        if (state := parent.below.get(key)) is not None:  # a node of an equal path has had it
            state.users += 1
            node.handles[OWNER] = state
            return None
        path = truncate_path(parent.path, start)
        segment = store.create(start=start)
        whole = (*path, PathPart(segment, len(new)))
        state = VerifierState(token_ids, segment, whole, key, parent.below)
        node.handles[OWNER] = parent.below[key] = state
        node.usage["verifier_prefilled"] += len(new)
        node.usage["verifier_reused"] += start
        request = PrefillRequest(path, segment, new, start)
        if not self._look_back:
            request.read = sorted({index - start for index in encoded.read_at})
        return request

    def _read(
        self, work: list[tuple[Encoded, PrefillRequest]], hidden: list[torch.Tensor]
    ) -> list[float]:
        """Values of all steps in one pass through the head, combined per step."""
        if not work:
            return []
        device = hidden[0].device
        at: list[int] = []
        token_ids: list[int] = []  # of the hidden states
        for encoded, request in work:
            known = request.reads(0, len(request.token_ids))
            place = {token: len(token_ids) + i for i, token in enumerate(known)}
            at.extend(place[index - request.start] for index in encoded.read_at)
            token_ids.extend(request.token_ids[token] for token in known)
        # Whole vector registers: else sigmoid's last elements take another path than the rest. On a
        # card libraries choose kernels by the rows, and no self-test asks a head: always as many.
        piece = _LEAST_PIECE if device.type == "cpu" else HEAD_TOKENS
        at.extend(at[:1] * (-len(at) % piece))
        ids = torch.tensor(token_ids, device=device)
        read = _in_pieces(self._head, torch.cat(hidden), ids, torch.tensor(at, device=device))
        values = iter(read.tolist())
        combine, aggregate = AGGREGATES[self.spec.combine], AGGREGATES[self.spec.aggregate]
        scores: list[float] = []
        for encoded, _ in work:
            of_steps = [list(islice(values, size)) for size in encoded.sizes]
            # A minimum would pass over NaN.
            finite = all(math.isfinite(value) for of_step in of_steps for value in of_step)
            scores.append(aggregate([*map(combine, of_steps)]) if finite else math.nan)
        return scores


def _scored_above(node: Node, beside: Container[Node] = ()) -> Node:
    """The nearest step above it in its reply that was scored, or is with it, `beside` it; or
    the root: every reply begins behind the problem, turns and earlier replies are not read."""
    steps = reversed(node.reply()[:-1])
    return next((s for s in steps if OWNER in s.handles or s in beside), node.root)


# --- heads -----------------------------------------------------------------------------------


def make_head(spec: VerifierSpec, model: LoadedModel) -> ValueHead:
    """The head that the spec declares, with its weights read.

    Raises:
        InputError: if its tokens or its weights are not there.
    """
    decoder, activate, kind = model.decoder, _ACTIVATE[spec.activation], spec.head.kind
    if kind == "logit_pair":
        pair = [token_id(token, model) for token in (spec.head.bad, spec.head.good)]
        return lambda hidden, token_ids, at: activate(decoder.logits(hidden[at])[:, pair])
    layers = [] if kind == "token_logprob" else _read_layers(spec, model)
    looks_back = kind in ("token_logprob", "token_mlp")
    between = F.gelu if looks_back else F.relu

    def product(x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(layers):
            x = layer(between(x) if number else x)
        return x

    if not looks_back:
        return lambda hidden, token_ids, at: activate(decoder.by_rows(product, hidden[at]))

    def values(hidden: torch.Tensor, token_ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Of P(token right | prefix right): from the state before the token, and the token."""
        previous, chosen = hidden[at - 1], token_ids[at]
        logprobs = decoder.logits(previous).float().log_softmax(-1)
        own = logprobs.gather(1, chosen.unsqueeze(1))
        parts = {
            "previous_hidden": lambda: previous,
            "token_embedding": lambda: decoder.embedded(chosen),
            "logprob": lambda: own,
            "entropy": lambda: -(logprobs.exp() * logprobs).sum(-1, keepdim=True),
            "gap": lambda: logprobs.amax(-1, keepdim=True) - own,
        }
        features = [parts[name]() for name in spec.head.features or ("logprob",)]
        x = torch.cat([feature.to(hidden.dtype) for feature in features], dim=1)
        return activate(decoder.by_rows(product, x))

    return values


def _in_pieces(
    head: ValueHead,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    at: torch.Tensor,
    piece_tokens: int = HEAD_TOKENS,
) -> torch.Tensor:
    """Values of the tokens `at`, a piece at a time: a head may make logits of a whole vocabulary.
    Pieces are halved where there is no memory for them."""
    found: list[torch.Tensor] = []
    for piece in at.split(piece_tokens):
        try:
            found.append(head(hidden, token_ids, piece))
            continue
        except (MemoryError, RuntimeError) as error:  # holds what the head has made until it ends
            if not is_out_of_memory(error) or piece_tokens == _LEAST_PIECE:
                raise
        found.append(_in_pieces(head, hidden, token_ids, piece, piece_tokens // 2))
    return torch.cat(found)


def token_id(token: str | int | None, model: LoadedModel) -> int:
    """The id of a token that is given by text or id."""
    vocab, where = model.decoder.shape.vocab, f"verifier {model.folder}"
    if type(token) is int:
        if not 0 <= token < vocab:
            raise InputError(f"{where}: there is no token {token}, of {vocab}")
        return token
    ids = model.codec.encode(str(token or "")) if model.codec else []
    if len(ids) != 1 or ids[0] >= vocab:
        raise InputError(f"{where}: {token!r} is {len(ids)} tokens, not one")
    return ids[0]


def _stored(head: Head, folder: Path, where: str) -> dict[str, torch.Tensor]:
    """A head's tensors by name; one bare layer (`.pt`) is `layers.0`."""
    if head.file is None:
        names = [f"{layer}.{part}" for layer in head.layers for part in ("weight", "bias")]
        return read_tensors(folder, names)
    file = folder / head.file
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        stored = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(stored, dict):
            raise ValueError(f"a {type(stored).__name__}, not tensors by name")
    except _BROKEN as error:
        line = " ".join(str(error).split())
        raise InputError(f"{where}: cannot be read ({line})") from error
    tensors = {name: t for name, t in stored.items() if isinstance(t, torch.Tensor)}
    return {name if "." in name else f"layers.0.{name}": t for name, t in tensors.items()}


def _read_layers(spec: VerifierSpec, model: LoadedModel) -> list[Linear]:
    head, folder = spec.head, model.folder or Path(".")
    where = f"verifier head {folder if head.file is None else folder / head.file}"
    stored = _stored(head, folder, where)
    dtype, device = model.decoder.dtype, model.decoder.device
    tensors = {name: tensor.to(device, dtype) for name, tensor in stored.items()}
    for name, tensor in tensors.items():
        check_finite(tensor, stored[name], f"{where}: {name}")
    numbered = takewhile(lambda n: f"{n}.weight" in tensors, map("layers.{}".format, count()))
    names = head.layers or [*numbered] or ["layers.0"]
    for name in names:
        if f"{name}.weight" not in tensors:
            raise InputError(f"{where}: no tensor named {name}.weight")
    layers = [Linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in names]
    width = model.decoder.shape.hidden
    if head.kind == "token_mlp":
        wide = ("previous_hidden", "token_embedding")
        width = sum(width if feature in wide else 1 for feature in head.features)
    for name, layer in zip(names, layers, strict=True):  # each takes what the one before gives
        weight, bias = layer.weight, layer.bias
        if weight.dim() != 2 or weight.shape[1] != width or not weight.shape[0]:
            raise InputError(
                f"{where}: {name}.weight is {list(weight.shape)}, [outputs, {width}] is expected"
            )
        width = weight.shape[0]
        if bias is not None and list(bias.shape) != [width]:
            raise InputError(f"{where}: {name}.bias is {list(bias.shape)}, [{width}] is expected")
    needed = 2 if spec.activation == "softmax" else 1
    if width != needed:
        given = f"{names[-1]}.weight gives {width} values"
        raise InputError(f"{where}: {given}, and {spec.activation} needs {needed}")
    return [prepack(layer) for layer in layers]
