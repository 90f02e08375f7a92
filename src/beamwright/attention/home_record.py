"""Which tokens of a streamed tail are at home, and from which layer on. Knows no memory."""

from __future__ import annotations

from collections.abc import Iterator


class HomeRecord:
    """Per token: the first layer from which it is at home.

    Layers before the first streamed one stay on the device, so a token goes home from there on.
    """

    def __init__(self, num_tokens: int, resident: int) -> None:
        self._since = [resident] * num_tokens

    def begin(self, token: int, resident: int) -> None:
        """This token, the last so far, goes home from layer `resident` on."""
        self._since[token:] = [resident]

    @property
    def layer(self) -> int:
        """The first layer from which all tokens so far are at home."""
        return max(self._since, default=0)

    def missing(self, resident: int) -> Iterator[tuple[int, int]]:
        """(layer, first token) of what is not at home in layers that are not resident.

        All of it counts as being at home once the last one is taken.
        """
        for layer in range(resident, self.layer):
            yield layer, next(i for i, since in enumerate(self._since) if since > layer)
        self._since = [min(since, resident) for since in self._since]
