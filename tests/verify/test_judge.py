"""Judges: critiques and scores against plain `transformers`, on any budget, and what fails."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import prm_checkpoints as checkpoints
from beamwright.attention import make_attention
from beamwright.errors import CapacityError, InputError
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings, SamplingSettings
from beamwright.tree import StopReason
from beamwright.verify.find import resolve_verifier
from beamwright.verify.spec import load_judge
from engines import PROBLEM, grow
from fakes import grow as add_steps
from fakes import new_tree
from played import random_rounds
from prm_checkpoints import CHAT_ML, FAULT, LLAMA_3
from tables import beside

CASES = beside(__file__)

ENDS = {LLAMA_3: [2, 7, 114], CHAT_ML: [2, 35, 114]}
SHORT = (
    'prompt: "Q: {problem}\\nA:\\n{steps}\\nWell?"\nstep: "{number}. {step}\\n"\nmax_tokens: 20\n'
)
WORDS = ["the sea is wide.", "12+3=15", "a - b", "she\n  sees", "x" * 30, "We\nthe", FAULT, "eel."]


def write_random(folder, template):
    checkpoints.write_random_judge(folder, template, ENDS[template])
    (folder / "judge.yaml").write_text(SHORT)
    return folder


@pytest.fixture(scope="module")
def random_judge(tmp_path_factory):
    """A folder of a random chat model with a short `judge.yaml`."""
    return write_random(tmp_path_factory.mktemp("judge"), LLAMA_3)


@pytest.fixture(scope="module")
def made_judge(tmp_path_factory):
    """A folder of a chat model that finds steps with a `FAULT` worse; packaged prompt."""
    folder = tmp_path_factory.mktemp("judge")
    checkpoints.write_made_judge(folder)
    return folder


@cache
def source_of(folder, **settings):
    return resolve_verifier(ModelSettings(verifier=f"judge:{folder}", **settings))


def judge_of(folder, attention="tree", budget=2**23, changes=None, **settings):
    """A judge; `changes` to what its folder's `judge.yaml` says."""
    source = source_of(folder, **settings)
    spec = source.spec.model_copy(update=changes or {})
    model = TreeModel(source.model.decoder, make_attention(attention), budget)
    return replace(source, spec=spec).make_verifier(model)


def random_tree(seed=0, num_rounds=3, problem_id=0):
    """Yield the candidates of every round."""
    return random_rounds(
        lambda rng: " ".join(rng.choices(WORDS, k=rng.randint(1, 3))) + "\n\n",
        seed,
        num_rounds,
        PROBLEM,
        problem_id,
        StopReason.EOS,
    )


def assert_nothing_kept(judge):
    """Prompts and critiques are freed as soon as they are read."""
    judge.tree_model.store.check()
    assert judge.tree_model.store.num_segments == 0
    assert judge.tree_model.budget.used_bytes == 0


# --- the oracle ------------------------------------------------------------------------------


class Oracle:
    """The whole conversation through `transformers`, greedily."""

    def __init__(self, folder, ends):
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.spec, self.ends = load_judge(folder), ends

    def prompt(self, node):
        steps = [each.step_text.strip("\n").rstrip() for each in node.path()[1:]]
        written = [
            self.spec.step.replace("{number}", str(number)).replace("{step}", step)
            for number, step in enumerate(steps, start=1)
        ]
        text = self.spec.prompt.replace("{problem}", node.root.problem_text)
        turns = [{"role": "user", "content": text.replace("{steps}", "".join(written))}]
        return self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )

    def __call__(self, node):
        """The prompt's length, the critique's tokens, its text and its score."""
        prompt = self.prompt(node)
        with torch.inference_mode():
            found = self.model.generate(
                **prompt,
                do_sample=False,
                max_new_tokens=self.spec.max_tokens,
                eos_token_id=self.ends,
                pad_token_id=0,
            )
        length = prompt["input_ids"].shape[1]
        tokens = found[0, length:].tolist()
        text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        score = self.spec.read_score(text) if tokens[-1] in self.ends else None
        return length, tokens, text, score


@pytest.mark.parametrize(
    ("template", "attention"),
    [(LLAMA_3, "tree"), (LLAMA_3, "dense"), (LLAMA_3, "reference"), (CHAT_ML, "tree")],
    ids=["tree", "dense", "reference", "chat-ml"],
)
def test_critiques_equal_those_of_plain_transformers(tmp_path, template, attention):
    folder = write_random(tmp_path, template)
    judge = judge_of(folder, attention, dtype="float64")
    oracle = Oracle(folder, sorted(judge.end_ids))
    lengths, texts = set(), set()
    for tree, candidates in random_tree():
        scores = judge.score(candidates)
        for node, score in zip(candidates, scores, strict=True):
            length, tokens, text, expected = oracle(node)
            assert node.notes == {"critique": text}
            assert node.usage["verifier_generated"] == len(tokens)
            assert node.usage["verifier_prefilled"] == length
            assert score == expected
            assert node.usage["judge_unparsed"] == (score is None)
            lengths.add(len(tokens))
            texts.add(text)
        assert_nothing_kept(judge)
        tree.pop_dead()
    assert len(lengths) > 3, "some critiques end early"
    assert len(texts) > 6, "critiques depend on the path"


# --- batches and budgets ---------------------------------------------------------------------


class Stopped(Exception):
    """Raised in the middle of a critique."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Stopped, CapacityError])
@pytest.mark.parametrize(
    "place", ["forward", "deactivate_rows", "prepare", "arrange_rows", "_open_view", "compaction"]
)
def test_whatever_happens_questions_and_critiques_are_freed(random_judge, monkeypatch, kind, place):
    judge = judge_of(random_judge)
    ((tree, nodes),) = random_tree(5, num_rounds=1)
    nodes += add_steps(tree, tree.root, [f"{i} eels" for i in range(9)])

    def fail(*args, **named):
        raise CapacityError("a test", 1, 0, 0) if kind is CapacityError else kind

    def fail_later(session, kept, *joining):
        return fail() if kept else real(session, kept, *joining)

    real = DecodeSession.arrange_rows
    with monkeypatch.context() as patch:
        if place == "compaction":
            patch.setattr(DecodeSession, "arrange_rows", fail_later)
        else:
            patch.setattr(DecodeSession, place, fail)
        with pytest.raises(kind):
            judge.score(nodes)
    assert_nothing_kept(judge)
    assert judge.tree_model.store.scratch.used_bytes == 0


@pytest.mark.parametrize("sees", ["answer", "both"])
def test_a_judge_reads_what_it_sees(made_judge, sees):
    """Without the thought, the critique is that of the answer alone."""
    judge = judge_of(made_judge, changes={"sees": sees})
    tree = new_tree(text=PROBLEM)
    (thought,) = add_steps(tree, tree.root, ["Hm, are we 5?\n\n"])
    thought.thought = True
    tree.keep(thought)
    (step,) = add_steps(tree, thought, ["We see 12."])
    other = new_tree(text=PROBLEM)
    (alone,) = add_steps(other, other.root, ["We see 12."])
    judge.score([step])
    judge.score([alone])
    shorter = alone.usage["verifier_prefilled"] < step.usage["verifier_prefilled"]
    assert shorter == (sees == "both")
    assert judge.traits.sees == sees


def test_several_critiques_are_averaged(made_judge):
    tree, how = new_tree(text=PROBLEM), SamplingSettings(temperature=140.0)
    nodes = add_steps(tree, tree.root, ["We see.", f"We see {FAULT}.", "We"])
    scores = judge_of(made_judge, changes={"samples": 8, "sampling": how}).score(nodes)
    spec, unparsed = load_judge(made_judge), []
    for node, score in zip(nodes, scores, strict=True):
        found = [spec.read_score(text) for text in node.notes.values()]
        stated = [each for each in found if each is not None]
        assert len(found) == 8
        assert score == (pytest.approx(sum(stated) / len(stated)) if stated else None)
        assert node.usage["judge_unparsed"] == 8 - len(stated)
        unparsed.append(8 - len(stated))
    assert 8 in unparsed, "none states a score"
    assert any(0 < count < 8 for count in unparsed)


def test_greedy_critiques_of_equal_paths_are_written_once(made_judge):
    texts = ["We see.", f"We see {FAULT}.", "We see.", "We see."]
    nodes, drawn, *apart = (
        add_steps(tree := new_tree(text=PROBLEM), tree.root, each)
        for each in (texts, texts, *([text] for text in texts))
    )
    apart = [node for (node,) in apart]
    judge = judge_of(made_judge)
    assert judge.score(nodes) == [judge.score([node])[0] for node in apart]
    assert [node.notes for node in nodes] == [node.notes for node in apart]
    spent = [node.usage["verifier_generated"] for node in nodes]
    assert spent == [*(node.usage["verifier_generated"] for node in apart[:2]), 0, 0]
    how = SamplingSettings(temperature=1.0)
    judge_of(made_judge, changes={"sampling": how}).score(drawn)
    assert all(node.usage["verifier_generated"] for node in drawn), "each has its own stream"


# --- what has no score -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "score"),
    [
        *CASES["scores"],
        (f"Score: {'9' * 400}/10", None),
    ],
)
def test_how_a_score_is_read(made_judge, text, score):
    assert load_judge(made_judge).read_score(text) == score


def test_the_context_cuts_critiques_off_and_hides_paths(made_judge):
    tree = new_tree(text=PROBLEM)
    (node,) = add_steps(tree, tree.root, ["We see."])
    judge_of(made_judge).score([node])
    length = node.usage["verifier_prefilled"]
    for room, expected in [(12, 0.7), (11, None), (1, None), (0, None), (-200, None)]:
        judge, tree = judge_of(made_judge, context=length + room), new_tree(text=PROBLEM)
        short, long = add_steps(tree, tree.root, ["We see.", "We see" + "!" * 20])
        assert judge.score([short, long]) == [expected, None]
        assert short.usage["verifier_generated"] == max(0, room)
        assert not long.notes
        assert_nothing_kept(judge)
        tree.keep(long)
        assert judge.score(add_steps(tree, long, ["!"])) == [None]


# --- what is wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "complaint"), CASES["templates"])
def test_a_chat_template_that_fails_or_is_missing_is_named(tmp_path, template, complaint):
    checkpoints.write_random_judge(tmp_path, LLAMA_3, [2])
    file = tmp_path / "chat_template.jinja"
    if template is None:
        file.unlink()
    else:
        file.write_text(template)
    with pytest.raises(InputError, match=complaint) as caught:
        judge_of(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("written", "complaint"), CASES["files"])
def test_a_wrong_judge_file_is_one_line(tmp_path, written, complaint):
    (tmp_path / "judge.yaml").write_text(written)
    with pytest.raises(InputError, match=rf"judge\.yaml: {complaint}") as caught:
        load_judge(tmp_path)
    assert "\n" not in str(caught.value)


# --- whole searches --------------------------------------------------------------------------

SEARCH = {"n": 8, "width": 4, "max_rounds": 2, "temperature": 1.3}


def test_a_search_with_a_judge(make_solver, made_judge):
    solution, tree = grow(make_solver(verifier=f"judge:{made_judge}", **SEARCH))
    scored = [node for node in tree.nodes() if node.notes]
    assert {node.step_score for node in scored} == {0.3, 0.7}
    assert all(node.step_score == (0.3 if FAULT in node.text else 0.7) for node in scored)
    spent = [node for node in scored if node.usage["verifier_generated"]]
    assert solution.tokens.verifier_generated == 12 * len(spent)
    assert len({node.text for node in scored}) == len(spent) <= len(scored)
    for candidate in solution.to_json()["candidates"]:
        assert candidate["notes"]["critique"].startswith("Score: ")
    assert solution.score == max(c.score for c in solution.candidates)
