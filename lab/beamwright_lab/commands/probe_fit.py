"""Trains the head of `verify.probe` on the hidden states of finished paths.

The head gives a probability for each token; their product is fitted to the path's label, whether
its answer was right. So steps need no labels of their own. Equal paths count as one example: its
label is the share of them that was right, its weight their number. Prefill reads each path once.
Problems, not paths, are split: 70 % are for training, 15 % for early stopping, 15 % for the report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beamwright.errors import InputError
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tree_model import TreeModel
from beamwright.verify.probe import probe_features

_PATHS_AT_ONCE = 16
_STATES_BYTES = 2 << 30
_WIDTH, _EPOCHS, _PATIENCE, _BATCH = 128, 40, 5, 64
_LEARNING_RATE, _WEIGHT_DECAY = 1e-3, 0.05
_FIRST_BIAS = 3.0  # initially, a token is probably right
_SURE = -1e-6
_PARTS = (70, 85)  # percentiles of problems: training, early stopping, report
_LEAST_PROBLEMS = 20
_BINS = 10
_Array = NDArray[np.float64]


@dataclass(frozen=True)
class FinishedPath:
    """A path of a finished run.

    problem: its text. tokens: of the prompt and all steps. prompt: number of prompt tokens.
    ends: number of tokens up to the end of each step. right: the path's answer is correct.
    """

    problem: str
    tokens: tuple[int, ...]
    prompt: int
    ends: Sequence[int]
    right: bool

    @classmethod
    def of(
        cls, problem: str, prompt: Sequence[int], steps: Sequence[Sequence[int]], *, right: bool
    ) -> FinishedPath:
        """Make a path from what `eval --paths` stores of a candidate."""
        tokens = *prompt, *(token for step in steps for token in step)
        ends = list(accumulate(map(len, steps), initial=len(prompt)))[1:]
        return cls(problem, tokens, len(prompt), ends, right)


@dataclass(frozen=True)
class Example:
    """Equal paths. rows: [tokens, features]. right: share that is right. weight: how many."""

    path: FinishedPath
    rows: Tensor
    right: float
    weight: int


# --- hidden states of paths -----------------------------------------------------------------------


@torch.inference_mode()
def _rows(model: TreeModel, paths: Sequence[FinishedPath]) -> list[Tensor]:
    """Return the head's input for each path's reply, [tokens, features] on the CPU; keep no KV."""
    requests = [
        PrefillRequest(
            (),
            model.store.create(),
            path.tokens[:-1],
            0,
            read=range(path.prompt - 1, len(path.tokens) - 1),
        )
        for path in paths
    ]
    try:
        found = model.prefill(requests)
    finally:
        for request in requests:
            model.store.free(request.segment)
    decoder, rows = model.decoder, list[Tensor]()
    for hidden, path in zip(found, paths, strict=True):
        ids = torch.tensor(path.tokens[path.prompt :], device=hidden.device)
        logprobs = decoder.logits(hidden).float().log_softmax(-1)
        own = logprobs.gather(1, ids[:, None])[:, 0]
        rows.append(probe_features(decoder, hidden, ids, own).float().cpu())
    return rows


def read_examples(
    model: TreeModel, paths: Sequence[FinishedPath], heard: Callable[[int], None]
) -> list[Example]:
    """Return examples: one for equal paths, as many as fit in memory, and some of each problem.

    heard: called with the number of examples read so far.
    """
    alike = dict[tuple[str, tuple[int, ...]], list[bool]]()
    first = dict[tuple[str, tuple[int, ...]], FinishedPath]()
    for path in paths:
        key = path.problem, path.tokens
        first.setdefault(key, path)
        alike.setdefault(key, []).append(path.right)
    seen, turn = dict[str, int](), list[int]()
    for problem, _ in alike:
        turn.append(seen.setdefault(problem, 0))
        seen[problem] += 1
    order = np.argsort(turn, kind="stable")
    distinct = [[*first.values()][place] for place in order]
    room = _STATES_BYTES // (4 * (2 * model.decoder.shape.hidden + 1))
    examples, used = list[Example](), 0
    for begin in range(0, len(distinct), _PATHS_AT_ONCE):
        some = distinct[begin : begin + _PATHS_AT_ONCE]
        used += sum(len(path.tokens) - path.prompt for path in some)
        if used > room:
            break
        for path, rows in zip(some, _rows(model, some), strict=True):
            right = alike[path.problem, path.tokens]
            examples.append(Example(path, rows.clone(), sum(right) / len(right), len(right)))
        heard(len(examples))
    return examples


# --- the fit --------------------------------------------------------------------------------------


def fit(examples: Sequence[Example], seed: int = 0) -> tuple[list[Tensor], dict[str, Any]]:
    """Train a head. Return its tensors and the report of its training.

    Raises:
        InputError: if there are too few problems, or if all paths are right, or all wrong.
    """
    parts: list[list[Example]] = [[], [], []]
    for example in examples:
        parts[_part(example.path.problem)].append(example)
    problems = [len({example.path.problem for example in part}) for part in parts]
    if sum(problems) < _LEAST_PROBLEMS or not all(problems):
        raise InputError(
            f"probe train: the runs have {sum(problems)} problems with paths; at least "
            f"{_LEAST_PROBLEMS} are needed for training, stopping and the report"
        )
    if any({example.right for example in part} in ({0.0}, {1.0}) for part in parts):
        raise InputError("probe train: all paths are right, or all wrong; both are needed")
    tensors, epochs = _trained(parts[0], parts[1], seed)
    report: dict[str, Any] = {
        "problems": dict(zip(("trained", "stopping", "reported"), problems, strict=True)),
        "paths": sum(example.weight for example in examples),
        "distinct_paths": len(examples),
        "epochs": epochs,
        "width": _WIDTH,
        "seed": seed,
        **_reported(tensors, parts[2]),
    }
    return tensors, report


def _part(problem: str) -> int:
    """Return 0 (training), 1 (early stopping) or 2 (report), by a hash of the problem's text."""
    percent = int(hashlib.sha256(problem.encode()).hexdigest(), 16) % 100
    return sum(percent >= limit for limit in _PARTS)


def _trained(
    examples: Sequence[Example], others: Sequence[Example], seed: int
) -> tuple[list[Tensor], int]:
    """Train; return the tensors of the epoch with the lowest loss on `others`, and its number."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.cat([example.rows for example in examples])
    deviation, mean = known.std(0), known.mean(0)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    size = known.shape[1]
    del known
    tensors = [
        torch.randn(_WIDTH, size, generator=generator) * (2 / size) ** 0.5,
        torch.zeros(_WIDTH),
        torch.randn(1, _WIDTH, generator=generator) * _WIDTH**-0.5,
        torch.full((1,), _FIRST_BIAS),
    ]
    for tensor in tensors:
        tensor.requires_grad_()
    optimiser = torch.optim.AdamW(tensors, _LEARNING_RATE, weight_decay=_WEIGHT_DECAY)

    def loss(some: Sequence[Example]) -> tuple[Tensor, int]:
        """Return the loss summed over paths, and their number."""
        values = _logs(tensors, (torch.cat([each.rows for each in some]) - mean) / deviation)
        sums = torch.stack([part.sum() for part in values.split([len(e.rows) for e in some])])
        sums = sums.clamp(max=_SURE)
        right = torch.tensor([each.right for each in some])
        weight = torch.tensor([each.weight for each in some])
        wrong = torch.log(-torch.expm1(sums))
        total = -(weight * (right * sums + (1 - right) * wrong)).sum()
        return total, int(weight.sum())

    best, least, epochs = [t.detach().clone() for t in tensors], float("inf"), 0
    for epoch in range(1, _EPOCHS + 1):
        order = torch.randperm(len(examples), generator=generator).tolist()
        for first in range(0, len(order), _BATCH):
            optimiser.zero_grad()
            total, count = loss([examples[place] for place in order[first : first + _BATCH]])
            (total / count).backward()
            optimiser.step()
        with torch.no_grad():
            groups = [others[first : first + _BATCH] for first in range(0, len(others), _BATCH)]
            told = float(sum(loss(group)[0] for group in groups))
        if told < least:
            best, least, epochs = [t.detach().clone() for t in tensors], told, epoch
        elif epoch - epochs >= _PATIENCE:
            break
    weight, bias, *rest = best
    weight = weight / deviation  # for rows that are not normalised
    return [weight, bias - weight @ mean, *rest], epochs


def _logs(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return the log probability that each token is right, [tokens]."""
    first, first_bias, last, last_bias = tensors
    logits = torch.relu(rows @ first.T + first_bias) @ last.T + last_bias
    return torch.nn.functional.logsigmoid(logits[:, 0])


# --- the report -----------------------------------------------------------------------------------


def _reported(tensors: Sequence[Tensor], examples: Sequence[Example]) -> dict[str, Any]:
    """Return how well the head tells right from wrong paths: at each step's end, and at the end."""
    at_steps, at_ends = list[tuple[str, float, float, int]](), list[tuple[str, float, float, int]]()
    for each in examples:
        with torch.inference_mode():
            sums = _logs(tensors, each.rows).double().cumsum(0).exp().tolist()
        facts = [
            (each.path.problem, sums[end - each.path.prompt - 1], each.right, each.weight)
            for end in each.path.ends
        ]
        at_steps += facts
        at_ends.append(facts[-1])
    return {"steps": _quality(at_steps), "answers": _quality(at_ends)}


def _quality(facts: Sequence[tuple[str, float, float, int]]) -> dict[str, Any]:
    """Return quality figures of predicted probabilities, weighted by the number of paths.

    facts: (problem, predicted probability, share of right paths, number of paths).
    auc: how often a right path is above a wrong one. auc_within_problem: the same among paths of
    one problem, which is what a search compares. brier: mean squared error; brier_of_the_mean: that
    of always predicting the mean. ece: expected calibration error in ten bins.
    """
    names, *columns = zip(*facts, strict=True)
    said, right, weight = (np.array(column, np.float64) for column in columns)
    total, mean = weight.sum(), np.average(right, weights=weight)
    within = np.array([_pairs(said[of], right[of], weight[of]) for of in _groups(np.array(names))])
    bins = np.minimum((said * _BINS).astype(int), _BINS - 1)
    off = np.abs(np.bincount(bins, (said - right) * weight, _BINS)).sum()
    squares = weight * (right * (1 - said) ** 2 + (1 - right) * said**2)
    return {
        "paths": int(total),
        "right": round(float(mean), 4),
        "auc": _share(*_pairs(said, right, weight)),
        "auc_within_problem": _share(*within.sum(0)),
        "brier": round(float(squares.sum() / total), 4),
        "brier_of_the_mean": round(float(mean * (1 - mean)), 4),
        "ece": round(float(off / total), 4),
    }


def _groups(names: NDArray[np.str_]) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of each group of equal names."""
    _, first = np.unique(names, return_inverse=True)
    order = np.argsort(first, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(first[order])) + 1)


def _pairs(said: _Array, right: _Array, weight: _Array) -> tuple[float, float]:
    """Count pairs of a right and a wrong path: in the right order (ties count half), and all."""
    values, at = np.unique(said, return_inverse=True)
    good = np.bincount(at, weight * right, len(values))
    bad = np.bincount(at, weight * (1 - right), len(values))
    below = np.concatenate([[0.0], np.cumsum(bad)[:-1]])
    return float((good * (below + bad / 2)).sum()), float(good.sum() * bad.sum())


def _share(part: float, whole: float) -> float | None:
    return round(float(part / whole), 4) if whole else None
