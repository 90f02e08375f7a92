import pytest

from beamwright.config import Settings


def test_every_setting_has_words():
    for section in Settings.model_fields.values():
        for name, field in section.annotation.model_fields.items():
            assert field.description, name


def test_options_reach_the_settings(cli, fake):
    words = ["--n=8", "--width=2", "--top-k=5", "--memory=2GiB", "--aggregate=min", "--ignore-eos"]
    assert cli("solve", "p", *words).code == 0
    settings = fake.settings
    assert (settings.search.n, settings.search.width, settings.search.aggregate) == (8, 2, "min")
    assert (settings.sampling.top_k, settings.step.ignore_eos) == (5, True)
    assert settings.memory.memory == 2 * 1024**3


@pytest.mark.parametrize(
    ("written", "meant"),
    [(r"\n", "\n"), (r"a\tb", "a\tb"), (r"\\n", r"\n"), ("\n\n", "\n\n"), (r"\x", r"\x")],
)
def test_a_delimiter_may_be_escaped(cli, fake, written, meant):
    assert cli("solve", "p", "--delimiter", written).code == 0
    assert fake.settings.step.delimiter == meant


def test_stop_strings_are_given_one_by_one_and_may_be_escaped(cli, fake, tmp_path):
    words = ["--stop-strings", r"\n\n", "--stop-strings", "a, b"]
    assert cli("solve", "p", *words).code == 0
    assert fake.settings.step.stop_strings == ("\n\n", "a, b")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('step: {stop_strings: ["x", "\\n"]}\n')
    assert cli("solve", "p", "--recipe", recipe).code == 0
    assert fake.settings.step.stop_strings == ("x", "\n")


def test_options_override_a_recipe_and_the_rest_of_it_stands(cli, fake, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("search: {n: 8, seed: 3}\nstep: {ignore_eos: true}\n")
    assert cli("solve", "p", "--recipe", recipe, "--n", "4", "--no-ignore-eos").code == 0
    assert (fake.settings.search.n, fake.settings.search.seed) == (4, 3)
    assert fake.settings.step.ignore_eos is False


@pytest.mark.parametrize("command", [("eval", "bundled:test"), ("serve",)])
def test_engines_elsewhere_need_no_address(cli, monkeypatch, command):
    """Then they are processes of this machine."""
    asked = []
    monkeypatch.setattr("beamwright.cluster.serving.Cluster", lambda *where: asked.append(where))
    cli(*command, "--replicas", "auto", "--replica-cores", 3, "--model", "nowhere")
    cli(*command, "--ray", "auto", "--replicas", 2, "--model", "nowhere")
    assert asked == [(None, None, 3, ()), ("auto", 2, 1, ())]
