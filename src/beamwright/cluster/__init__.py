"""More than one device: an engine on each, problems spread over them by Ray (extra `ray`).

Ray does placement and failures; here is who takes which problem. Trees are those of one process.
"""

from typing import TYPE_CHECKING

from beamwright.lazy import lazy_names

if TYPE_CHECKING:
    from beamwright.cluster.cluster import Cluster
    from beamwright.cluster.ray_solving import OnRay

__all__ = ["Cluster", "OnRay"]

__getattr__ = lazy_names(__name__, {"Cluster": "cluster", "OnRay": "ray_solving"})
