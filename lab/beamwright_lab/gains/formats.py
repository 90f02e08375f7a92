"""Answer formats of the problems in `kinds`: JSON objects, and functions that are run.

Two functions are equal if their outputs on the problem's inputs are equal. A vote thus needs no
right answer. A function runs in a process of its own, with limits on time and memory, and is not
otherwise confined: the models are small and the problems harmless.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import PrivateAttr

from beamwright.io import read_toml_beside
from beamwright.protocols import Answers
from beamwright.search.answers import answers
from beamwright.sections import Section

OBJECTS, FUNCTIONS = "json-object", "function-outputs"
_SECONDS, _BYTES = 5, 1 << 30
_CALLED = re.compile(r"a Python function `(\w+)`")
_FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Reads the source, the function's name and its inputs from standard input; prints its outputs.
_RUNNER = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
given = json.load(sys.stdin)
out, sys.stdout = sys.stdout, sys.stderr
scope = {{"__name__": "function"}}
exec(given["source"], scope)
print(json.dumps([scope[given["name"]](*each) for each in given["inputs"]]), file=out)
"""


def function_called(name: str) -> str:
    """Return the words by which a problem asks for a function."""
    return f"a Python function `{name}`"


@cache
def functions() -> Mapping[str, Mapping[str, Any]]:
    """Return the functions that problems ask for, by name (`formats.toml`)."""
    return read_toml_beside(__file__)


@cache
def outputs_of(source: str, name: str) -> str:
    """Return the outputs of a function on the inputs of its problem as JSON, or "fails"."""
    given = json.dumps({"source": source, "name": name, "inputs": functions()[name]["inputs"]})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _RUNNER],
            input=given, capture_output=True, text=True, timeout=2 * _SECONDS, check=True,
        )  # fmt: skip
    except (subprocess.SubprocessError, UnicodeError):
        return "fails"
    return done.stdout.strip() or "fails"


@answers(OBJECTS, meaning="the JSON object in the reply; compared without order and spaces")
class JsonObject(Section):
    """Format for replies that contain one JSON object."""

    def read(self, text: str) -> str | None:
        start, end = text.find("{"), text.rfind("}")
        try:
            found = json.loads(text[start : end + 1]) if 0 <= start < end else None
        except (ValueError, RecursionError):
            return None
        return json.dumps(found) if isinstance(found, dict) else None

    def key(self, answer: str, notes: Mapping[str, str]) -> str:
        del notes
        return json.dumps(json.loads(answer), sort_keys=True)


@answers(FUNCTIONS, meaning="the function in the reply; compared by its outputs")
class FunctionOutputs(Section):
    """Format for replies that contain the function that the problem asks for."""

    _name: str = PrivateAttr(default="")

    def about(self, problem: str) -> Answers:
        way, called = self.model_copy(), _CALLED.findall(problem)
        way._name = called[-1] if called else ""  # worked examples come first
        return way

    def read(self, text: str) -> str | None:
        blocks = [each for each in _FENCED.findall(text) if "def " in each]
        source = blocks[0] if blocks else text[text.find("def ") :] if "def " in text else ""
        return source.strip() or None

    def key(self, answer: str, notes: Mapping[str, str]) -> str:
        del notes
        return outputs_of(answer, self._name)
