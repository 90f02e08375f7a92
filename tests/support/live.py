"""How much memory tensors take, counted by what torch makes and forgets."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made under it: `peak`, the most bytes at a time; `largest`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            key, size = storage._cdata, storage.nbytes()
            if key not in given | self._known:
                self._known.add(key)
                self.now += size
                self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
                weakref.finalize(storage, self._forget, key, size)
        return out

    def _forget(self, key, size):
        self._known.discard(key)
        self.now -= size


def storages(tree):
    found = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [leaf.untyped_storage() for leaf in found if leaf.layout is torch.strided]
