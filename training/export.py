"""Put a trained pair into the package: weights, tokenizer, model cards and problem sets.

Each folder is written beside its destination and then moved there, so that a reader never sees
half of one. The folders are read back through `transformers` and compared with the training code.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from make_tokenizer import CONTEXT, prompt_text
from model import load
from problems import problem_set, question_text
from train_thinker import CONTEXT as LONGER

LIMIT_BYTES = 12 * 2**20


def card(title: str, about: str, measured: str) -> str:
    """A model card."""
    return (
        "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: transformers\n---\n\n"
        f"# {title}\n\n{about.strip()}\n\n{measured.strip()}\n"
    )


GENERATOR_ABOUT = """
A Llama-shaped language model of about 0.85 M parameters that solves synthetic word problems step
by step: one person, a number of things that changes month by month or not at all, none to eight
equations; the names and the things may be any words, the verbs are those of its training. It is
*weak on purpose*: an intermediate checkpoint of the run whose end is the verifier's backbone, so
that a search has something to do. It knows nothing else.

- Prompt: the chat template puts `<|bos|>`, the problem, a blank line. The model was trained
  without a system message; the template puts one before the problem, which helps nothing.
- Output: steps separated by blank lines, the last ending in `The answer is \\boxed{N}.`, then
  `<|eos|>`. Step ends are tokens that complete the blank line, nearly always `.\\n\\n`.
- Each step has three permitted wordings (terse, plain, wordy), so steps are of uneven length.
- Context 512 tokens; problems with their solutions take at most about 260, with long names more.
"""

VERIFIER_ABOUT = """
A process reward model: the strong end of the same training run (`model.safetensors`, an ordinary
causal language model) and a small MLP (`verifier_head.safetensors`) that reads every token of a
solution and gives P(token right | everything before it right); `verifier.yaml` declares how. A
step's score is the product over its tokens, a path's score the product over its steps.

It was trained on samples of the generator with dense labels: an exact checker finds the first
token that no permitted solution has there, and training stops at it. **A name or a thing copied
wrongly, a skipped event or a wrong operand is an error of the process**, even where the answer
comes out right; how often that happens is in the table below. It judges solutions in the
generator's wordings and nothing else.
"""

THINKER_ABOUT = r"""
The bundled process reward model's backbone, trained further on thoughts: it works a word problem
out between `<think>` and `</think>`, often checks what it has found, up to four times, and then
answers in one or two short sentences. It is there to test and to show search over thinking models;
it knows the bundled models' one kind of problem and nothing else.

- Prompt: the chat template puts `<|bos|>`, the problem, a blank line. The model writes `<think>`
  itself. With `enable_thinking=false` the template writes an empty thought, and the model answers
  at once, without working anything out (and hardly ever right). Thoughts of earlier turns go.
- Thought: `<think>\n`, paragraphs that end in a blank line, `\n</think>\n\n`. `<think>` and
  `</think>` are one token each, added and not special, as in Qwen3. A check begins with a
  paragraph such as `Wait, let me check that.`; where two passes disagree, the answer found most
  often stands, of several the first.
- Answer: `The answer is \boxed{N}.`, `The final answer is \boxed{N}.` or `So NAME has N THINGS.
  The answer is \boxed{N}.`, then `<|eos|>`.
- It was trained on thoughts that were closed early, too, anywhere, by `</think>` alone or behind
  a message: the answer is then the best that can be said. What follows
  `</think>\n\nThe final answer is \boxed{` is the number and `}.`; the same holds for `\boxed{`
  and `**Final answer:** \boxed{`, and in the middle of a thought behind a blank line.
- Context 2,048 tokens; few thoughts take more than 800.
- No verifier stands beside it by default: the bundled one reads worked-out solutions.
"""


def measured_text(result: dict[str, object]) -> str:
    """The measured table with the command that makes it."""
    rows = result["rows"]
    assert isinstance(rows, dict)
    sizes = list(next(iter(rows.values())))
    named = {
        "majority": "majority vote",
        "best-of-n, likelihood": "best-of-n, least token log-probability under the backbone",
        "best-of-n": "best-of-n, process reward model",
        "beam": "beam search (width 4), process reward model",
        "oracle": "any of n samples right (oracle)",
    }
    lines = ["| | " + " | ".join(f"n = {n}" for n in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for key, name in named.items():
        if key in rows:
            cells = " | ".join(f"{rows[key][n]:.3f}" for n in sizes)
            lines.append(f"| {name} | {cells} |")
    figure = {k: f"{v:.3f}" for k, v in result.items() if isinstance(v, float)}
    command = (
        "python training/evaluate.py --generator src/beamwright/bundled/generator "
        "--verifier src/beamwright/bundled/verifier "
        f"--split {result['split']} --limit {result['limit']} --n {' '.join(sizes)}"
    )
    return "\n".join(
        [
            "## Measured",
            "",
            f"N = {result['problems']} problems of the {result['split']} set, temperature "
            f"{result['temperature']}, seed {result['seed']}. At this N the standard error of an "
            f"accuracy is up to {0.5 / math.sqrt(float(str(result['problems']))):.3f}.",
            "",
            f"- one sample of the generator: **{figure['one_sample']}**",
            f"- one sample of the verifier's backbone used as the generator, no search: "
            f"**{figure['backbone_alone']}**",
            "",
            *lines,
            "",
            f"- first-error AUC of the step scores: {figure['first_error_auc']}",
            f"- a path with the right answer outranks one with a wrong answer of the same problem: "
            f"{figure['within_problem_ranking']} (least token log-probability: "
            f"{figure['within_problem_ranking_likelihood']})",
            *(
                f"- a wholly right path outranks any other of the same problem: {value}"
                for name, value in figure.items()
                if name == "within_problem_ranking_process"
            ),
            f"- right answers reached by a wrong process: {figure['right_answer_wrong_process']}",
            "",
            "```",
            command,
            "```",
        ]
    )


def check_folder(folder: Path, context: int) -> None:
    """The folder loads in transformers, gives the same logits and renders the same prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    text = question_text(problem_set("dev", 1, 0)[0])
    chat = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == prompt_text(text), rendered
    ids = torch.tensor([tokenizer(rendered)["input_ids"]])
    model = load(folder).double()
    with torch.no_grad():
        expected = reference(ids).logits
        distance = (model.logits(model(ids)) - expected).abs().max() / expected.abs().max()
    assert distance < 1e-5, distance  # both compute rotary angles in float32
    assert reference.config.max_position_embeddings == context


def publish(
    source: Path, tokenizer: Path, readme: str, destination: Path, context: int = CONTEXT
) -> None:
    """Assemble a folder, check it, and move it into place."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    fresh.chmod(0o755)
    for file in (*sorted(source.iterdir()), *sorted(tokenizer.iterdir())):
        shutil.copyfile(file, fresh / file.name)
    (fresh / "README.md").write_text(readme, encoding="utf-8")
    check_folder(fresh, context)
    if destination.exists():
        retired = Path(tempfile.mkdtemp(prefix=f".{destination.name}-old-", dir=fresh.parent))
        os.rename(destination, retired / "old")
        os.rename(fresh, destination)
        shutil.rmtree(retired)
    else:
        os.rename(fresh, destination)


def main() -> None:
    """Publish both folders of the pair, or the thinking model's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thinking", type=Path, help="a folder of train_thinker.py, alone")
    parser.add_argument("--generator", type=Path)
    parser.add_argument("--verifier", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--measured", type=Path, help="output of evaluate.py, or text for the card")
    parser.add_argument("--out", type=Path, required=True, help="src/beamwright/bundled")
    args = parser.parse_args()
    if args.thinking:
        measured = args.measured.read_text(encoding="utf-8") if args.measured else "Not measured."
        readme = card("Beamwright's bundled thinking model", THINKER_ABOUT, measured)
        publish(args.thinking, args.thinking, readme, args.out / "thinking", LONGER)
        return
    measured = "Not measured."
    if args.measured:
        last = args.measured.read_text(encoding="utf-8").strip().splitlines()[-1]
        measured = measured_text(json.loads(last))
    for name, title, about in (
        ("generator", "Beamwright's bundled generator", GENERATOR_ABOUT),
        ("verifier", "Beamwright's bundled process reward model", VERIFIER_ABOUT),
    ):
        source = getattr(args, name)
        publish(source, args.tokenizer, card(title, about, measured), args.out / name)
    folders = (args.out / "generator", args.out / "verifier")
    size = sum(f.stat().st_size for folder in folders for f in folder.iterdir())
    assert size < LIMIT_BYTES, size
    print(f"{size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
