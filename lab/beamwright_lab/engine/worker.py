"""A process that stays and answers lines: how several checkouts are measured in turns.

It imports its checkout once; nothing but what it is asked for is in the seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Worker:
    """Python in a process of its own: a line asks it, and it answers with a line of JSON.

    words: what follows `python`. path: folders that it imports from. environment: more variables.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        path: Sequence[Path],
        environment: Mapping[str, str],
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str) -> Any:
        """The answer to a line.

        Raises:
            RuntimeError: if the process has ended instead; its own words are on standard error.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(what, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that was asked for {what!r} has ended")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
