"""Fixtures that several rooms share: one thread, tiny checkpoints, a tree, Triton's interpreter."""

import gc
import os
from functools import partial
from importlib.util import find_spec

import pytest
import torch

# Kernels are tested by Triton's interpreter, except where there is a GPU to run them. Triton reads
# this when it is first imported, and `transformers` imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from transformers import LlamaConfig

import engines
import fakes
import quicker
from beamwright.engine.batch import RunningBatch
from beamwright.engine.decisions import store_answers
from beamwright.engine.selftest import batches_are_exact
from beamwright.engine.split import KVBudgetSplit
from beamwright.search.answers import Mathematics
from beamwright.tree import StopReason
from beamwright_lab.baselines import LayerwiseSchedule
from beamwright_lab.models.published_files import FILES
from quicker import AskedOnce

torch.set_num_threads(1)
assert LayerwiseSchedule.name == "layerwise"  # declared before tests list what there is
if "TRITON_INTERPRET" in os.environ and find_spec("triton") is not None:
    quicker.quicken()


def pytest_collection_finish():
    """Nothing that is imported or collected by now will go: garbage is looked for elsewhere.

    The libraries and thousands of tests are millions of objects, a third of a second each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def self_test_is_asked_once():
    """See `AskedOnce`. Tests of the self-test call it themselves."""
    with pytest.MonkeyPatch.context() as patch:
        asked = AskedOnce(batches_are_exact)
        patch.setattr("beamwright.engine.selftest.batches_are_exact", asked)
        yield


def pytest_addoption(parser):
    help_text = "random schedules of the running batch (tests/engine/test_running.py)"
    parser.addoption("--schedules", type=int, default=120, help=help_text)


@pytest.fixture(scope="session")
def generator_folder(tmp_path_factory):
    """A random Llama with an ASCII tokenizer; several ids end a path, so that paths do end."""
    folder = tmp_path_factory.mktemp("generator")
    fakes.write_tokenizer(folder)
    config = LlamaConfig(**{**fakes.SMALL, "eos_token_id": [2, 30, 31]}, num_key_value_heads=2)
    fakes.write_checkpoint(folder, config, seed=3, noise=0.15)
    return folder


@pytest.fixture(scope="session")
def verifier_folder(tmp_path_factory):
    """A random Llama whose tokenizer merges "e" with what follows it, across steps."""
    folder = tmp_path_factory.mktemp("verifier")
    num_tokens = fakes.write_tokenizer(folder, fakes.merges_after_e())
    config = LlamaConfig(**{**fakes.SMALL, "vocab_size": num_tokens}, num_key_value_heads=1)
    fakes.write_checkpoint(folder, config, seed=4, noise=0.1)
    fakes.write_logit_pair_spec(folder)
    return folder


def published(name):
    """A fixture: the path of a published model, a trained one."""

    @pytest.fixture(scope="session", name=name)
    def path():
        if not FILES[name].is_here:
            pytest.skip(f"{FILES[name].path} is not there: `make published` fetches it or says why")
        return FILES[name].path

    return path


smollm2, gemma = map(published, FILES)


@pytest.fixture
def make_solver(generator_folder):
    """See `engines.tiny_solver`."""
    return partial(engines.tiny_solver, generator_folder)


@pytest.fixture
def parked(monkeypatch):
    """The rows that had to leave in the middle of a step, as they do."""
    found, real = [], RunningBatch._preempt

    def spy(self, row):
        found.append(row)
        real(self, row)

    monkeypatch.setattr(RunningBatch, "_preempt", spy)
    return found


@pytest.fixture
def conserved(monkeypatch):
    """After every look at memory that moves, both ledgers and the sum of the budgets are whole.

    Returns the generator's parts.
    """
    parts, look = [], KVBudgetSplit.rebalance

    def checked(self, runs):
        look(self, runs)
        assert self.generator_bytes + self.verifier_bytes == self.total_bytes
        for store in (self._generator, self._verifier):
            store.check()
            assert store.device.budget.used_bytes <= store.device.budget.total_bytes
        parts.append(self.generator_bytes)

    monkeypatch.setattr(KVBudgetSplit, "rebalance", checked)
    return parts


@pytest.fixture
def searched():
    """A tree of two rounds with every state in it: (tree, the chosen node)."""
    tree = fakes.new_tree(num_prompt_tokens=5, text="What is 1+1?")
    first, second, third = fakes.grow(tree, tree.root, ["Add them. ", "Guess. ", "Wait. "])
    for node, score in ((first, 0.9), (second, 0.25), (third, None)):
        node.score = node.step_score = score
    tree.keep(first)
    tree.prune(second)
    tree.rounds = 1
    done, cut, _ = tree.expand(first, 3)
    fakes.add_step(tree, done, "The answer is 2.", (7, 8, 9), StopReason.EOS)
    fakes.add_step(tree, cut, "So ", (7, 8), StopReason.STEP_LIMIT)
    done.score, done.step_score, cut.score = 0.75, 0.5, float("-inf")
    tree.finish(done)
    store_answers(Mathematics(), [done])
    tree.rounds = 2
    return tree, done


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe of a text; returns its file."""

    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write
