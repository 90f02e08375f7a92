"""Comparisons: a generator is shown several of its final candidates, and asked which one is right.

Its reply is begun for it, and how likely each letter is to follow is read from the logits: a
question costs its prefill and no decoding, and no second model is in memory. Thoughts are left out.
The problem, and all that stands before it, is read from the prompt's KV on the tree; of the
candidates none is: KV belongs to a position, and every question has them elsewhere. Knows one
model; which questions are asked is `search.choose`'s affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from string import ascii_uppercase
from typing import NamedTuple

import torch

from beamwright.engine.row import state_of
from beamwright.errors import InputError, NotFiniteError
from beamwright.kv.segments import Path as KVPath
from beamwright.kv.segments import PathPart
from beamwright.models.prefill import PrefillRequest
from beamwright.models.tokenizer import TextCodec
from beamwright.models.tree_model import TreeModel
from beamwright.tree import Conversation, Node, Problem
from beamwright.verify.encode import common_prefix

_BEFORE = (
    "Here are attempts at this problem. They end with different answers, and at most one of them "
    "is right."
)
_BEHIND = "Which attempt is right? Check them, and answer with one letter."
_OPENING = "Answer:"
_BEFORE_LETTERS = (" ", "\n")  # tokenizers differ in which of them goes into one token with each
_NOT_THINKING = {"enable_thinking": False}


class Question(NamedTuple):
    """Token ids behind a path of so many tokens, and those of which one is to follow."""

    token_ids: Sequence[int]
    choices: Sequence[int]
    path: KVPath = ()
    start: int = 0


def shares(model: TreeModel, questions: Sequence[Question]) -> list[list[float]]:
    """How likely each choice is to follow, against the others; no KV is kept.

    Those of one question depend on no other.

    Raises:
        CapacityError: if the KV budget cannot hold them together.
    """
    store, decoder = model.store, model.decoder
    segments = [store.create(start=question.start) for question in questions]
    try:
        hidden = model.prefill(
            [
                PrefillRequest(q.path, segment, q.token_ids, q.start, read=(len(q.token_ids) - 1,))
                for q, segment in zip(questions, segments, strict=True)
            ]
        )
    finally:
        for segment in segments:
            store.free(segment)
    pairs = zip(questions, hidden, strict=True)
    return [decoder.logits(last)[0, [*q.choices]].softmax(-1).tolist() for q, last in pairs]


class Comparer:
    """Asks a generator about candidates of its trees.

    Raises:
        InputError: if its tokenizer cannot tell letters apart.
    """

    def __init__(self, codec: TextCodec, model: TreeModel, system_prompt: str | None) -> None:
        self.model, self._codec, self._system_prompt = model, codec, system_prompt
        self.letters, self._cut, self._before = self._find_letters()

    def question(self, root: Node, problem: Problem | int, texts: Sequence[str]) -> Question | None:
        """What is asked about candidates of these texts; None where it is too long for the model.

        problem: as the tree's user gave it.
        """
        prompt = self._prompt(root, problem, texts) + self._before + ascii_uppercase[0]
        token_ids = self._codec.encode_prompt(prompt)[: -self._cut]
        if len(token_ids) > self.model.decoder.shape.context:
            return None
        path = self._on_the_tree(root, token_ids)
        start = sum(part.visible for part in path)
        return Question(token_ids[start:], self.letters[: len(texts)], path, start)

    @torch.inference_mode()
    def ask(self, questions: Sequence[Question]) -> list[list[float]]:
        """How likely each candidate is the right one, of each question.

        Raises:
            CapacityError: if the KV budget cannot hold them together; NotFiniteError: for logits
                that are no numbers.
        """
        told = shares(self.model, questions)
        if not all(isfinite(share) for row in told for share in row):
            raise NotFiniteError("--choose: NaN or infinite logits where candidates are compared")
        return told

    # --- inside ------------------------------------------------------------------------------

    def _find_letters(self) -> tuple[list[int], int, str]:
        """Tokens of A, B, ..., how many tokens of the first are cut off, and what stands before."""
        for before in _BEFORE_LETTERS:
            opening = _OPENING + before
            coded = [self._codec.encode(opening + letter) for letter in ascii_uppercase]
            alike = min(common_prefix(coded[0], each) for each in coded)
            found = [token_ids[alike] for token_ids in coded if len(token_ids) > alike]
            if len(set(found)) == len(coded) and max(found) < self.model.decoder.shape.vocab:
                return found, len(coded[0]) - alike, before
        raise InputError("--choose: the model's tokenizer has no token for each letter")

    def _prompt(self, root: Node, problem: Problem | int, texts: Sequence[str]) -> str:
        given = problem
        if not isinstance(given, Conversation):
            given = Conversation(({"role": "user", "content": root.problem_text},))
        messages = [*map(dict, given.messages)]
        if messages[-1]["role"] != "user":  # say, what a tool has found
            messages.append({"role": "user", "content": ""})
        pairs = zip(ascii_uppercase, texts, strict=False)
        attempts = "".join(f"\nAttempt {letter}:\n{text}\n" for letter, text in pairs)
        # The problem is at its head, so that its KV is read where the tree has it.
        asked = f"{messages[-1]['content']}\n\n{_BEFORE}\n{attempts}\n{_BEHIND}".strip()
        messages[-1] = {"role": "user", "content": asked}
        args = {**given.template_args, **_NOT_THINKING}
        text = self._codec.conversation(messages, self._system_prompt, given.tools, args)
        return text + self._past_thoughts(text) + _OPENING

    def _past_thoughts(self, text: str) -> str:
        """What ends a thought that the template has begun, or goes before a reply's text."""
        marks = self._codec.thoughts
        if marks is None:
            return ""
        if marks.opened(self._codec.encode(text)):
            return f"{marks.family.end}\n\n"
        return "".join(marks.family.headers[1:])

    def _on_the_tree(self, root: Node, token_ids: Sequence[int]) -> KVPath:
        """The part of the prompt's KV that a question begins with.

        None of layers with a window: they may have forgotten it, and when depends on who runs.
        """
        state = state_of(root)
        if state is None or state.segment.others or state.segment.window is not None:
            return ()
        alike = common_prefix(root.token_ids, token_ids[:-1])
        whole = state.segment.length == len(root.token_ids)
        return (PathPart(state.segment, alike),) if whole and alike else ()
