"""Beamwright: verifier-guided tree search on one small GPU, inside one memory number.

```python
from beamwright import Solver

solver = Solver(n=16, width=4)
solution = solver.solve("Ann has 12 apples. She buys 5 more and eats 3. How many are left?")
print(solution.answer)
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from beamwright.config import Settings
    from beamwright.solver.solution import Candidate, Solution
    from beamwright.solver.solver import Solver

__version__ = "0.1.0"
__all__ = ["Candidate", "Settings", "Solution", "Solver", "__version__"]

_MODULES = {
    "Candidate": "beamwright.solver.solution",
    "Settings": "beamwright.config",
    "Solution": "beamwright.solver.solution",
    "Solver": "beamwright.solver.solver",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import beamwright` alone stays quick, without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'beamwright' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_MODULES[name]), name)
