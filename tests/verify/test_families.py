"""Every verifier family: golden scores, recognition, and the outcomes that are no score."""

import shutil
from pathlib import Path

import pytest
import torch

import prm_checkpoints as checkpoints
import prm_goldens as goldens
from beamwright.errors import InputError
from beamwright.sections import ModelSettings
from beamwright.tree import StopReason
from beamwright.verify.family import families, load_spec
from beamwright.verify.find import find_verifier_shape, resolve_verifier, show_verifier
from fakes import grow, new_tree
from prm_goldens import GENERATIVE, GOLDENS, PROBLEM, family_of, verifier_of

ENDED_PATHS = ("outcome", "skywork-reward-v2", "reasonflux-prm-1.5b")
EVERY_STEP = [name for name in GOLDENS if name not in ENDED_PATHS]
READS_LOGITS = ("math-shepherd", "rlhflow", "versaprm", "math-psa")
NAMED_BY_ITSELF = [name for name, golden in GOLDENS.items() if not golden.chosen]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """What `--verifier` is given for each family's tiny checkpoint."""
    return {name: goldens.write_golden(name, tmp_path_factory.mktemp("prm")) for name in GOLDENS}


@pytest.fixture
def copied(options, tmp_path):
    """Copy a family's checkpoint into a folder of any name, and change it."""

    def copy(kind, name="anything"):
        return shutil.copytree(folder_of(options[kind]), tmp_path / name)

    return copy


def folder_of(option):
    return option.rpartition(":")[2]


def recipe_score(family, option, steps):
    with torch.inference_mode():
        return GOLDENS[family].recipe(Path(folder_of(option)))(PROBLEM, steps)[-1]


# --- golden scores ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", GOLDENS)
def test_scores_equal_the_published_recipe(family, tmp_path):
    pairs = goldens.compare(family, tmp_path)
    for own, golden in pairs:
        assert own == pytest.approx(golden, abs=1e-4)
    assert len({round(own, 4) for own, _ in pairs}) > len(pairs) * 2 / 3, "steps must differ"
    assert len(pairs) == (6 if family in ENDED_PATHS else 21)


@pytest.mark.parametrize("family", GOLDENS)
def test_the_shape_that_is_planned_is_the_one_that_is_loaded(family, options):
    """A head of its own takes the LM head's place in both."""
    settings = ModelSettings(verifier=options[family])
    planned, model = find_verifier_shape(settings), resolve_verifier(settings).model
    assert planned == model.decoder.shape
    assert planned.has_lm_head == (family in READS_LOGITS)


def test_every_row_has_a_golden():
    assert set(families()) == {*map(family_of, GOLDENS), *GENERATIVE}


# --- what has no score -----------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY_STEP)
def test_a_step_of_newlines_has_no_score_and_leaves_no_trace(options, family):
    verifier, tree = verifier_of(options[family]), new_tree(text=PROBLEM)
    first, blank = grow(tree, tree.root, ["We see.\n\n", "\n\n"])
    assert verifier.score([first, blank])[1] is None
    tree.keep(first)
    (empty,) = grow(tree, first, ["\n\n"])
    assert verifier.score([empty]) == [None]
    tree.keep(empty)
    (last,) = grow(tree, empty, ["So 12."], StopReason.EOS)
    golden = recipe_score(family, options[family], ["We see.", "So 12."])
    assert verifier.score([last]) == [pytest.approx(golden, abs=1e-4)]
    tree.keep(blank)
    (after,) = grow(tree, blank, ["So 12."], StopReason.EOS)
    golden = recipe_score(family, options[family], ["So 12."])
    assert verifier.score([after]) == [pytest.approx(golden, abs=1e-4)]


def test_an_outcome_model_scores_ended_paths_only(options):
    verifier, tree = verifier_of(options["outcome"]), new_tree(text=PROBLEM)
    (step,) = grow(tree, tree.root, ["We see 12.\n\n"])
    assert verifier.score([step]) == [None]
    tree.keep(step)
    done, empty = grow(tree, step, ["So 12.", ""], StopReason.EOS)
    expected = [
        recipe_score("outcome", options["outcome"], steps)
        for steps in (["We see 12.", "So 12."], ["We see 12."])
    ]
    assert verifier.score([done, empty]) == pytest.approx(expected, abs=1e-4)
    (nothing,) = grow(tree, tree.root, ["\n"], StopReason.EOS)
    assert verifier.score([nothing]) == [None]


# --- which family ----------------------------------------------------------------------------


def recognised(folder):
    return [name for name, row in families().items() if row.detect and row.detect.matches(folder)]


def test_each_checkpoint_is_recognised_as_exactly_one_family(options, tmp_path):
    folders = {options[golden]: family_of(golden) for golden in NAMED_BY_ITSELF}
    for family, name in GENERATIVE.items():
        checkpoints.write_generative(tmp_path / name)
        folders[str(tmp_path / name)] = family
    assert len(folders) == len(NAMED_BY_ITSELF) + 2
    for folder, family in folders.items():
        assert recognised(Path(folder)) == [family]
        assert resolve_verifier(ModelSettings(verifier=folder)).spec == families()[family].spec


def test_the_hubs_cache_names_its_folders_by_commit(copied):
    name = "models--peiyi9979--math-shepherd-mistral-7b-prm/snapshots/0123"
    assert load_spec(copied("math-shepherd", name)).name == "math-shepherd"


@pytest.mark.parametrize("family", ["math-shepherd", "rlhflow"])
def test_a_language_model_is_not_taken_for_a_verifier(copied, family):
    with pytest.raises(InputError, match="name its family with --verifier family:NAME:") as e:
        load_spec(copied(family))
    assert "\n" not in str(e.value)
    for name in families():
        assert name in str(e.value)


def test_two_families_are_not_guessed_between(copied):
    folder = copied("skywork-o1", "llama-3.1-PRM-Mistral-Data-and-math-shepherd")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(InputError, match="as math-shepherd and rlhflow and skywork-o1; name its"):
        load_spec(folder)


def test_a_specification_in_the_folder_wins_and_a_named_family_wins_over_it(copied):
    folder = copied("skywork-o1")
    written = 'family: skywork-o1\naggregate: min\ntemplate: {prefix: "{problem} "}\n'
    (folder / "verifier.yaml").write_text(written)
    spec, row = load_spec(folder), families()["skywork-o1"].spec
    assert (spec.aggregate, spec.template.prefix) == ("min", "{problem} ")
    assert spec.template.model_copy(update={"prefix": row.template.prefix}) == row.template
    named = verifier_of(f"family:skywork-o1-lines:{folder}").spec
    assert named == families()["skywork-o1-lines"].spec


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("family:skyworks:{folder}", "'skyworks' is unknown; known: gen-prm, math-psa"),
        ("family:skywork-o1", "write family:NAME:PATH"),
        ("family:outcome:{folder}", "no tensor named score.weight"),
        ("family:skywork-o1:/nowhere", "/nowhere: no such folder"),
    ],
)
def test_a_family_that_does_not_fit_is_one_line(options, option, complaint):
    with pytest.raises(InputError, match=complaint) as caught:
        verifier_of(option.format(folder=folder_of(options["skywork-o1"])))
    assert "\n" not in str(caught.value)


def test_a_row_must_say_what_it_looks_for(tmp_path):
    row = "name: mine\nread: end\nhead: {kind: linear, layers: [score]}\nactivation: sigmoid\n"
    (tmp_path / "mine.yaml").write_text(row + "detect: {tensor: [score.weight]}\n")
    with pytest.raises(InputError, match=r"mine\.yaml: detect: tensor: Extra inputs"):
        families(tmp_path)
    (tmp_path / "mine.yaml").write_text(row)
    assert families(tmp_path)["mine"].detect is None


# --- heads -----------------------------------------------------------------------------------


def test_a_chat_format_needs_a_chat_template(copied):
    folder = copied("rlhflow", "Llama3.1-8B-PRM-Mistral-Data")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="format rlhflow: its checkpoint has no chat template"):
        verifier_of(str(folder))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    with pytest.raises(InputError, match="format rlhflow: chat template: no such role"):
        verifier_of(str(folder)).score(grow(tree := new_tree(), tree.root, ["a"]))


# --- what `doctor --verifier PATH --show` says -------------------------------------------------


@pytest.mark.parametrize(
    ("family", "read"),
    [
        ("qwen2.5-math-prm", ["<extra_0>"] * 3),
        ("skywork-o1", ["\n"] * 3),
        ("rlhflow", ["\n\n"] * 3),  # where + is predicted
        ("outcome", [None, None, "<|eot_id|>"]),
    ],
)
def test_where_each_format_is_read(options, family, read):
    steps = show_verifier(ModelSettings(verifier=options[family]))["steps"]
    assert [step["read"][0].strip(" ") if step["read"] else None for step in steps] == read


@pytest.mark.parametrize("name", ["logprob", "none", "deepconf:64", "judge:{folder}"])
def test_what_has_no_tokens_to_read_is_an_error(name, generator_folder):
    name = name.format(folder=generator_folder)
    with pytest.raises(InputError, match="--show needs a reward model"):
        show_verifier(ModelSettings(verifier=name))
