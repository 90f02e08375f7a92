"""Tables of cases beside the tests that read them."""

from pathlib import Path

import yaml


def beside(module):
    """The tables of the YAML file beside a test module, by name. module: its `__file__`."""
    return yaml.safe_load(Path(module).with_suffix(".yaml").read_text(encoding="utf-8"))
