"""Every verifier family's published recipe in plain words, beside the scores found on a tree.

Each recipe encodes the whole path from scratch with `transformers` and reads it as the family's
authors do; `compare` puts the scores that PrmVerifier found step by step on a tree beside them.
The checkpoints are those of `prm_checkpoints`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

import fakes
import prm_checkpoints
from beamwright.attention import make_attention
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings
from beamwright.tree import StopReason
from beamwright.verify.find import resolve_verifier
from beamwright.verify.prm import PrmVerifier

PROBLEM = "Ann has 12 eels. How many see the sea?"
WORDS = ["the sea is wide.", "12+3=15", "a - b", "+", "she\n  sees", "x" * 30]
WORDS += ["We\nthe", "so\n\nhe", "eel."]

Recipe = Callable[[str, list[str]], list[float]]
"""From a problem and a path's steps (no delimiters) to every score that the authors would read."""


# --- published recipes -----------------------------------------------------------------------


def recipe_at_tags(
    text: Callable[[str, list[str]], str],
    pair: Callable[[PreTrainedTokenizerFast], Sequence[int]],
    tag: Callable[[PreTrainedTokenizerFast], int],
) -> Callable[[Path], Recipe]:
    """The good token's probability against the bad one's, read wherever the tag stands.

    text: a path's. pair, tag: ids of the good and the bad token, and of the tag.
    """

    def make(folder: Path) -> Recipe:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()

        def score(problem: str, steps: list[str]) -> list[float]:
            ids = torch.tensor([tokenizer.encode(text(problem, steps))])
            probabilities = model(ids).logits[0][:, pair(tokenizer)].softmax(-1)[:, 0]
            found = probabilities[ids[0] == tag(tokenizer)].tolist()
            assert len(found) == len(steps)
            return found

        return score

    return make


recipe_math_shepherd = recipe_at_tags(
    lambda problem, steps: f"{problem} " + "\n".join(f"{step} ки" for step in steps) + "\n",
    lambda tokenizer: tokenizer.encode("+ -")[1:],
    lambda tokenizer: tokenizer.encode("ки")[1],
)
recipe_versaprm = recipe_at_tags(
    lambda problem, steps: f"{problem} \n\n" + "".join(f"{step} \n\n\n\n" for step in steps),
    lambda tokenizer: [tokenizer.encode(sign)[1] for sign in "+-"],
    lambda tokenizer: tokenizer.encode(" \n\n\n\n")[1],
)
recipe_math_psa = recipe_at_tags(
    lambda problem, steps: f"{problem} " + "".join(f"{step} \n\n\n\n\n " for step in steps),
    lambda tokenizer: tokenizer.encode(" + -"),
    lambda tokenizer: tokenizer.encode(" \n\n\n\n\n")[-1],
)


def recipe_rlhflow(folder: Path) -> Recipe:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    pair = [tokenizer.encode("+")[-1], tokenizer.encode("-")[-1]]

    def score(problem: str, steps: list[str]) -> list[float]:
        conversation: list[dict[str, str]] = []
        found = []
        for number, step in enumerate(steps):
            content = step if number else f"{problem} {step}"
            conversation.append({"role": "user", "content": content})
            conversation.append({"role": "assistant", "content": "+"})
            text = tokenizer.apply_chat_template(conversation, tokenize=False)
            ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
            found.append(float(model(ids).logits[0, -3, pair].softmax(-1)[0]))
        return found

    return score


def recipe_skywork(step_token: str | None) -> Callable[[Path], Recipe]:
    def make(folder: Path) -> Recipe:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder).eval()
        tensors = load_file(folder / "model.safetensors")
        weight, bias = (tensors[f"v_head.summary.{part}"] for part in ("weight", "bias"))
        ending = tokenizer.encode(step_token or "\n")[-1]

        def score(problem: str, steps: list[str]) -> list[float]:
            ids = tokenizer.encode(tokenizer.bos_token + problem + "\n")
            flags = [0] * len(ids)
            pieces = steps if step_token is None else step_token.join(steps).split(step_token)
            for piece in filter(str.strip, pieces):  # the authors' code also reads empty pieces
                own = [*tokenizer.encode(piece), ending]
                ids += own
                flags += [0] * (len(own) - 1) + [1]
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
            rewards = (hidden @ weight.T + bias)[:, 0].sigmoid()
            return rewards[torch.tensor(flags) == 1].tolist()

        return score

    return make


def recipe_two_layer(system: str | None) -> Callable[[Path], Recipe]:
    """A head of two layers, read at every separator. system: the message before the problem."""

    def make(folder: Path) -> Recipe:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
        tensors = load_file(folder / "model.safetensors")
        (separator,) = tokenizer.encode("<extra_0>")

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

        def score(problem: str, steps: list[str]) -> list[float]:
            messages = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": problem})
            answer = "<extra_0>".join(steps) + "<extra_0>"
            messages.append({"role": "assistant", "content": answer})
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            ids = torch.tensor([tokenizer.encode(text)])
            hidden = model(ids).last_hidden_state[0]
            classes = linear("score.2", linear("score.0", hidden).relu()).softmax(-1)
            return classes[ids[0] == separator][:, 1].tolist()

        return score

    return make


recipe_reasonflux = recipe_two_layer(None)
recipe_qwen = recipe_two_layer(
    r"Please reason step by step, and put your final answer within \boxed{}."
)


def recipe_outcome(folder: Path) -> Recipe:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def score(problem: str, steps: list[str]) -> list[float]:
        messages = [
            {"role": "user", "content": problem},
            {"role": "assistant", "content": "\n\n".join(steps)},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        return [float(model(ids).logits[0, 0].sigmoid())]

    return score


def recipe_reasonflux_small(folder: Path) -> Recipe:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
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
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        model = AutoModelForTokenClassification.from_pretrained(folder).eval()

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        def score(problem: str, steps: list[str]) -> list[float]:
            completions = [encode(step) + encode(separator) for step in steps]
            ids = [tokenizer.bos_token_id, *encode(problem)]
            labelled = []
            for completion in completions:
                ids += completion
                labelled.append(len(ids) - 1)
            logits = model(torch.tensor([ids])).logits[0]
            return logits.softmax(-1)[labelled, 1].tolist()

        return score

    return make


@dataclass(frozen=True)
class Golden:
    """folder: what the checkpoint's folder is called; option: how `--verifier` names it.

    family: where it is not the golden's own name.
    """

    folder: str
    write: Callable[[Path], None]
    recipe: Callable[[Path], Recipe]
    option: str = "{folder}"
    family: str = ""


GOLDENS = {
    "math-shepherd": Golden(
        "math-shepherd-mistral-7b-prm", prm_checkpoints.write_math_shepherd, recipe_math_shepherd
    ),
    "rlhflow": Golden(
        "Llama3.1-8B-PRM-Deepseek-Data", prm_checkpoints.write_rlhflow, recipe_rlhflow
    ),
    "skywork-o1": Golden("skywork", prm_checkpoints.write_skywork, recipe_skywork(None)),
    "skywork-o1-lines": Golden(
        "skywork",
        prm_checkpoints.write_skywork,
        recipe_skywork("\n"),
        "family:skywork-o1-lines:{folder}",
    ),
    "skywork-o1-paragraphs": Golden(
        "skywork",
        prm_checkpoints.write_skywork,
        recipe_skywork("\n\n"),
        "family:skywork-o1-paragraphs:{folder}",
    ),
    "qwen2.5-math-prm": Golden("qwen", prm_checkpoints.write_qwen, recipe_qwen),
    "outcome": Golden("outcome", prm_checkpoints.write_outcome, recipe_outcome),
    "skywork-reward-v2": Golden(
        "Skywork-Reward-V2-Qwen3-0.6B",
        prm_checkpoints.write_outcome_qwen3,
        recipe_outcome,
        family="outcome",
    ),
    "trl": Golden("Qwen2.5-0.5B-PRM", prm_checkpoints.write_trl, recipe_trl("\n")),
    "trl-paragraphs": Golden(
        "trl", prm_checkpoints.write_trl, recipe_trl("\n\n"), "family:trl-paragraphs:{folder}"
    ),
    "reasonflux-prm": Golden("ReasonFlux-PRM-7B", prm_checkpoints.write_qwen, recipe_reasonflux),
    "reasonflux-prm-1.5b": Golden(
        "ReasonFlux-PRM-1.5B", prm_checkpoints.write_reasonflux_small, recipe_reasonflux_small
    ),
    "versaprm": Golden("VersaPRM", prm_checkpoints.write_versaprm, recipe_versaprm),
    "math-psa": Golden("Math-psa-merged", prm_checkpoints.write_math_psa, recipe_math_psa),
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
    return golden.option.format(folder=folder)


def compare(family: str, parent: Path, num_rounds: int = 4) -> list[tuple[float, float]]:
    """(incremental, golden) of every scored step on a small tree that branches."""
    verifier = verifier_of(write_golden(family, parent))
    recipe = GOLDENS[family].recipe(parent / GOLDENS[family].folder)
    rng = random.Random(0)
    tree = fakes.new_tree(text=PROBLEM)
    survivors, pairs = [tree.root], []
    for number in range(num_rounds):
        last = number == num_rounds - 1
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(3)]
        stop = StopReason.EOS if last else StopReason.DELIMITER
        candidates = []
        for node in survivors:
            candidates += fakes.grow(tree, node, [t + "\n\n" * (not last) for t in texts], stop)
        for node, score in zip(candidates, verifier.score(candidates), strict=True):
            if score is not None:
                steps = [each.step_text.strip() for each in node.path()[1:]]
                with torch.inference_mode():
                    pairs.append((score, recipe(PROBLEM, steps)[-1]))
        survivors = rng.sample(candidates, 2)
        for node in candidates:
            (tree.keep if node in survivors else tree.prune)(node)
        verifier.release(tree.release_dead())
        verifier.tree_model.store.check()
    return pairs
