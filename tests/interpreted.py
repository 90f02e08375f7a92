"""Triton's interpreter with half of its work left out: nothing that a kernel computes."""

from dataclasses import replace
from functools import cache


def quicken():
    """For the rest of the process.

    - The language is patched once for each function: by itself the interpreter looks through all
      of it at each launch, and at each call that a kernel makes.
    - Sums of integers are not taken a second time in 64 bits, which only `debug` would look at.
    - NumPy's type of one of Triton's is found by its name, not in a table that is made each time.
    """
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

    interpreter._patch_lang = patched
    interpreter._get_np_dtype = found
    builder.options = replace(builder.options, sanitize_overflow=False)
