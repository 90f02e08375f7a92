"""A quicker suite: the self-test is asked once, and the interpreter of kernels does less work."""

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F

from beamwright.engine.sampling import Sampler
from beamwright.models.dense import DenseDecoder
from beamwright.models.session import DecodeSession
from beamwright.models.tree_model import TreeModel


class AskedOnce:
    """What `ask(decoder, backend)` answered about models that are alike, else its answer now.

    The self-test costs as much as a small search, and its answer is of a model and a machine: not
    each of the thousand solvers that tests make of a few tiny checkpoints has to ask. Alike are
    models of one shape, dtype, device, kind of products, tiles and embedding, under the same
    attention and as many threads. Where a test has put functions of its own in the place of those
    that compute, it asks again.
    """

    def __init__(self, ask):
        self.ask, self._found = ask, {}

    def __call__(self, decoder, backend):
        if not isinstance(decoder, DenseDecoder):
            return self.ask(decoder, backend)
        key = (*_model(decoder), *_attention(backend), torch.get_num_threads(), _functions())
        if key not in self._found:
            self._found[key] = self.ask(decoder, backend)
        return self._found[key]


def _model(decoder):
    weights = decoder.weights
    layer = weights.layers[0]
    products = (layer.qkv, layer.out, layer.gate_up, layer.down, weights.lm_head)
    kinds = tuple((type(each), type(each.weight)) for each in products)
    embedding = weights.embedding[torch.arange(min(decoder.shape.vocab, 512))].double()
    content = (embedding.sum().item(), embedding.square().sum().item())
    rows = decoder.tile_rows, decoder.least_rows, decoder.kv_dtype
    return decoder.shape, decoder.dtype, str(decoder.device), rows, kinds, content


def _attention(backend):
    return type(backend), backend.name


def _functions():
    """The functions that compute; the key keeps them, so that none of them has another's id."""
    classes = (DenseDecoder, TreeModel, DecodeSession, Sampler)
    return (F.linear, *(each for kind in classes for each in vars(kind).values() if callable(each)))


def quicken():
    """For the rest of the process.

    - The language is patched once for each function: by itself the interpreter looks through all
      of it at each launch, and at each call that a kernel makes.
    - Sums of integers are not taken a second time in 64 bits, which only `debug` would look at.
    - NumPy's type of one of Triton's is found by its name, not in a table that is made each time.
    - Tensors of one shape share it, and its product; a type of its own kind is itself.
    """
    from triton.language import core
    from triton.runtime import interpreter

    patch, numpy_type = cache(interpreter._patch_lang), interpreter._get_np_dtype
    builder, types = interpreter.interpreter_builder, {}

    def patched(function):
        patch(function)
        return interpreter._LangPatchScope()  # nothing to restore

    def found(kind):
        scalar = kind.scalar
        if scalar.name not in types:
            types[scalar.name] = numpy_type(scalar)
        return types[scalar.name]

    make, of_kind, shapes = core.tensor.__init__, core.block_type.with_element_ty, {}

    def made(self, handle, kind):
        sizes = tuple(kind.shape) if kind.is_block() else ()
        if sizes not in shapes:
            make(self, handle, kind)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[sizes]

    def with_kind(self, kind):
        return self if kind is self.element_ty else of_kind(self, kind)

    core.tensor.__init__, core.block_type.with_element_ty = made, with_kind
    interpreter._patch_lang = patched
    interpreter._get_np_dtype = found
    builder.options = replace(builder.options, sanitize_overflow=False)
