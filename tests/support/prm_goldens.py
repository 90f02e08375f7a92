"""Every verifier family's published recipe in plain words, beside the scores found on a tree.

Each recipe encodes the whole path from scratch with `transformers` and reads it as the family's
authors do; `compare` puts the scores that PrmVerifier found step by step on a tree beside them.
The checkpoints are those of `prm_checkpoints`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

import prm_checkpoints as prm
from beamwright.attention import make_attention
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings
from beamwright.tree import StopReason
from beamwright.verify.find import resolve_verifier
from beamwright.verify.prm import PrmVerifier
from played import random_rounds

PROBLEM = "Ann has 12 eels. How many see the sea?"
WORDS = ["the sea is wide.", "12+3=15", "a - b", "+", "she\n  sees", "x" * 30]
WORDS += ["We\nthe", "so\n\nhe", "eel."]

Recipe = Callable[[str, list[str]], list[float]]
"""From a problem and a path's steps (no delimiters) to every score that the authors would read."""


# --- published recipes -----------------------------------------------------------------------


def _loaded(folder: Path, model: type) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Tokenizer, model, and the tensors of its file."""
    loaded = model.from_pretrained(folder).eval()
    file = folder / "model.safetensors"
    return PreTrainedTokenizerFast.from_pretrained(folder), loaded, load_file(file)


def _last(hidden: torch.Tensor, tensors: dict[str, torch.Tensor], *layers: str) -> torch.Tensor:
    """A head of linear layers with ReLU between them."""
    for number, name in enumerate(layers):
        hidden = hidden.relu() if number else hidden
        hidden = hidden @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
    return hidden


def _chat(problem: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]


def recipe_pair(
    text_of: Callable[[str, list[str]], str], words: Callable[[Any], tuple[int, int, int]]
) -> Callable[[Path], Recipe]:
    """Of two rows of the LM head, good and bad, the first one's share at every tag.

    words: from the tokenizer to the tokens of good, bad and tag.
    """

    def make(folder: Path) -> Recipe:
        tokenizer, model, _ = _loaded(folder, AutoModelForCausalLM)
        good, bad, tag = words(tokenizer)

        def score(problem: str, steps: list[str]) -> list[float]:
            ids = torch.tensor([tokenizer.encode(text_of(problem, steps))])
            shares = model(ids).logits[0][:, [good, bad]].softmax(-1)[:, 0]
            found: list[float] = shares[ids[0] == tag].tolist()
            assert len(found) == len(steps)
            return found

        return score

    return make


recipe_math_shepherd = recipe_pair(
    lambda problem, steps: f"{problem} " + "\n".join(f"{step} ки" for step in steps) + "\n",
    lambda tokenizer: (*tokenizer.encode("+ -")[1:], tokenizer.encode("ки")[1]),
)
recipe_versaprm = recipe_pair(
    lambda problem, steps: f"{problem} \n\n" + "".join(f"{step} \n\n\n\n" for step in steps),
    lambda tokenizer: tuple(tokenizer.encode(text)[1] for text in ("+", "-", " \n\n\n\n")),
)
recipe_math_psa = recipe_pair(
    lambda problem, steps: f"{problem} " + "".join(f"{step} \n\n\n\n\n " for step in steps),
    lambda tokenizer: (*tokenizer.encode(" + -"), tokenizer.encode(" \n\n\n\n\n")[-1]),
)


def recipe_rlhflow(folder: Path) -> Recipe:
    tokenizer, model, _ = _loaded(folder, AutoModelForCausalLM)
    pair = [tokenizer.encode("+")[-1], tokenizer.encode("-")[-1]]

    def score(problem: str, steps: list[str]) -> list[float]:
        conversation: list[dict[str, str]] = []
        found = []
        for number, step in enumerate(steps):
            conversation += _chat(step if number else f"{problem} {step}", "+")
            text = tokenizer.apply_chat_template(conversation, tokenize=False)
            ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
            found.append(float(model(ids).logits[0, -3, pair].softmax(-1)[0]))
        return found

    return score


def recipe_skywork(step_token: str | None) -> Callable[[Path], Recipe]:
    def make(folder: Path) -> Recipe:
        tokenizer, model, tensors = _loaded(folder, AutoModel)
        ending = tokenizer.encode(step_token or "\n")[-1]

        def score(problem: str, steps: list[str]) -> list[float]:
            ids = tokenizer.encode(tokenizer.bos_token + problem + "\n")
            ends = []
            pieces = steps if step_token is None else step_token.join(steps).split(step_token)
            for piece in filter(str.strip, pieces):  # the authors' code also reads empty pieces
                ids += [*tokenizer.encode(piece), ending]
                ends.append(len(ids) - 1)
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
            rewards: list[float] = _last(hidden, tensors, "v_head.summary")[ends, 0].sigmoid()
            return rewards.tolist()

        return score

    return make


def recipe_qwen(system: str | None) -> Callable[[Path], Recipe]:
    """system: None for ReasonFlux, which has no system message."""

    def make(folder: Path) -> Recipe:
        tokenizer, model, tensors = _loaded(folder, AutoModel)
        (separator,) = tokenizer.encode("<extra_0>")

        def score(problem: str, steps: list[str]) -> list[float]:
            messages = _chat(problem, "<extra_0>".join(steps) + "<extra_0>")
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            ids = torch.tensor(
                [tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))]
            )
            hidden = model(ids).last_hidden_state[0]
            classes = _last(hidden, tensors, "score.0", "score.2").softmax(-1)
            found: list[float] = classes[ids[0] == separator][:, 1].tolist()
            return found

        return score

    return make


def recipe_outcome(folder: Path) -> Recipe:
    tokenizer, model, _ = _loaded(folder, AutoModelForSequenceClassification)

    def score(problem: str, steps: list[str]) -> list[float]:
        text = tokenizer.apply_chat_template(_chat(problem, "\n\n".join(steps)), tokenize=False)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        return [float(model(ids).logits[0, 0].sigmoid())]

    return score


def recipe_reasonflux_small(folder: Path) -> Recipe:
    tokenizer, model, _ = _loaded(folder, AutoModelForCausalLM)
    head = torch.nn.Linear(32, 1)
    head.load_state_dict(torch.load(folder / "reward_head.pt"))

    def score(problem: str, steps: list[str]) -> list[float]:
        encoded = tokenizer(problem + "\n\n".join(steps), return_tensors="pt")
        hidden = model.model(encoded["input_ids"]).last_hidden_state
        return [float(head(hidden[0, encoded["attention_mask"].sum() - 1]).sigmoid())]

    return score


def recipe_trl(separator: str) -> Callable[[Path], Recipe]:
    """Tokens and places of the labels as `PRMTrainer.tokenize_row` makes them."""

    def make(folder: Path) -> Recipe:
        tokenizer, model, _ = _loaded(folder, AutoModelForTokenClassification)

        def encode(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return found

        def score(problem: str, steps: list[str]) -> list[float]:
            ids, labelled = [tokenizer.bos_token_id, *encode(problem)], []
            for step in steps:
                ids += encode(step) + encode(separator)
                labelled.append(len(ids) - 1)
            shares: torch.Tensor = model(torch.tensor([ids])).logits[0].softmax(-1)
            return shares[labelled, 1].tolist()

        return score

    return make


QWEN_SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."


class Golden(NamedTuple):
    """folder: what the checkpoint's folder is called. family: where it is not the golden's name.

    chosen: `--verifier` has to name the family beside the folder.
    """

    folder: str
    write: Callable[[Path], None]
    recipe: Callable[[Path], Recipe]
    family: str = ""
    chosen: bool = False


GOLDENS = {
    "math-shepherd": Golden(
        "math-shepherd-mistral-7b-prm", prm.write_math_shepherd, recipe_math_shepherd
    ),
    "rlhflow": Golden("Llama3.1-8B-PRM-Deepseek-Data", prm.write_rlhflow, recipe_rlhflow),
    "skywork-o1": Golden("skywork", prm.write_skywork, recipe_skywork(None)),
    "skywork-o1-lines": Golden("skywork", prm.write_skywork, recipe_skywork("\n"), chosen=True),
    "skywork-o1-paragraphs": Golden(
        "skywork", prm.write_skywork, recipe_skywork("\n\n"), chosen=True
    ),
    "qwen2.5-math-prm": Golden("qwen", prm.write_qwen, recipe_qwen(QWEN_SYSTEM)),
    "outcome": Golden("outcome", prm.write_outcome, recipe_outcome),
    "skywork-reward-v2": Golden(
        "Skywork-Reward-V2-Qwen3-0.6B", prm.write_outcome_qwen3, recipe_outcome, "outcome"
    ),
    "trl": Golden("Qwen2.5-0.5B-PRM", prm.write_trl, recipe_trl("\n")),
    "trl-paragraphs": Golden("trl", prm.write_trl, recipe_trl("\n\n"), chosen=True),
    "reasonflux-prm": Golden("ReasonFlux-PRM-7B", prm.write_qwen, recipe_qwen(None)),
    "reasonflux-prm-1.5b": Golden(
        "ReasonFlux-PRM-1.5B", prm.write_reasonflux_small, recipe_reasonflux_small
    ),
    "versaprm": Golden("VersaPRM", prm.write_versaprm, recipe_versaprm),
    "math-psa": Golden("Math-psa-merged", prm.write_math_psa, recipe_math_psa),
}


GENERATIVE = {"think-prm": "ThinkPRM-1.5B", "gen-prm": "GenPRM-7B"}
"""Families of judges, and what their folders are called; see `verify/test_generative.py`."""


def family_of(golden: str) -> str:
    """The family whose checkpoint a golden has."""
    return GOLDENS[golden].family or golden


# --- both sides ------------------------------------------------------------------------------


def verifier_of(option: str, **settings: object) -> PrmVerifier:
    """What the solver would make of `--verifier`."""
    source = resolve_verifier(ModelSettings(verifier=option, **settings))
    model = TreeModel(source.model.decoder, make_attention("tree"), 2**23)
    return PrmVerifier(source.spec, source.model, model)


def write_golden(family: str, parent: Path) -> str:
    """Write a family's checkpoint below `parent`; returns what `--verifier` is given."""
    golden = GOLDENS[family]
    folder = parent / golden.folder
    folder.mkdir()
    golden.write(folder)
    return f"family:{family}:{folder}" if golden.chosen else str(folder)


def compare(family: str, parent: Path, num_rounds: int = 4) -> list[tuple[float, float]]:
    """(incremental, golden) of every scored step on a small tree that branches."""
    verifier = verifier_of(write_golden(family, parent))
    recipe = GOLDENS[family].recipe(parent / GOLDENS[family].folder)
    pairs = []

    def words(rng: random.Random) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 3))) + "\n\n"

    for tree, candidates in random_rounds(words, 0, num_rounds, PROBLEM, ends=StopReason.EOS):
        for node, score in zip(candidates, verifier.score(candidates), strict=True):
            if score is not None:
                steps = [each.step_text.strip() for each in node.path()[1:]]
                with torch.inference_mode():
                    pairs.append((score, recipe(PROBLEM, steps)[-1]))
        verifier.release(tree.pop_dead())
        verifier.tree_model.store.check()
    return pairs
