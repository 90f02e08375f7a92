"""Tables of cases that lie beside a test."""

from pathlib import Path

import yaml


def tables_beside(module):
    """The YAML tables, by name, of the file beside a module. module: its `__file__`."""
    return yaml.safe_load(Path(module).with_suffix(".yaml").read_text(encoding="utf-8"))
