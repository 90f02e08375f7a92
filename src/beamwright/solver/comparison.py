"""Comparison: the final candidates of one search, compared by the generator (`--choose pairwise`).

It comes behind the search, piece by piece between iterations, so that other searches go on. What is
chosen follows from the candidates alone: questions are read each for itself, however many at a
time, and where other searches have the memory it waits for them. A deadline, or memory that does
not hold one question, leaves the majority as the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from beamwright.errors import CapacityError, DeviceMemoryError, InputError
from beamwright.search.choose import CONTESTS, Choice, Shares, Shown, mean_shares
from beamwright.solver.machinery import Machinery
from beamwright.tree import Node, Problem
from beamwright.verify.compare import Comparer, Question

_PIECE_TOKENS = 4096

MakeRoom = Callable[[int], None]
"""Lets the generator have KV memory for so many tokens more, where it can move."""


def comparer_of(machinery: Machinery) -> Comparer:
    """What asks the generator about candidates.

    Raises:
        InputError: if it is not here, or has no tokenizer that could ask.
    """
    model, codec = machinery.settings.model, machinery.reader.codec
    if machinery.generator is None:
        raise InputError(
            f"--model {model.model}: compares no candidates, since its logits are not here; "
            "use --choose majority, weighted or best"
        )
    if codec is None:
        raise InputError(f"--model {model.model} has no tokenizer: it compares no candidates")
    return Comparer(codec, machinery.generator, model.system_prompt)


class Comparison:
    """seeds: candidates' places, one for each answer, see `search.choose`. texts: what each says.

    chosen: the winner's place; None until it is known. warnings: why the majority stands, or did
    in some comparison.
    """

    def __init__(
        self,
        comparer: Comparer,
        how: Choice,
        budget: int | None,
        root: Node,
        problem: Problem | int,
        seeds: Sequence[int],
        texts: Mapping[int, str],
    ) -> None:
        self._comparer, self._how, self._root, self._problem = comparer, how, root, problem
        self._seeds, self._texts = seeds, texts
        self._contest = CONTESTS[how](seeds, budget)
        self.chosen: int | None = None
        self.warnings: list[str] = []
        self._told: dict[Shown, Shares] = {}
        self._shown: list[Shown] = []
        self._waiting: dict[Shown, Question] = {}
        self._go_on()

    @property
    def preferred(self) -> dict[int, float]:
        """By candidate, its mean share over the questions that it was part of so far."""
        return mean_shares(self._told.items())

    def give_up(self, why: str) -> None:
        """The candidate that most votes are for is chosen."""
        self.chosen = self._seeds[0]
        self.warnings.append(f"--choose {self._how}: {why}; the answer is the majority's")

    def work(self, make_room: MakeRoom, *, alone: bool) -> None:
        """Ask as many questions as are read at a time.

        alone: nobody else holds memory, so that there will not be more later.

        Raises:
            NotFiniteError: see `Comparer.ask`.
        """
        asked = self._piece()
        while asked:
            questions = [self._waiting[shown] for shown in asked]
            make_room(sum(question.start + len(question.token_ids) for question in questions))
            try:
                told = self._comparer.ask(questions)
            except (CapacityError, DeviceMemoryError):
                asked = asked[: len(asked) // 2]
                continue
            self._hear(asked, told)
            return
        if alone:
            longest = max(len(question.token_ids) for question in self._waiting.values())
            self.give_up(f"the generator's KV budget does not hold {longest:,} tokens")

    def _piece(self) -> list[Shown]:
        piece, num_tokens = list[Shown](), 0
        for shown, question in self._waiting.items():
            num_tokens += len(question.token_ids)
            if piece and num_tokens > _PIECE_TOKENS:
                break
            piece.append(shown)
        return piece

    def _hear(self, asked: Sequence[Shown], told: Sequence[Shares]) -> None:
        for shown, shares in zip(asked, told, strict=True):
            question = self._waiting.pop(shown)
            self._told[shown] = shares
            self._root.usage["compared"] += len(question.token_ids)
            self._root.usage["compared_reused"] += question.start
        if not self._waiting:
            self._go_on()

    def _go_on(self) -> None:
        """Tell the contest what it asked, and make the questions that it asks next."""
        try:
            while not self._waiting:
                told = [self._told[shown] for shown in self._shown]
                self._shown = self._contest.send(told) if told else next(self._contest)
                for shown in self._shown:
                    texts = [self._texts[place] for place in shown]
                    question = self._comparer.question(self._root, self._problem, texts)
                    if question is None:
                        self._told[shown] = None
                    else:
                        self._waiting[shown] = question
        except StopIteration as ended:
            self.chosen = ended.value
            if missed := sum(shares is None for shares in self._told.values()):
                self.warnings.append(
                    f"--choose {self._how}: {missed} of {len(self._told)} questions are longer "
                    "than the model's context: answers with more votes went before others there"
                )
