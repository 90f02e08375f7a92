"""Exceptions that Beamwright raises on purpose. Imports no other module of the package.

```
BeamwrightError            exit 1   something failed; one line says what
├── InputError             exit 2   the user's option, file or problem is wrong
│   ├── UnsupportedModelError       an architecture or option the decoder does not have
│   └── ProblemTooLongError         the prompt does not fit the model's context
├── CapacityError          exit 1   a KV budget (device or host) is exhausted
├── DeviceMemoryError      exit 1   the device has no working memory for even one beam
├── NotFiniteError         exit 1   a model's numbers are NaN or infinite: a bad weight, an overflow
├── PolicyError            exit 1   a strategy or schedule returned an invalid action or plan
├── LinkError              exit 1   a transfer between host and device failed
└── UnavailableError       exit 1   something outside (the hub, a package) cannot be reached
```
"""

from __future__ import annotations

from typing import Any

DEVICE_TIER, HOST_TIER = "device KV budget", "host KV budget"
_LONGEST_LINE = 200


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit: `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def message_of(error: BaseException) -> str:
    """Return the message of any exception on one line, shortened to 200 characters."""
    return " ".join(str(error).split())[:_LONGEST_LINE]


def error_line(error: BaseException) -> str:
    """Return `message_of(error)` with the exception's class in front: `ValueError: ...`."""
    return f"{type(error).__name__}: {message_of(error)}"


class BeamwrightError(Exception):
    """Base class of all deliberate errors. `str(error)` is one line that can be shown to a user."""

    exit_code = 1
    # The `Solution` with the paths finished before the error; None if no search had begun.
    partial: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error by its attributes, because subclasses take different arguments.

        The partial solution is left out, because it is large and its tree stays in this process.
        """
        facts = {name: value for name, value in vars(self).items() if name != "partial"}
        return _rebuild_error, (type(self), self.args, facts)


def _rebuild_error(
    kind: type[BeamwrightError], args: tuple[Any, ...], facts: dict[str, Any]
) -> BeamwrightError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(facts)
    return error


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of a search; `partial` is the same as in BeamwrightError."""

    partial: Any = None


class Cancelled(BeamwrightError):
    """The caller cancelled the search; `partial` has the best candidates found until then."""

    def __init__(self) -> None:
        super().__init__("the search was cancelled")


class InputError(BeamwrightError):
    """A bad option, file, recipe or problem. Shown as one line, with exit code 2 or HTTP 4xx."""

    exit_code = 2


class UnsupportedModelError(InputError):
    """The checkpoint needs a feature that the decoder does not implement."""


class ProblemTooLongError(InputError):
    """The prompt leaves no room for an answer inside the model's context.

    num_tokens: the prompt's length in tokens. A very long text is counted only in part.
    context: the model's context in tokens.
    """

    def __init__(self, what: str, num_tokens: int, context: int) -> None:
        self.num_tokens, self.context = num_tokens, context
        super().__init__(
            f"{what} is {num_tokens} tokens long, too long for the model's context of {context} "
            "tokens; shorten it"
        )


class CapacityError(BeamwrightError):
    """A KV budget cannot hold what the search needs.

    hint: advice to the user.
    """

    def __init__(
        self,
        what: str,
        needed_bytes: int,
        free_bytes: int,
        budget_bytes: int,
        tier: str = DEVICE_TIER,
        hint: str = "raise --memory or --kv-memory, or lower --n",
    ) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.budget_bytes = budget_bytes
        self.tier, self.hint = tier, hint
        super().__init__(what)

    def __str__(self) -> str:
        return (
            f"{self.tier} too small: {self.args[0]} needs {format_bytes(self.needed_bytes)}, "
            f"{format_bytes(self.free_bytes)} of {format_bytes(self.budget_bytes)} is free. "
            f"{self.hint[:1].upper()}{self.hint[1:]}."
        )


class DeviceMemoryError(BeamwrightError):
    """The device has too little memory for the KV, or for one beam beside the KV."""

    def __init__(
        self,
        what: str,
        hint: str = "lower --kv-memory, raise --memory, or stop other programs on the device",
    ) -> None:
        super().__init__(f"the device is out of memory: {what}. {hint[:1].upper()}{hint[1:]}.")


class NotFiniteError(BeamwrightError):
    """A weight, a logit or a score is NaN, infinite, or too large for sums."""


class PolicyError(BeamwrightError):
    """A strategy or a schedule returned an invalid action or plan, or nothing at all."""


class LinkError(BeamwrightError):
    """A transfer of KV or weights to the device or back failed. Finished candidates are kept."""


class UnavailableError(BeamwrightError):
    """A service or package outside this process cannot be reached."""
