"""States of recurrent layers: what a layer keeps of a row in a fixed size, instead of KV.

`RowStates` is the seam between layers, which compute states, and whoever keeps them (a pool's
segments, a test's dictionary). Of a row, a state is as it is behind the row's last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class RowStates(Protocol):
    """The states of one pass's rows; `view.states`, an attribute of an attention view.

    A view without it is of rows that begin from zeros and whose states nobody keeps.
    """

    @property
    def lengths(self) -> Sequence[int] | None:
        """Tokens of each row in the packed batch, in order; None: one of every row."""

    def read(self, layer: int) -> dict[str, Tensor]:
        """A layer's parts by kind ("conv", "recurrent"), each [rows, *size of the part], in the
        part's dtype; zeros of rows that begin."""

    def write(self, layer: int, values: Mapping[str, Tensor]) -> None:
        """Keep the layer's parts, as `read` gives them, of rows that are still computed; others
        keep what they have."""
