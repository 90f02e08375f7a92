"""Executors, sampling, stop detection, the loop. Strategies and verifiers are injected."""

from beamwright.runtime.accounting import Accounting
from beamwright.runtime.executor import TorchExecutor
from beamwright.runtime.loop import SearchLoop, TreeRun

__all__ = ["Accounting", "SearchLoop", "TorchExecutor", "TreeRun"]
