"""The engine: trees in flight, their rounds, the executor. Strategies are injected."""

from beamwright.runtime.accounting import Accounting
from beamwright.runtime.engine import Engine
from beamwright.runtime.executor import PlainExecutor
from beamwright.runtime.tree_run import TreeRun

__all__ = ["Accounting", "Engine", "PlainExecutor", "TreeRun"]
