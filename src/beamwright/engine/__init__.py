"""The engine: the running batch and its rows, trees in flight, their rounds, the executor.

Above models, below the solver. Strategies are injected; the simulator shares all but the tensors.
"""
