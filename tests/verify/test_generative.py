"""ThinkPRM and GenPRM: critiques that end in one word, against plain `transformers`."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import engines
import prm_checkpoints as checkpoints
from beamwright.attention import make_attention
from beamwright.engine.noise import gumbel_noise, lineage_key, spread_tokens, stack_keys
from beamwright.errors import CapacityError, InputError
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings, SamplingSettings
from beamwright.tree import StopReason
from beamwright.verify.family import load_spec
from beamwright.verify.find import resolve_verifier
from fakes import grow, new_tree
from prm_goldens import GENERATIVE
from tables import beside

TEXTS = ["## Step 1: the sea.\n\n", "12+3=15\n\n", "she\n  sees eels\n\n", "a - b\n\n", "\n\n"]
INSTRUCTION = (
    "Review and critique each step in the proposed solution to determine whether each step is "
    "correct. If the solution is incomplete, only verify the provided steps."
)
TEACHER = (
    "You are a math teacher. Your task is to review and critique the paragraphs in solution step "
    "by step."
)
SHORT = {"max_tokens": 12}
DRAWN = SamplingSettings(temperature=0.7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prm") / "any"
    folder.mkdir()
    checkpoints.write_generative(folder)
    return folder


@pytest.fixture(scope="module")
def sources(folder):
    """Each family's source, in float64."""
    settings = {
        name: ModelSettings(verifier=f"family:{name}:{folder}", dtype="float64")
        for name in GENERATIVE
    }
    return {name: resolve_verifier(one) for name, one in settings.items()}


@pytest.fixture
def judge(sources):
    """Makes a judge of a family; `changes` to its declaration."""

    def make(family, budget=2**24, attention="tree", **changes):
        source = sources[family]
        source = replace(source, spec=source.spec.model_copy(update={**SHORT, **changes}))
        return source.make_verifier(
            TreeModel(source.model.decoder, make_attention(attention), budget)
        )

    return make


def random_tree(seed=0):
    """Yield the candidates of three rounds; between rounds one survives."""
    tree, survivor = new_tree(seed, text=engines.PROBLEM), None
    for number in range(3):
        stop = StopReason.EOS if number == 2 else StopReason.DELIMITER
        texts = TEXTS[number + seed % 2 :][: 3 - number]
        nodes = grow(tree, survivor or tree.root, texts, stop)
        yield nodes
        survivor = nodes[0]
        for node in nodes:
            (tree.keep if node is survivor else tree.prune)(node)


def drop_number(text):
    return text.partition(":")[2].strip() if "Step" in text else text


# --- the oracle ------------------------------------------------------------------------------


class Oracle:
    """Both published recipes over one model of `transformers`, a critique at a time."""

    def __init__(self, folder, spec):
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.spec = spec
        self.spread = spread_tokens(torch.arange(self.model.config.vocab_size))
        how = spec.sampling
        self.warp = LogitsProcessorList()
        if how.temperature:
            self.warp.append(TemperatureLogitsWarper(how.temperature))
        if how.top_k:
            self.warp.append(TopKLogitsWarper(how.top_k))
        if how.top_p < 1:
            self.warp.append(TopPLogitsWarper(how.top_p))

    def logits(self, ids):
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[:, -1]

    def write(self, text, stops, key):
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        start = len(ids)
        while len(ids) < start + self.spec.max_tokens:
            scores = self.logits(ids).float()
            if self.warp:
                noise = gumbel_noise(
                    stack_keys([key], "cpu"), torch.tensor([len(ids)]), self.spread
                )
                scores = self.warp(torch.tensor([ids]), scores) + noise
            ids.append(int(scores.argmax()))
            said = self.tokenizer.decode(ids[start:], skip_special_tokens=True)
            if ids[-1] == self.tokenizer.eos_token_id:
                return said
            for stop in stops:
                if stop in said:
                    return said[: said.index(stop)]
        return said

    def weigh(self, text, good, bad):
        logits = self.logits(self.tokenizer.encode(text, add_special_tokens=False))[0]
        pair = self.tokenizer.convert_tokens_to_ids([good, bad])
        return float(logits[pair].softmax(-1)[0])

    def chat(self, turns):
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def score(self, node, sample=0):
        steps = [step for step in node.reply() if step.step_text.strip()]
        recipe = self.think if self.spec.name == "think-prm" else self.gen
        return recipe(steps, sample)

    def think(self, steps, sample):
        written = [drop_number(step.step_text.strip()) for step in steps]
        solution = "\n".join(f"Step {i}: {text}" for i, text in enumerate(written, start=1))
        asked = (
            "You are given a math problem and a proposed step-by-step solution:\n\n[Math Problem]"
            f"\n\n{engines.PROBLEM}\n\n[Solution]\n\n{solution}\n\n{INSTRUCTION}"
        )
        text = self.chat([{"role": "user", "content": asked}]) + "\nLet's verify step by step:"
        stops = [stop.replace("{next}", str(len(steps) + 1)) for stop in self.spec.stops]
        key = lineage_key(0, steps[-1].lineage, f"critique {sample}")
        text += self.write(text, stops, key) + "\nIs the solution correct?"
        return self.weigh(text, "Ġyes", "Ġno")

    def gen(self, steps, sample):
        turns = [{"role": "system", "content": TEACHER}]
        for number, step in enumerate(steps, start=1):
            before = "" if number > 1 else f"Question: {engines.PROBLEM}\n\n"
            turns.append({"role": "user", "content": before + step.step_text.strip()})
            said = f"<analyze>\nLet's analyze the Paragraph {number} step by step: "
            asked = self.chat(turns)
            which = sample if step is steps[-1] else 0
            key = lineage_key(0, step.lineage, f"critique {which}")
            said += self.write(asked + said, self.spec.stops, key)
            said += "</analyze>\n<output>\n**Judgement**: $\\boxed{"
            score = self.weigh(asked + said, "Yes", "No")
            said += "Yes" if score >= 0.5 else "No"
            turns.append({"role": "assistant", "content": said + "}$\n</output>\n"})
        return score


CASES = [
    ("think-prm", {}),
    ("think-prm", {"stops": ("i", "{next}")}),
    ("think-prm", {"samples": 2, "sampling": DRAWN}),
    ("gen-prm", {}),
    ("gen-prm", {"stops": ("e", "th"), "samples": 2}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_scores_equal_the_published_recipe(folder, judge, family, changes):
    verifier, pairs = judge(family, **changes), []
    oracle = Oracle(folder, verifier.spec)
    for nodes in random_tree():
        for node, score in zip(nodes, verifier.score(nodes), strict=True):
            if not node.step_text.strip():
                assert score is None
                continue
            expected = [oracle.score(node, k) for k in range(verifier.spec.samples)]
            pairs.append((score, sum(expected) / len(expected)))
    assert len(pairs) == 6
    assert [own for own, _ in pairs] == pytest.approx([e for _, e in pairs], abs=1e-6)
    assert len({round(own, 6) for own, _ in pairs}) == 6
    assert verifier.tree_model.store.num_segments == 0
    assert verifier.tree_model.budget.used_bytes == 0


# --- batches, budgets, streams ---------------------------------------------------------------


def facts(nodes):
    counts = ("verifier_prefilled", "verifier_generated", "judge_unparsed")
    return [(node.notes, [node.usage[name] for name in counts]) for node in nodes]


@pytest.mark.parametrize("family", GENERATIVE)
@pytest.mark.parametrize("attention", ["tree", "dense"])
def test_drawn_critiques_depend_on_neither_batch_nor_budget(judge, family, attention):
    changes = {"samples": 3, "sampling": DRAWN, "attention": attention}
    whole, apart = judge(family, **changes), judge(family, **changes)
    a, b, c, others = (next(random_tree(seed)) for seed in (0, 0, 0, 1))
    expected = whole.score(a)
    assert [apart.score([node])[0] for node in reversed(b)][::-1] == expected
    block = whole.tree_model.store.device.bytes_per_block
    most = -(-whole.tree_model.budget.peak_bytes // block)
    small = judge(family, budget=most // 4 * block, **changes)
    assert small.score([*others, *c])[len(others) :] == expected
    assert facts(a) == facts(b) == facts(c)
    with pytest.raises(CapacityError):
        judge(family, budget=2 * block, **changes).score(b)


def test_a_note_holds_all_that_was_said(judge):
    nodes = next(random_tree())
    opening = "<analyze>\nLet's analyze the Paragraph 1 step by step: "
    for node, score in zip(nodes, judge("gen-prm", stops=("e",)).score(nodes), strict=True):
        note = node.notes["critique"]
        assert note.startswith(opening)
        assert note.endswith(f"\\boxed{{{'Yes' if score >= 0.5 else 'No'}}}$\n</output>\n")
        assert "e" not in note.removeprefix(opening).partition("</analyze>")[0]


def test_a_suffix_has_to_fit_the_context(folder, judge):
    full = judge("think-prm")
    (node, *_) = next(random_tree())
    (row,) = full._critiques(node)
    asked = len(row.given) + len(full._codec.encode(full.spec.suffix))
    for room in (0, 1, 5):
        option = {"verifier": f"family:think-prm:{folder}", "context": asked + room}
        source = resolve_verifier(ModelSettings(**option))
        (node, *_) = next(random_tree())
        tree_model = TreeModel(source.model.decoder, make_attention("tree"), 2**23)
        (score,) = source.make_verifier(tree_model).score([node])
        assert (score is None) == (room == 0)
        assert node.usage["verifier_generated"] == room


# --- whole searches --------------------------------------------------------------------------

SEARCH = {"n": 6, "width": 3, "max_rounds": 2, "temperature": 1.3, "dtype": "float64"}


@pytest.mark.parametrize("family", GENERATIVE)
def test_a_search_does_not_depend_on_its_schedule(make_solver, folder, tmp_path, family):
    checkpoints.write_generative(tmp_path)
    drawn = "samples: 2\nsampling: {temperature: 0.9}\nmax_tokens: 6\n"
    (tmp_path / "verifier.yaml").write_text(f"family: {family}\n{drawn}")
    found = []
    for options in ({"speculation": "off"}, {"speculation": "exact", "max_batch": 3}):
        solution, tree = engines.grow(make_solver(verifier=str(tmp_path), **SEARCH, **options))
        scored = {n.lineage: (n.step_score, n.notes) for n in tree.nodes() if n.notes}
        found.append((solution.tree_hash, scored))
    assert found[0] == found[1]
    assert len({score for score, _ in found[0][1].values()}) > 3


# --- declarations ----------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "complaint"), beside(__file__)["declarations"])
def test_a_wrong_declaration_is_one_line(tmp_path, written, complaint):
    (tmp_path / "verifier.yaml").write_text(f"family: think-prm\n{written}\n")
    with pytest.raises(InputError, match=complaint) as caught:
        load_spec(tmp_path)
    assert "\n" not in str(caught.value)


def test_words_that_are_several_tokens_are_refused(judge):
    with pytest.raises(InputError, match=r"'absolutely' must be one token, not"):
        judge("think-prm", good="absolutely")
