import inspect
import re

import pytest
from pydantic import ValidationError

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.units import RESERVED_ARGS, parse_size
from tables import beside

SIZES = {
    "7GiB": 7 * 1024**3, "512MiB": 512 * 1024**2, "4GB": 4 * 10**9, " 1.5 kib ": 1536, "100": 100,
    "100B": 100, 4096: 4096,
}  # fmt: skip


@pytest.mark.parametrize(("text", "num_bytes"), SIZES.items())
def test_sizes_read_as_people_write_them(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["7G", "GiB", "", "-1GiB", "0", "0.5", 0.5, 0, -5, "1e9", "7 GiB free"]
)
def test_what_is_no_size_is_an_input_error(text):
    with pytest.raises(InputError, match="size"):
        parse_size(text)


def test_flat_options_find_their_section_and_override_the_recipe(recipe):
    """None means not given."""
    path = recipe("search: {n: 8, width: 2}\nsampling: {temperature: 0.3}\n")
    settings = Settings.build(path, n=4, width=None, kv_memory="1KiB", delimiter=";", max_batch=3)
    assert (settings.search.n, settings.search.width, settings.search.max_rounds) == (4, 2, 40)
    assert (settings.sampling.temperature, settings.schedule.max_batch) == (0.3, 3)
    assert (settings.memory.kv_memory, settings.step.delimiter) == (1024, ";")


TABLES = beside(__file__)


@pytest.mark.parametrize("row", TABLES["recipes"], ids=lambda row: row["content"])
def test_a_bad_recipe_is_one_line_that_names_file_and_option(recipe, row):
    path = recipe(row["content"])
    with pytest.raises(InputError, match=row["complaint"]) as caught:
        Settings.build(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


IMPOSSIBLE = {
    "temperature": (-0.1, float("nan")), "top_p": (0.0, 1.1), "top_k": (0,), "min_p": (2.0,),
    "width": (0,), "seed": (-1,), "delimiter": ("",), "max_step_tokens": (0,), "dtype": ("int8",),
    "choose": ("worst",), "stop_strings": ("a" * 257, ["a"] * 17, "\ud800"),
    "template_args": (
        "{'think': false}", "[1]", '{"think": NaN}', '{"think": "\\ud800"}', {"think": {1, 2}},
        {"messages": []}, {"no name": 1}, 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in IMPOSSIBLE for value in IMPOSSIBLE[name]]
)
def test_impossible_values_name_their_option(name, value):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')}"):
        Settings.build(**{name: value})


def test_arguments_of_a_chat_template(recipe):
    args = {"think": False, "depth": {"a": [1, None]}}
    path = recipe("model: {template_args: {think: false, depth: {a: [1, null]}}}")
    written = '{"think": false, "depth": {"a": [1, null]}}'
    for settings in (Settings.build(path), Settings.build(template_args=written)):
        assert settings.model.template_args == args
    assert Settings.build(template_args={"a": (1, 2)}).model.template_args == {"a": [1, 2]}
    assert Settings.build().model.template_args == {}


def test_names_that_whoever_renders_says_itself_are_reserved():
    """Of `transformers` as it is installed: another one must not let a template in by the back."""
    from transformers import PreTrainedTokenizerBase

    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.values()
    names = {each.name for each in taken if each.kind is not each.VAR_KEYWORD}
    assert names - {"documents"} <= RESERVED_ARGS


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Settings().search.n = 3


@pytest.mark.parametrize("row", TABLES["values"], ids=lambda row: row["name"])
def test_a_bad_value_is_one_line_that_shows_it_once(row):
    with pytest.raises(InputError) as caught:
        Settings.build(**{row["name"]: row["value"]})
    where, _, said = str(caught.value).partition(": ")
    assert where == f"--{row['name'].replace('_', '-')}"
    assert said == row["said"]


@pytest.mark.parametrize("row", TABLES["gone"], ids=lambda row: row["name"])
def test_what_is_gone_says_so(row):
    with pytest.raises(InputError, match=re.escape(row["words"])):
        Settings.build(**{row["name"]: row["value"]})
