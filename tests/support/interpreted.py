"""Triton's interpreter with half of its work left out: nothing that a kernel computes."""

from dataclasses import replace
from functools import cache


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
