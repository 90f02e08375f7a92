"""Verifier with a process reward model (PRM), whose KV is kept per node of the tree.

A path's encoding shares a token prefix with that of its parent's path. Only the remaining tokens
are prefilled, and their KV belongs to the node. (search-and-learn reads whole paths instead.) A
head computes one value per token from the hidden states (`spec.Head`).
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
from beamwright.models.linear import prepack_linear
from beamwright.models.load import LoadedModel, is_out_of_memory
from beamwright.models.prefill import PrefillRequest
from beamwright.models.shape import HEAD_TOKENS
from beamwright.models.tree_model import TreeModel
from beamwright.models.weights import check_finite, read_tensors
from beamwright.protocols import Traits
from beamwright.tree import Node, group_by_root
from beamwright.verify.path_encoder import Encoded, PathEncoder, common_prefix
from beamwright.verify.spec import AGGREGATES, Head, VerifierSpec

OWNER = "verifier"
# Function that computes the values of some tokens [at].
#
# Arguments: hidden states [tokens, hidden], token ids [tokens], and the indices of the tokens to
# read [at]. A head that looks back reads hidden[at - 1].
ValueHead = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_LEAST_PIECE = 32  # minimum number of tokens whose values are computed in one call of the head
_BROKEN = (SafetensorError, UnpicklingError, OSError, EOFError, ValueError, RuntimeError)
_ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda values: values.softmax(-1)[:, 1],  # values [tokens, 2]: the second column
    "sigmoid": lambda values: values[:, 0].sigmoid(),
    "exp": lambda values: values[:, 0].exp(),
    "identity": lambda values: values[:, 0],
}


@dataclass(eq=False)
class VerifierState:
    """KV and score of a path in the verifier, shared by all nodes with equal paths.

    Two paths are equal if they have the same tokens, the same division into segments, and the same
    positions to read. The division matters because it affects the last bits of a score.
    """

    token_ids: list[int]  # token ids of the whole path
    segment: Segment  # KV of the tokens that the last step added
    path: KVPath  # KV of the whole path
    key: tuple[object, ...] = ()  # key of this state in `siblings`
    # The parent state's `children`, from which this state is removed with its last user.
    siblings: dict[tuple[object, ...], VerifierState] = field(default_factory=dict)
    # States of paths with one more step, by the tokens and positions that the step adds.
    children: dict[tuple[object, ...], VerifierState] = field(default_factory=dict)
    score: float | None = None  # score of the last step
    users: int = 1  # number of nodes that hold this state


class PrmVerifier:
    """Verifier that scores steps with a reward model in a declared format (`VerifierSpec`)."""

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
        # A head that looks back reads the hidden state before the first new token, so its hidden
        # states begin one token earlier.
        self._look_back = 1 if spec.head.looks_back else 0

    @torch.inference_mode()
    def score(self, nodes: Sequence[Node]) -> list[float | None]:
        """Return a score per step; None for an empty step or a path beyond the verifier's context.

        If a step's ancestors have no scores, its score is the aggregate over them and itself.
        `nodes` may contain several steps of one path, ancestors first; they are read in one pass.
        Nodes with equal paths share KV, which is freed with the last of these nodes.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold the new tokens.
        """
        work = self._create_states(nodes)
        hidden = self.tree_model.prefill([request for _, _, request in work])
        values = self._read([(encoded, request) for _, encoded, request in work], hidden)
        for (state, _, _), value in zip(work, values, strict=True):
            state.score = value
        return [node.handles[OWNER].score for node in nodes]

    def release(self, nodes: Sequence[Node]) -> None:
        """Drop the verifier's states of these nodes, and free segments that no other node uses."""
        for node in nodes:
            state: VerifierState | None = node.handles.pop(OWNER, None)
            if state is None:
                continue
            state.users -= 1
            if not state.users:
                self.tree_model.store.free(state.segment)
                state.siblings.pop(state.key, None)

    @torch.inference_mode()
    def restore(self, nodes: Sequence[Node]) -> None:
        """Recompute the KV of scored nodes in a rebuilt tree, such as a resumed one.

        Scores stay as they are. The tokens count as recomputed, and not in `node.usage`.

        nodes: parents come first, and all scored ancestors are included.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold the KV.
        """
        scored = (node for node in nodes if node.turn is None and node.answers)
        for _, same in groupby(scored, key=lambda node: node.depth):
            level = list(same)
            usages = [node.usage.copy() for node in level]
            self._prefill_prefixes(node for node in level if node.parent is None)
            work = self._create_states(node for node in level if node.parent is not None)
            self.tree_model.prefill([request for _, _, request in work])
            for node, usage in zip(level, usages, strict=True):
                spent = node.usage["verifier_prefilled"] - usage["verifier_prefilled"]
                self.tree_model.store.counts.recomputed_tokens += spent
                node.usage = usage
                node.handles[OWNER].score = node.step_score

    def _create_states(
        self, nodes: Iterable[Node]
    ) -> list[tuple[VerifierState, Encoded, PrefillRequest]]:
        """Create a `VerifierState` for each node, and return those whose KV must be computed.

        For each new root, the text before the first step is prefilled first. An entry is a state,
        the encoding of its path, and the request that prefills the path's new tokens.
        """
        work, trees = [], group_by_root(nodes)
        self._prefill_prefixes(trees)
        for root, steps in trees.items():
            scored = partial(_nearest_scored, batch=frozenset(steps))
            encodings = self._encoder.encode(root.problem_text, steps, scored)
            for node, encoded in zip(steps, encodings, strict=True):
                if (request := self._create_state(node, encoded)) is not None:
                    work.append((node.handles[OWNER], encoded, request))
        return work

    def _prefill_prefixes(self, roots: Iterable[Node]) -> None:
        """Prefill the text before the first step for every root that has no state yet.

        Raises:
            CapacityError: if the verifier's KV budget cannot hold the KV.
        """
        new = [root for root in roots if OWNER not in root.handles]
        requests = []
        for root in new:
            token_ids = self._encoder.encode_prefix(root)
            if len(token_ids) > self.tree_model.decoder.shape.context:
                token_ids = []  # no path of this problem fits, so no step will be scored
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

    def _create_state(self, node: Node, encoded: Encoded) -> PrefillRequest | None:
        """Create the state of `node`, and return the request that computes its KV.

        The request is None if no KV has to be computed: the step gets no score, or a node with an
        equal path has a state, which is then shared.

        Raises:
            InputError: if the tokenizer has tokens that the model does not have.
        """
        token_ids, shape, store = (
            encoded.token_ids,
            self.tree_model.decoder.shape,
            self.tree_model.store,
        )
        parent: VerifierState = _nearest_scored(node).handles[OWNER]
        # A step without a score gets no state of its own; children continue from its ancestor's.
        if not encoded.read_at or len(token_ids) > shape.context:
            node.handles[OWNER] = VerifierState(parent.token_ids, store.create(), parent.path)
            return None
        if max(token_ids) >= shape.vocab:
            raise InputError(
                f"verifier {self.name}: its tokenizer gives token {max(token_ids)}, but its model "
                f"has a vocabulary of {shape.vocab}"
            )
        shared = common_prefix(parent.token_ids, token_ids)
        shared = min(shared, len(token_ids) - 1, *encoded.read_at)
        start = max(0, shared - self._look_back)
        new = token_ids[start:]
        key = (start, *new, None, *encoded.read_at, None, *encoded.sizes)
        if (state := parent.children.get(key)) is not None:  # another node has an equal path
            state.users += 1
            node.handles[OWNER] = state
            return None
        path = truncate_path(parent.path, start)
        segment = store.create(start=start)
        whole = (*path, PathPart(segment, len(new)))
        state = VerifierState(token_ids, segment, whole, key, parent.children)
        node.handles[OWNER] = parent.children[key] = state
        node.usage["verifier_prefilled"] += len(new)
        node.usage["verifier_reused"] += start
        request = PrefillRequest(path, segment, new, start)
        if not self._look_back:
            request.read = sorted({index - start for index in encoded.read_at})
        return request

    def _read(
        self, work: list[tuple[Encoded, PrefillRequest]], hidden: list[torch.Tensor]
    ) -> list[float]:
        """Return the score of each encoding, from one pass of all tokens through the head.

        hidden: for each entry of `work`, the hidden states that its request reads.
        """
        if not work:
            return []
        device = hidden[0].device
        at: list[int] = []
        token_ids: list[int] = []  # token ids of the joined hidden states
        for encoded, request in work:
            known = request.reads(0, len(request.token_ids))
            place = {token: len(token_ids) + i for i, token in enumerate(known)}
            at.extend(place[index - request.start] for index in encoded.read_at)
            token_ids.extend(request.token_ids[token] for token in known)
        # Fill up the last piece with padding, so that values do not depend on the batch. On a CPU,
        # a sigmoid computes elements that do not fill a vector register by other code. On a GPU,
        # libraries choose kernels by the number of rows, and self-tests do not cover heads, so
        # every piece has the same number of rows.
        piece = _LEAST_PIECE if device.type == "cpu" else HEAD_TOKENS
        at.extend(at[:1] * (-len(at) % piece))
        ids = torch.tensor(token_ids, device=device)
        read = _compute_in_pieces(
            self._head, torch.cat(hidden), ids, torch.tensor(at, device=device)
        )
        values = iter(read.tolist())
        combine, aggregate = AGGREGATES[self.spec.combine], AGGREGATES[self.spec.aggregate]
        scores: list[float] = []
        for encoded, _ in work:
            of_steps = [list(islice(values, size)) for size in encoded.sizes]
            # Check all values here, because the minimum of a step's values could hide a NaN.
            finite = all(math.isfinite(value) for of_step in of_steps for value in of_step)
            scores.append(aggregate([*map(combine, of_steps)]) if finite else math.nan)
        return scores


def _nearest_scored(node: Node, batch: Container[Node] = ()) -> Node:
    """Return the nearest ancestor in the reply of `node` that has a state, or is in `batch`.

    Without such an ancestor, return the root: the verifier reads every reply directly after the
    problem, without turns and earlier replies.

    batch: the nodes of the same call.
    """
    steps = reversed(node.reply()[:-1])
    return next((s for s in steps if OWNER in s.handles or s in batch), node.root)


# --- heads -----------------------------------------------------------------------------------


def make_head(spec: VerifierSpec, model: LoadedModel) -> ValueHead:
    """Create the head that `spec` declares, and read its weights.

    Raises:
        InputError: if the head's tokens or weights do not exist, or do not fit the model.
    """
    decoder, activate, kind = model.decoder, _ACTIVATE[spec.activation], spec.head.kind
    if kind == "logit_pair":
        pair = [find_token_id(token, model) for token in (spec.head.bad, spec.head.good)]
        return lambda hidden, token_ids, at: activate(decoder.logits(hidden[at])[:, pair])
    layers = [] if kind == "token_logprob" else _read_layers(spec, model)
    looks_back = kind in ("token_logprob", "token_mlp")
    between = F.gelu if looks_back else F.relu

    def product(x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(layers):
            x = layer(between(x) if number else x)
        return x

    if not looks_back:
        return lambda hidden, token_ids, at: activate(decoder.apply_padded(product, hidden[at]))

    def values(hidden: torch.Tensor, token_ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the values of the tokens `at`, from each token and the hidden state before it.

        A trained head returns the probability that a token is right if its prefix is right.
        """
        previous, chosen = hidden[at - 1], token_ids[at]
        logprobs = decoder.logits(previous).float().log_softmax(-1)
        own = logprobs.gather(1, chosen.unsqueeze(1))
        parts = {
            "previous_hidden": lambda: previous,
            "token_embedding": lambda: decoder.embed_tokens(chosen),
            "logprob": lambda: own,
            "entropy": lambda: -(logprobs.exp() * logprobs).sum(-1, keepdim=True),
            "gap": lambda: logprobs.amax(-1, keepdim=True) - own,
        }
        features = [parts[name]() for name in spec.head.features or ("logprob",)]
        x = torch.cat([feature.to(hidden.dtype) for feature in features], dim=1)
        return activate(decoder.apply_padded(product, x))

    return values


def _compute_in_pieces(
    head: ValueHead,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    at: torch.Tensor,
    piece_tokens: int = HEAD_TOKENS,
) -> torch.Tensor:
    """Return the values of the tokens `at`, computed in pieces of `piece_tokens`.

    Pieces bound the memory, because a head may compute the logits of the whole vocabulary. If
    memory runs out, a piece is computed in halves.
    """
    parts: list[torch.Tensor] = []
    for piece in at.split(piece_tokens):
        try:
            parts.append(head(hidden, token_ids, piece))
            continue
        # Retry after the `except` block, because inside it `error` keeps the head's tensors alive.
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or piece_tokens == _LEAST_PIECE:
                raise
        parts.append(_compute_in_pieces(head, hidden, token_ids, piece, piece_tokens // 2))
    return torch.cat(parts)


def find_token_id(token: str | int | None, model: LoadedModel) -> int:
    """Return the id of a token that is given by its text or id.

    Raises:
        InputError: if the id does not exist, or if the text is not exactly one token.
    """
    vocab, where = model.decoder.shape.vocab, f"verifier {model.folder}"
    if type(token) is int:
        if not 0 <= token < vocab:
            raise InputError(f"{where}: token {token} does not exist; the model has {vocab}")
        return token
    ids = model.codec.encode(str(token or "")) if model.codec else []
    if len(ids) != 1 or ids[0] >= vocab:
        raise InputError(f"{where}: {token!r} must be one token, not {ids}")
    return ids[0]


def _read_head_tensors(head: Head, folder: Path, where: str) -> dict[str, torch.Tensor]:
    """Return a head's tensors by name; a `.pt` file's single unnamed layer is `layers.0`."""
    if head.file is None:
        names = [f"{layer}.{part}" for layer in head.layers for part in ("weight", "bias")]
        return read_tensors(folder, names)
    file = folder / head.file
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        stored = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(stored, dict):
            raise ValueError(f"a {type(stored).__name__}, not named tensors")
    except _BROKEN as error:
        line = " ".join(str(error).split())
        raise InputError(f"{where}: cannot be read ({line})") from error
    tensors = {name: t for name, t in stored.items() if isinstance(t, torch.Tensor)}
    return {name if "." in name else f"layers.0.{name}": t for name, t in tensors.items()}


def _read_layers(spec: VerifierSpec, model: LoadedModel) -> list[Linear]:
    """Return the linear layers of the head, after checking their names, shapes and values."""
    head, folder = spec.head, model.folder or Path(".")
    where = f"verifier head {folder if head.file is None else folder / head.file}"
    stored = _read_head_tensors(head, folder, where)
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
    # Each layer must have as many inputs as the layer before it has outputs.
    for name, layer in zip(names, layers, strict=True):
        weight, bias = layer.weight, layer.bias
        if weight.dim() != 2 or weight.shape[1] != width or not weight.shape[0]:
            raise InputError(
                f"{where}: {name}.weight is {list(weight.shape)}, but must be [outputs, {width}]"
            )
        width = weight.shape[0]
        if bias is not None and list(bias.shape) != [width]:
            raise InputError(f"{where}: {name}.bias is {list(bias.shape)}, but must be [{width}]")
    needed = 2 if spec.activation == "softmax" else 1
    if width != needed:
        given = f"{names[-1]}.weight gives {width} values"
        raise InputError(
            f"{where}: {given}, but activation {spec.activation} needs {needed}; change activation "
            "or head in verifier.yaml"
        )
    return [prepack_linear(layer) for layer in layers]
