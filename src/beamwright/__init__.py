"""Beamwright: verifier-guided tree search on one small GPU, inside one memory number.

```python
from beamwright import Solver

solver = Solver(n=16, width=4)
solution = solver.solve("Ann has 12 apples. She buys 5 more and eats 3. How many are left?")
print(solution.answer)
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from beamwright.lazy import lazy_names

if TYPE_CHECKING:
    from beamwright.config import Settings
    from beamwright.solver.solution import Candidate, Solution
    from beamwright.solver.solver import Solver

__version__ = "0.1.0"
__all__ = ["Candidate", "Settings", "Solution", "Solver", "__version__"]

__getattr__ = lazy_names(  # `import beamwright` alone stays quick
    __name__,
    {
        "Candidate": "solver.solution",
        "Settings": "config",
        "Solution": "solver.solution",
        "Solver": "solver.solver",
    },
)
