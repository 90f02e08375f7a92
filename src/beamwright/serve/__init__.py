"""The server: an OpenAI-compatible API over one solver, a live page of its trees, metrics.

A request becomes an `Ask`, a `Desk` has it searched beside the others, and what is final of its
tree goes out while the rest is being decided (`final`). Needs the extra `serve`.
Names come when they are used: `view` reads saved runs without torch.
"""

from typing import TYPE_CHECKING

from beamwright.lazy import lazy_names

if TYPE_CHECKING:
    from beamwright.serve.app import make_app
    from beamwright.serve.desk import Desk, Job, Listener
    from beamwright.serve.errors import ApiError
    from beamwright.serve.guard import Doors, Guard
    from beamwright.serve.limits import ServerLimits
    from beamwright.serve.logs import JsonLines
    from beamwright.serve.process import bind, run
    from beamwright.serve.served import make_served

__all__ = [
    "ApiError",
    "Desk",
    "Doors",
    "Guard",
    "Job",
    "JsonLines",
    "Listener",
    "ServerLimits",
    "bind",
    "make_app",
    "make_served",
    "run",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ApiError": "errors",
        "Desk": "desk",
        "Doors": "guard",
        "Guard": "guard",
        "Job": "desk",
        "JsonLines": "logs",
        "Listener": "desk",
        "ServerLimits": "limits",
        "bind": "process",
        "make_app": "app",
        "make_served": "served",
        "run": "process",
    },
)
