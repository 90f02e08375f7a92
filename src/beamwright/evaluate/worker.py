"""The answer checker's process: one JSON line in, one JSON line out. Nothing else imports it.

Run as a script, so it depends on `math-verify` alone. It sets no time limits: the parent kills
it when it takes too long (signal-based limits fail off the main thread).
"""

from __future__ import annotations

import json
import os
import sys

if sys.platform != "win32":
    import resource

_MEMORY_BYTES = 4 * 1024**3


def main() -> None:
    """Answer `{"gold", "answer"}` lines with `{"equal"}` lines until the input ends."""
    # Replies get a descriptor of their own: whatever a library prints must not mix with them.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if sys.platform != "win32":  # a tower of powers must end here, not take the machine with it
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    from math_verify import parse, verify  # noqa: PLC0415 - slow, and only this process needs it

    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        pair = json.loads(line)
        gold, answer = (
            parse("\\boxed{" + pair[key] + "}", parsing_timeout=None) for key in ("gold", "answer")
        )
        equal = bool(verify(gold, answer, timeout_seconds=None))
        print(json.dumps({"equal": equal}), file=replies, flush=True)


if __name__ == "__main__":
    main()
