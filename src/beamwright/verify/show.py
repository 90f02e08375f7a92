"""What a verifier's format makes of a sample: its tokens, where steps are read, and scores."""

from __future__ import annotations

from typing import Any

from beamwright.attention import make_attention
from beamwright.errors import BeamwrightError, InputError
from beamwright.models.tokenizer import TextCodec
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings
from beamwright.tree import Node, SearchTree, StopReason
from beamwright.verify.encode import PathEncoder, Traced, common_prefix
from beamwright.verify.find import find_format, resolve_verifier
from beamwright.verify.heads import token_id
from beamwright.verify.spec import VerifierSpec, aggregate

PROBLEM = (
    "Paul starts with 106 pears. Then in June Paul gives away 41 pears. "
    "Later in July Paul doubles the number of pears. How many pears does Paul have now?"
)
STEPS = ("June: Paul 106-41=65.", "In July Paul has 65*2=130 pears.", "The answer is \\boxed{130}.")
_KV_TOKENS = 4096


def show_verifier(settings: ModelSettings) -> dict[str, Any]:
    """How `--verifier` reads a problem of three steps, as values for JSON.

    tokens: the whole path, each with its id, its text, the parts of the template that its text
    belongs to ("prefix", "problem", "step 1", "suffix", "mark"), and the step that is read there.
    steps: each with the positions that its score is read at and the tokens there, in the path
    that ends with it; `same_tokens` says whether the whole path starts with these tokens.
    score: of the whole path; None, and the reason in `no_scores`, where the model does not load.

    Raises:
        InputError: if it is no reward model, or its format does not go with its tokenizer.
    """
    spec, folder = find_format(settings)
    if folder is None or not isinstance(spec, VerifierSpec):
        raise InputError(
            f"--show: --verifier {settings.scorer} is no reward model, which is read at tokens"
        )
    codec = TextCodec.load(folder)
    nodes = chain_of_steps(0, PROBLEM, "\n\n".join(STEPS))
    traced = PathEncoder(spec, codec).trace(PROBLEM, nodes)
    scores, reason = _scores(settings, nodes)
    return {
        "verifier": settings.scorer,
        "folder": str(folder),
        "format": spec.name,
        "read": spec.read,
        "head": _head(spec, codec, str(folder)),
        "activation": spec.activation,
        "combine": spec.combine,
        "aggregate": spec.aggregate,
        "scores": spec.scores,
        "problem": PROBLEM,
        "steps": _steps(nodes, traced, scores, codec),
        "tokens": _tokens(nodes, traced, codec),
        "score": aggregate(scores, spec.aggregate),
        "no_scores": reason,
    }


def _scores(settings: ModelSettings, nodes: list[Node]) -> tuple[list[float | None], str | None]:
    """A score per step, or why there is none."""
    try:
        source = resolve_verifier(settings)
        if source.model is None:
            raise InputError("it has no model")
        decoder = source.model.decoder
        budget = _KV_TOKENS * decoder.shape.kv_bytes_per_token(decoder.dtype.itemsize)
        verifier = source.on(TreeModel(decoder, make_attention(settings.attention), budget))
        return [score for node in nodes for score in verifier.score([node])], None
    except BeamwrightError as error:
        return [None] * len(nodes), str(error)


def _head(spec: VerifierSpec, codec: TextCodec, folder: str) -> dict[str, Any]:
    """The head's declaration, with what counts as good."""
    head = spec.head
    found = {name: value for name, value in head.model_dump().items() if value not in (None, ())}
    if head.kind == "logit_pair":
        for name, token in (("good", head.good), ("bad", head.bad)):
            index = token_id(token, codec, codec.vocab_size, folder)
            found[name] = {"id": index, "text": codec.decode_raw([index])}
    elif spec.activation == "softmax":
        found["good"] = "class 1 of 2"
    elif head.kind == "token_logprob":
        found["good"] = "a likely token"
    else:
        found["good"] = "a high value"
    return found


def _steps(
    nodes: list[Node], traced: list[Traced], scores: list[float | None], codec: TextCodec
) -> list[dict[str, Any]]:
    whole = traced[-1].encoded.token_ids
    found = []
    for number, (node, path, score) in enumerate(zip(nodes, traced, scores, strict=True), 1):
        ids, read_at = path.encoded.token_ids, path.encoded.read_at
        found.append(
            {
                "step": number,
                "text": node.step_text,
                "read_at": read_at,
                "read": [_token(path, at, codec) for at in read_at],
                "same_tokens": common_prefix(ids, whole) > max(read_at, default=-1),
                "score": score,
            }
        )
    return found


def _tokens(nodes: list[Node], traced: list[Traced], codec: TextCodec) -> list[dict[str, Any]]:
    whole = traced[-1]
    parts = _parts(nodes, traced)
    read_for: dict[int, int] = {}
    for number, path in enumerate(traced, 1):
        shared = common_prefix(path.encoded.token_ids, whole.encoded.token_ids)
        read_for.update({at: number for at in path.encoded.read_at if at < shared})
    found = []
    for at, (begin, end) in enumerate(whole.spans):
        mine = list(dict.fromkeys(parts[begin:end])) or ["prefix" if at == 0 else "suffix"]
        token = _token(whole, at, codec)
        found.append({"position": at, **token, "parts": mine, "step_read": read_for.get(at)})
    return found


def _token(path: Traced, at: int, codec: TextCodec) -> dict[str, Any]:
    """A token and its text: what it stands for here, or by itself where it stands for nothing."""
    begin, end = path.spans[at]
    index = path.encoded.token_ids[at]
    return {"id": index, "text": path.text[begin:end] or codec.decode_raw([index])}


def _parts(nodes: list[Node], traced: list[Traced]) -> list[str]:
    """The part of the template that each character of the whole path's text belongs to."""
    text = traced[-1].text
    parts = ["suffix"] * len(text)
    pieces = [("problem", PROBLEM)]
    for number, (node, own) in enumerate(zip(nodes, STEPS, strict=True), 1):
        # A format that strips its steps has no newlines of them.
        written = node.step_text if node.step_text in text else own
        pieces.append((f"step {number}", written))
    at, first_step = 0, len(text)
    for name, piece in pieces:
        begin = text.find(piece, at)
        if begin < 0:
            continue  # the chat template has changed it
        at = begin + len(piece)
        parts[begin:at] = [name] * len(piece)
        if name != "problem":
            first_step = min(first_step, begin)
    parts[:first_step] = ["problem" if p == "problem" else "prefix" for p in parts[:first_step]]
    for path in traced:
        for begin, end in path.marks:
            if text[:end] == path.text[:end]:
                parts[begin:end] = ["mark"] * (end - begin)
    return parts


def chain_of_steps(number: int, problem: str, solution: str) -> list[Node]:
    """The solution's steps, one below the other. Their own token ids do not matter here."""
    tree = SearchTree(number, (0,), problem)
    parts = solution.split("\n\n")
    steps = [f"{part}\n\n" for part in parts[:-1]] + parts[-1:]
    node, found = tree.root, []
    for step in steps:
        (child,) = tree.expand(node, 1)
        stop = StopReason.EOS if step is steps[-1] else StopReason.DELIMITER
        tree.commit(child, (0,), (0.0,), stop, node.text + step)
        tree.keep(child)
        found.append(child)
        node = child
    return found
