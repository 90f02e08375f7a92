"""YAML is data of bounded size; anything else is one line that names the file."""

import pytest

from beamwright.config import Settings, load_recipe
from beamwright.errors import InputError
from beamwright.evaluate.recipes import read_recipe
from beamwright.verify.spec import load_spec
from beamwright.yaml_file import MOST_BYTES, read_yaml


def bomb(levels=12, width=10):
    """Aliases of aliases: 10^12 values in a few hundred bytes."""
    lines = ["a0: &a0 [x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines) + "\n"


@pytest.fixture
def write(tmp_path):
    def call(text, name="file.yaml"):
        file = tmp_path / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return call


BAD = {
    "aliases": (bomb(), "more than 20,000 values"),
    "circle": ("a: &a [*a]", "inside what it refers to"),
    "list": ("[" + "1, " * 30_000 + "]", "more than 20,000 values"),
    "long": ("a: " + "x" * MOST_BYTES, "larger than 256 KiB"),
    "deep": ("[" * 20_000, "nested too deeply"),
    "date": ("a: 2024-13-45", "month must be in"),
    "number": ("a: " + "9" * 5000, "not YAML"),
    "tag": ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "bytes": (b"a: \xff", "cannot be read"),
    "key": ("search: {on: 1}", "the key True is no text"),
    "list as key": ("? [1, 2]\n: 3", "not YAML"),
    "two documents": ("a: 1\n---\nb: 2", "not YAML"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_file_that_is_refused(write, text, message):
    file = write(text)
    with pytest.raises(InputError, match=message) as caught:
        read_yaml(file, "recipe")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_aliases_within_reason_and_a_mark_at_the_front(write):
    file = write("\ufeffa: &a {n: 4}\nb: {<<: *a, width: 2}\n")
    assert read_yaml(file, "recipe")["b"] == {"n": 4, "width": 2}
    assert read_yaml(write(""), "recipe") is None


def test_recipes_grids_and_verifiers_are_read_by_it(write):
    recipe = write(bomb() + "search: {n: *a8}\n")
    for read in (load_recipe, lambda file: read_recipe(file, {}), Settings.build):
        with pytest.raises(InputError, match="aliases count in full"):
            read(recipe)
    write("{}", "config.json")
    verifier = write(bomb() + "family: *a9\n", "verifier.yaml")
    with pytest.raises(InputError, match="aliases count in full"):
        load_spec(verifier.parent)


def test_a_family_that_is_no_name(write):
    file = write("family: [a]\n", "verifier.yaml")
    with pytest.raises(InputError, match="family: a name is expected"):
        load_spec(file.parent)


def test_a_grid_of_more_runs_than_anybody_means(write):
    numbers = ", ".join(map(str, range(1, 30)))
    file = write(f"grid:\n  n: [{numbers}]\n  seed: [{numbers}]\n  max_rounds: [{numbers}]\n")
    with pytest.raises(InputError, match="24,389 combinations"):
        read_recipe(file, {})


def test_a_value_of_any_length_is_shown_short(write):
    file = write(f"search: {{n: {'x' * 5000}}}\n")
    with pytest.raises(InputError, match="--n") as caught:
        Settings.build(file)
    assert len(str(caught.value)) < 600
