import inspect

import pytest
from pydantic import ValidationError

from beamwright.config import Settings
from beamwright.errors import InputError
from beamwright.units import RESERVED_ARGS, parse_size


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("7GiB", 7 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("4GB", 4 * 10**9),
        (" 1.5 kib ", 1536),
        ("100", 100),
        ("100B", 100),
        (4096, 4096),
    ],
)
def test_sizes_read_as_people_write_them(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["7G", "GiB", "", "-1GiB", "0", "0.5", 0.5, 0, -5, "1e9", "7 GiB free"]
)
def test_what_is_no_size_is_an_input_error(text):
    with pytest.raises(InputError, match="size"):
        parse_size(text)


def test_flat_options_find_their_section():
    settings = Settings.build(n=8, top_p=0.9, kv_memory="1KiB", delimiter=";", max_batch=3)
    assert (settings.search.n, settings.sampling.top_p) == (8, 0.9)
    assert (settings.memory.kv_memory, settings.step.delimiter) == (1024, ";")
    assert settings.schedule.max_batch == 3


def test_flat_options_override_the_recipe_and_none_means_not_given(recipe):
    path = recipe("search: {n: 8, width: 2}\nsampling: {temperature: 0.3}\n")
    settings = Settings.build(path, n=4, width=None)
    assert (settings.search.n, settings.search.width) == (4, 2)
    assert settings.sampling.temperature == 0.3
    assert settings.search.max_rounds == 40


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("search: {beams: 3}", r"unknown option 'search\.beams'"),
        ("serch: {n: 3}", "unknown option 'serch'"),
        ("search: {n: 0}", r"search\.n \(--n\): .*greater than or equal to 1, got 0"),
        ("search: {n: many}", r"search\.n \(--n\)"),
        ("search:", "section 'search' must hold keys"),
        ("search: [1]", "section 'search' must hold keys"),
        ("- 1\n- 2", "expected sections"),
        ("search: {n: 3", "not YAML"),
        ("memory: {memory: 7G}", r"memory\.memory \(--memory\).*7GiB"),
        ("memory: {memory: true}", r"memory\.memory \(--memory\)"),
        ("memory: {memory: [1]}", r"memory\.memory \(--memory\)"),
    ],
)
def test_a_bad_recipe_is_one_line_that_names_file_and_option(recipe, content, complaint):
    path = recipe(content)
    with pytest.raises(InputError, match=complaint) as caught:
        Settings.build(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.yaml: cannot be read"):
        Settings.build(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"min_p": 2.0},
        {"width": 0},
        {"seed": -1},
        {"delimiter": ""},
        {"max_step_tokens": 0},
        {"stop_strings": "a" * 257},
        {"stop_strings": ["a"] * 17},
        {"stop_strings": "\ud800"},
        {"dtype": "int8"},
        {"choose": "worst"},
        {"template_args": "{'think': false}"},
        {"template_args": "[1]"},
        {"template_args": '{"think": NaN}'},
        {"template_args": '{"think": "\\ud800"}'},
        {"template_args": {"think": {1, 2}}},
        {"template_args": {"messages": []}},
        {"template_args": {"no name": 1}},
        {"template_args": 5},
    ],
)
def test_impossible_values_name_their_option(options):
    (name,) = options
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')}"):
        Settings.build(**options)


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


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"deadline": "soon"},
            "stop.deadline (--deadline): 'soon' is not a duration: write 30s, 2m or 1h",
        ),
        (
            {"kv_memory": "lots"},
            "memory.kv_memory (--kv-memory): 'lots' is not a size: write 7GiB, 512MiB or 4GB",
        ),
        ({"memory": 0}, "memory.memory (--memory): a size must be positive, not 0"),
        (
            {"choose": "listwise"},
            "--choose listwise: was removed; a vote (--choose majority) chose right more often",
        ),
        (
            {"step_limits": "64,a"},
            "step.step_limits.1 (--step-limits): Input should be a valid integer, "
            "unable to parse string as an integer, got 'a'",
        ),
        (
            {"stop_strings": ["x", ""]},
            "step.stop_strings.1 (--stop-strings): String should have at least 1 character, got ''",
        ),
    ],
)
def test_a_bad_value_is_one_line_that_shows_it_once(options, line):
    with pytest.raises(InputError) as caught:
        Settings.build(**options)
    assert str(caught.value) == line


def test_an_option_that_is_gone_says_so():
    with pytest.raises(InputError, match=r"unknown option 'score_cache': scores are kept no long"):
        Settings.build(score_cache="memory")
    with pytest.raises(InputError, match="unknown option 'probe_every': votes in waves"):
        Settings.build(probe_every=16)
