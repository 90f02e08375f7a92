"""Prompts: render problems, chats and follow-up turns to token ids, and check their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from beamwright.config import Settings
from beamwright.errors import InputError, ProblemTooLongError
from beamwright.models.thinking import FAMILIES
from beamwright.models.tokenizer import TextCodec
from beamwright.protocols import Strategy
from beamwright.sections import ModelSettings
from beamwright.tree import Conversation, Node, Problem, RawPrompt, SearchTree, Turn

_SYNTHETIC_SEED = 20_26
_MOST_COUNTED = 1 << 15  # a prompt that is too long is counted up to this many tokens
# The prompt that Qwen2.5-Math was trained with; other models understand it. It makes models write
# the kind of steps that process reward models were trained on, and answers in a box.
DEFAULT_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


def with_system_prompt(settings: Settings, codec: TextCodec | None) -> Settings:
    """Fill in the default system prompt, if none is set and the chat template takes one."""
    given = settings.model.system_prompt is not None
    if given or codec is None or not codec.takes_instructions:
        return settings
    model = settings.model.model_copy(update={"system_prompt": DEFAULT_SYSTEM_PROMPT})
    return settings.model_copy(update={"model": model})


class PromptRenderer:
    """Factory of search trees: it renders problems for one generator.

    codec: the tokenizer; None if the model has none.
    context: maximum number of tokens of a path.
    vocab: the size of the vocabulary.
    """

    def __init__(
        self, codec: TextCodec | None, context: int, vocab: int, settings: ModelSettings
    ) -> None:
        self._codec, self._context, self._vocab = codec, context, vocab
        self._settings = settings
        self._args: WeakKeyDictionary[Node, Mapping[str, Any]] = WeakKeyDictionary()

    def make_tree(
        self,
        problem_id: str | int,
        problem: Problem,
        thinking: str | int = "auto",
        now: str | None = None,
    ) -> SearchTree:
        """Create the search tree of a problem; its root is the rendered prompt.

        Whitespace around a problem is removed.

        thinking, now: passed to the chat template (`StepSettings`).

        Raises:
            InputError: if the problem is empty, too long or no text, or the model has no tokenizer.
        """
        if self._codec is None:
            raise InputError(
                f"--model {self._settings.model} has no tokenizer: use --prompt-tokens N"
            )
        check_text(self._settings.system_prompt or "", "--system-prompt")
        args = {**self._codec.thinking_args(thinking), "now": now}
        if isinstance(problem, Conversation):
            args |= problem.template_args
        ids, text = self._rendered(self._codec, problem, args)
        if not ids:
            raise InputError(
                "the prompt encodes to no tokens; check --chat-template and the tokenizer"
            )
        if max(ids) >= self._vocab:
            raise InputError(
                f"the tokenizer gives token {max(ids)}, but the model has a vocabulary of "
                f"{self._vocab}; use the model's own tokenizer"
            )
        self._check_length(len(ids))
        tree = SearchTree(problem_id, tuple(ids), text)
        root, marks = tree.root, self._codec.thoughts
        self._args[root], root.now, root.raw = args, now, isinstance(problem, RawPrompt)
        opened = not root.raw and marks is not None and marks.ends_with_start(ids)
        root.quoted = opened and not self._codec.opens_thought(args)
        return tree

    def _rendered(
        self, codec: TextCodec, problem: Problem, args: Mapping[str, Any]
    ) -> tuple[list[int], str]:
        """Return the prompt's token ids, and the problem as a verifier reads it.

        args: arguments of the chat template.
        """
        system_prompt = self._settings.system_prompt
        match problem:
            case Conversation():
                said = codec.render_conversation(
                    problem.messages, system_prompt, problem.tools, args
                )
                self._check_size(codec, said, "the conversation")
                return codec.encode_prompt(said), problem.problem_text
            case RawPrompt(tuple() as given):
                if given and (min(given) < 0 or max(given) >= self._vocab):
                    raise InputError(f"token ids must be from 0 to {self._vocab - 1}")
                self._check_length(len(given))
                return list(given), codec.decode(given)
            case RawPrompt(str() as text):
                self._check_size(codec, text, "the prompt")
                return codec.encode(text), text
        text = str(problem).strip()
        if not text:
            raise InputError("the problem is empty")
        check_text(text, "the problem")
        said = codec.render_conversation(
            [{"role": "user", "content": text}], system_prompt, (), args
        )
        self._check_size(codec, said, "the problem")
        return codec.encode_prompt(said), text

    def _check_size(self, codec: TextCodec, text: str, what: str) -> None:
        check_text(text, what)
        # Tokenising a text of megabytes would take gigabytes, so counting stops at `most`.
        most = max(self._context, _MOST_COUNTED)
        count = codec.count_tokens(text, most)
        if count > self._context:
            part = f"{what} has {len(text):,} characters: its beginning"
            raise ProblemTooLongError(part if count > most else what, count, self._context)

    def check_paths(self, paths: Sequence[Sequence[str]]) -> None:
        """Check that given paths are texts that fit the model's context.

        Raises:
            InputError: if a path is no text or too long.
        """
        for number, steps in enumerate(paths):
            if len(steps) > self._context:
                raise ProblemTooLongError(
                    f"path {number}, counted as one token per step,", len(steps), self._context
                )
            if self._codec is not None:
                self._check_size(self._codec, "".join(steps), f"path {number}")

    def check_turns(self, strategy: Strategy, thinking: str | int = "auto") -> None:
        """Check, before anything is decoded, a strategy's fixed turns and the option `thinking`.

        Raises:
            InputError: if the model has no tokenizer or no chat template; if a turn is no text, or
                longer than the context; if `thinking` is requested but the tokenizer has no tokens
                for thoughts.
        """
        marked = self._codec is not None and self._codec.thoughts is not None
        if thinking not in ("auto", "off") and not marked:
            known = ", ".join(family.start.strip() for family in FAMILIES)
            raise InputError(
                f"--thinking {thinking}: the tokenizer of --model {self._settings.model} has no "
                f"tokens for thoughts ({known})"
            )
        for turn in dict.fromkeys(getattr(strategy, "turns", ())):
            self._turn_ids(turn, {})

    def render_turn(self, node: Node, turn: Turn) -> tuple[int, ...] | None:
        """Render a user turn after an ended reply; None if it does not fit the context.

        A turn that stands alone is rendered like a problem.
        """
        ids = self._turn_ids(turn, self._args.get(node.root, {}), raw=node.root.raw)
        if ids and not turn.alone and node.token_ids and ids[0] == node.token_ids[-1]:
            ids = ids[1:]  # the reply already ends with this token
        fits = (0 if turn.alone else node.end) + len(ids) < self._context
        return tuple(ids) if fits and ids else None

    def _turn_ids(
        self, turn: Turn, template_args: Mapping[str, Any], *, raw: bool = False
    ) -> list[int]:
        if self._codec is None:
            raise InputError(
                f"--model {self._settings.model} has no tokenizer, so the search cannot ask it "
                "questions; use another model or --search"
            )
        if turn.alone:
            return self._rendered(
                self._codec, RawPrompt(turn.text) if raw else turn.text, template_args
            )[0]
        self._check_size(self._codec, turn.text, "the question of the search")
        return self._codec.render_turn(turn.text, template_args)

    def make_random_tree(self, num_tokens: int) -> SearchTree:
        """Create a tree with a prompt of random token ids, equal in every run.

        Raises:
            ProblemTooLongError: if the prompt fills the context.
        """
        self._check_length(num_tokens)
        generator = torch.Generator().manual_seed(_SYNTHETIC_SEED)
        ids = torch.randint(self._vocab, (num_tokens,), generator=generator).tolist()
        return SearchTree(0, tuple(ids), "")

    def check_resumed(
        self, tree: SearchTree, file: Path, problem: str | None, thinking: str | int = "auto"
    ) -> None:
        """Check that a resumed tree has the prompt that this model and tokenizer would give it.

        file: where the tree was saved. problem: the expected problem; None accepts any.
        thinking: as in `make_tree`.

        Raises:
            InputError: if the prompt differs, or a token does not fit the model.
        """
        root = tree.root
        if problem is not None and problem.strip() != root.problem_text:
            raise InputError(f"{file}: was saved with another problem")
        again = (
            self.make_tree(root.problem_id, root.problem_text, thinking, root.now)
            if root.problem_text
            else self.make_random_tree(len(root.token_ids))
        )
        if again.root.token_ids != root.token_ids:
            raise InputError(f"{file}: was saved with another tokenizer or chat template")
        self._args[root], root.quoted = self._args.get(again.root, {}), again.root.quoted
        for node in tree.nodes():
            if node.end > self._context or max(node.token_ids, default=0) >= self._vocab:
                raise InputError(f"{file}: {node!r} exceeds this model's context or vocabulary")

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._context:
            raise ProblemTooLongError("the problem", num_tokens, self._context)


def check_text(text: str, what: str) -> None:
    """Check that a text has no lone surrogates, which no tokenizer takes.

    Raises:
        InputError: if the text has one; `what` names the text in the message.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is not valid Unicode: character {error.start + 1} is a lone surrogate "
            f"({text[error.start]!a}); remove it"
        ) from error
