"""Runs the kernels: on a GPU if there is one, else by Triton's interpreter."""

import inspect
from functools import partial
from importlib.util import find_spec
from types import FunctionType

import numpy as np
import pytest
import torch

from beamwright.attention import make_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mend_interpreter():
    """With NumPy 2.4 or later, Triton 3.6 cannot loop up to a number that the kernel has read: it
    turns arrays of one element into integers. Triton 3.7 does what stands here."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if "squeeze" in inspect.getsource(patch):
        return

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def multiply_row_by_row():
    """The interpreter's products are NumPy's, and with some CPUs the bits of a row of those depend
    on its place in the tile. On a card they do not, and tests compare bits."""
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    class RowByRow:
        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def matmul(a, b, dtype):
            return np.einsum("...mk,...kn->...mn", a, b, dtype=dtype)

    own = {**create_dot.__globals__, "np": RowByRow()}
    interpreter.InterpreterBuilder.create_dot = FunctionType(create_dot.__code__, own)


if find_spec("triton") is not None:
    mend_interpreter()
    multiply_row_by_row()


@pytest.fixture
def make_small(make_forest):
    """A forest of one layer and one KV head, in a small pool: the interpreter copies it often."""
    options = {"layers": 1, "kv_heads": 1, "dtype": torch.float32, "rows": 4}
    return partial(make_forest, **options, pool_tokens=2048, device=DEVICE)


@pytest.fixture
def kernels():
    """The backend of that name on the device of the tests, for a dtype."""

    def make(name, dtype=torch.float32):
        return make_attention(name, torch.device(DEVICE), dtype)

    return make
