"""More than one device: an engine on each, searches spread over them by Ray (extra `ray`).

Ray does placement and failures; here is who takes which search. Trees are those of one process.
"""

from typing import TYPE_CHECKING

from beamwright.lazy import lazy_names

if TYPE_CHECKING:
    from beamwright.cluster.solver import OnRay

__all__ = ["OnRay"]

__getattr__ = lazy_names(__name__, {"OnRay": "solver"})
