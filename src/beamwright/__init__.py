"""Beamwright: verifier-guided tree search on one small GPU, inside one memory number.

```python
from beamwright import Solver

solver = Solver(n=16, width=4)
solution = solver.solve(
    "Jack has 70 eggs. In April Jack gets 9 eggs. How many eggs does Jack have now?"
)
print(solution.answer)
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from beamwright.cores import shorten_spins

if TYPE_CHECKING:
    from beamwright.config import Settings
    from beamwright.solver.solution import Candidate, Solution
    from beamwright.solver.solver import Solver

shorten_spins()

__version__ = "0.2.0"
__all__ = ["Candidate", "Settings", "Solution", "Solver", "__version__"]

_WHERE = {
    "Candidate": "solver.solution",
    "Settings": "config",
    "Solution": "solver.solution",
    "Solver": "solver.solver",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import beamwright` alone loads no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names for Tab completion, without internal names of the package."""
    return list(__all__)
