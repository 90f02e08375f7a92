"""The engine: the running batch and its rows, the trees in flight, their rounds, the executor.

It is above the models and below the solver. Strategies are injected. The lab's simulator runs the
same code without the tensors.
"""
