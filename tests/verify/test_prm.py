"""PRM scores with KV on the tree, against re-encoding every path from scratch."""

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from beamwright.attention import make_attention
from beamwright.models.load import load_model
from beamwright.models.tree_model import TreeModel
from beamwright.sections import ModelSettings
from beamwright.verify.prm import PrmVerifier
from beamwright.verify.spec import LIKELIHOOD_SPEC, VerifierSpec
from fakes import grow, new_tree
from played import random_rounds
from tables import beside

PROBLEM = "Ann has 12 eels. How many see the sea?"

# The families' own formats are compared with their recipes in test_families.
SPECS = {**beside(__file__), "likelihood": LIKELIHOOD_SPEC.model_dump()}


def spec_of(name):
    return VerifierSpec.model_validate({"name": name, **SPECS[name]})


@pytest.fixture(scope="module", autouse=True)
def heads(verifier_folder):
    """Random head weights beside the checkpoint."""
    generator = torch.Generator().manual_seed(0)

    def layers(*sizes):
        found = {}
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            found[f"layers.{i}.weight"] = torch.randn(outputs, inputs, generator=generator) / 4
            found[f"layers.{i}.bias"] = torch.randn(outputs, generator=generator) / 4
        return found

    save_file(layers(32, 1), verifier_folder / "linear.safetensors")
    mlp = layers(32 + 32 + 3, 24, 8, 1)
    mlp["layers.2.bias"] += 3.0  # products of many probabilities must not vanish
    save_file(mlp, verifier_folder / "mlp.safetensors")
    return verifier_folder


@pytest.fixture
def make_verifier(verifier_folder):
    def make(name="linear-at-step-end", attention="tree", budget=2**22, **settings):
        loaded = load_model(str(verifier_folder), ModelSettings(**settings), role="verifier")
        model = TreeModel(loaded.decoder, make_attention(attention), budget)
        return PrmVerifier(spec_of(name), loaded, model)

    return make


# --- the oracle ------------------------------------------------------------------------------


class Oracle:
    """Re-encodes a whole path and reads the same place with plain formulas."""

    def __init__(self, folder, name):
        self.folder, self.spec = folder, spec_of(name)
        self.codec = load_model(str(folder), ModelSettings()).codec
        dtype = torch.float64
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def score(self, node):
        prefix = self.spec.template.prefix or "{problem}\n\n"
        text = prefix.replace("{problem}", node.root.problem_text)
        for step in node.path()[1:]:
            begin = len(text)
            text += step.step_text
        if not node.step_text:
            return None
        (ids,), (spans,) = self.codec.encode_with_offsets([text])
        with torch.inference_mode():
            out = self.model(torch.tensor([ids]), output_hidden_states=True)
        hidden, logits = out.hidden_states[-1][0], out.logits[0]
        inside = [i for i, (_, b) in enumerate(spans) if b > begin]
        if self.spec.read == "every_token":
            combine = {"prod": math.prod, "min": min}[self.spec.combine]
            return combine(self._token(hidden, logits, ids, i) for i in inside)
        return float(self._stack(hidden[inside[-1]], torch.relu)[0].sigmoid())

    def _stack(self, x, activate):
        tensors = load_file(self.folder / self.spec.head.file)
        for i in range(len(tensors) // 2):
            x = activate(x) if i else x
            x = tensors[f"layers.{i}.weight"].double() @ x + tensors[f"layers.{i}.bias"].double()
        return x

    def _token(self, hidden, logits, ids, i):
        logprobs = logits[i - 1].log_softmax(0)
        own = logprobs[ids[i]]
        if self.spec.head.kind == "token_logprob":
            return float(own.exp())
        parts = {
            "previous_hidden": hidden[i - 1],
            "token_embedding": self.model.get_input_embeddings().weight.detach()[ids[i]],
            "logprob": own[None],
            "entropy": torch.distributions.Categorical(logits=logits[i - 1]).entropy()[None],
            "gap": (logprobs.max() - own)[None],
        }
        x = torch.cat([parts[name] for name in self.spec.head.features])
        return float(self._stack(x, torch.nn.functional.gelu)[0].sigmoid())


# --- random trees ----------------------------------------------------------------------------

# Many steps end in "e", which merges with the first letter of the next one.
WORDS = ["sea is wide", "12+3=15e", "a ", "e", "\n\n", "he", "she.\n\ne", "x" * 30, "We\n"]


def random_tree(seed=0, num_rounds=4, problem_id=0):
    """Yield the candidates of every round of one tree."""
    return random_rounds(
        lambda rng: "".join(rng.choices(WORDS, k=rng.randint(1, 3))),
        seed,
        num_rounds,
        PROBLEM + "e" * seed,
        problem_id,
    )


@pytest.mark.parametrize("attention", ["tree", "reference"])
@pytest.mark.parametrize("name", SPECS)
def test_scores_equal_re_encoding_the_whole_path(make_verifier, verifier_folder, name, attention):
    verifier, oracle = make_verifier(name, attention), Oracle(verifier_folder, name)
    different = set()
    for seed in range(2):
        for tree, candidates in random_tree(seed, problem_id=seed):
            scores = verifier.score(candidates)
            for node, score in zip(candidates, scores, strict=True):
                assert score == pytest.approx(oracle.score(node), abs=1e-4)
            different |= {round(score, 4) for score in scores}
            verifier.release(tree.pop_dead())
            verifier.tree_model.store.check()
            held = {node for node in tree.nodes() if "verifier" in node.handles}
            assert held == tree.held
            states = {id(node.handles["verifier"]) for node in held}
            assert verifier.tree_model.store.num_segments == len(states)
        tree.done = True
        verifier.release(tree.pop_dead())
        assert verifier.tree_model.budget.used_bytes == 0
    assert len(different) > 15, "the head must tell steps apart"


def rows_of(verifier, monkeypatch):
    """Tokens of each request of every pass that this verifier makes from now on."""
    prefill, rows = verifier.tree_model.prefill, []

    def noted(requests):
        rows.append([len(request.token_ids) for request in requests])
        return prefill(requests)

    monkeypatch.setattr(verifier.tree_model, "prefill", noted)
    return rows


@pytest.mark.parametrize("name", SPECS)
def test_steps_whose_paths_are_equal_are_computed_once(make_verifier, name, monkeypatch):
    """In one call or in several: the bits of every step alone, and nothing is read twice."""
    texts = ["she", "a sea", "she", "she", "a sea"]
    verifier = make_verifier(name)
    apart = [make_verifier(name) for _ in texts]
    tree, alone = new_tree(0, text=PROBLEM), [new_tree(0, text=PROBLEM) for _ in texts]
    siblings = grow(tree, tree.root, texts)
    others = [grow(each, each.root, [text])[0] for each, text in zip(alone, texts, strict=True)]
    rows = rows_of(verifier, monkeypatch)
    found = verifier.score(siblings[:3]) + verifier.score(siblings[3:])
    assert found == [v.score([node])[0] for v, node in zip(apart, others, strict=True)]
    assert [len(each) for each in rows if each] == [1, 2]
    assert [bool(n.usage["verifier_prefilled"]) for n in siblings] == [True] * 2 + [False] * 3
    for node in (siblings[2], siblings[3]):
        tree.keep(node)
    for each, node in zip(alone, others, strict=True):
        each.keep(node)
    for node in (siblings[0], siblings[1], siblings[4]):
        tree.prune(node)
    verifier.release(tree.pop_dead())  # who was scored first goes, its repeats stay
    below = [grow(tree, siblings[at], ["he"])[0] for at in (2, 3)]
    expected = [apart[at].score(grow(alone[at], others[at], ["he"]))[0] for at in (2, 3)]
    assert [verifier.score([node])[0] for node in below] == expected
    assert [len(each) for each in rows if each] == [1, 2, 1]
    verifier.tree_model.store.check()
    assert sum(map(sum, rows)) == sum(n.usage["verifier_prefilled"] for n in tree.nodes())
    tree.done = True
    verifier.release(tree.pop_dead())
    assert verifier.tree_model.budget.used_bytes == 0


@pytest.mark.parametrize("attention", ["tree", "dense", "reference"])
@pytest.mark.parametrize("name", SPECS)
def test_scores_do_not_depend_on_the_batch(make_verifier, name, attention):
    """Bit for bit: all at once, one by one, backwards, and next to another tree."""
    whole, apart, backwards = (make_verifier(name, attention) for _ in range(3))
    trees = zip(random_tree(4), random_tree(4), random_tree(4), random_tree(5), strict=True)
    for (_, a), (_, b), (_, c), (_, other) in trees:
        expected = whole.score(a)
        assert [apart.score([node])[0] for node in b] == expected
        mixed = backwards.score([*other, *c[::-1]])
        assert mixed[len(other) :][::-1] == expected


@pytest.mark.parametrize("name", SPECS)
def test_steps_of_one_path_may_come_together(make_verifier, name, monkeypatch):
    """FlashTTS 4.1.3: in one pass, to the same bits as one behind the other."""
    apart, together = make_verifier(name), make_verifier(name)
    expected = [score for _, nodes in random_tree(3) for score in apart.score(nodes)]
    rows, passes = rows_of(together, monkeypatch), []
    hidden = together.tree_model.decoder.hidden
    monkeypatch.setattr(
        together.tree_model.decoder, "hidden", lambda *a: passes.append(0) or hidden(*a)
    )
    nodes = [node for _, candidates in random_tree(3) for node in candidates]
    assert together.score(nodes) == expected
    assert len(rows) == len(passes) == 2, "the problem, and all that follows"


def test_a_path_beyond_the_verifiers_context_has_no_score(make_verifier):
    verifier = make_verifier(context=64)
    tree = new_tree(text="1+1")
    short, long = grow(tree, tree.root, ["see", "x" * 80])
    scores = verifier.score([short, long])
    assert scores[0] is not None
    assert scores[1] is None
    tree.keep(long)
    tree.prune(short)
    assert verifier.score(grow(tree, long, ["a", "b"])) == [None, None]
    tree.done = True
    verifier.release(tree.pop_dead())
    assert verifier.tree_model.store.num_segments == 0
