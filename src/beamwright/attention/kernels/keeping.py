"""What passes keep: keys and values of their tokens, at their places in the pool.

Prefill writes a tile's where it begins, when it needs few registers; decoding a row's. CODES: as
`programs`; numbers are some of `kv.codes` then, as a model hands over no others, so that coding
them rounds nothing.

No annotations are postponed here: Triton reads `tl.constexpr` from them.
"""

import triton
import triton.language as tl


@triton.jit
def _coded(found, CODES: tl.constexpr):
    """int8 codes and exponents of numbers [tokens, dim] that are some, as `kv.codes.encoded`."""
    BITS: tl.constexpr = 7 if CODES == 1 else 9
    LIMIT: tl.constexpr = 127 / 128 if CODES == 1 else 448 / 512
    wide = found.to(tl.float32)
    bits = tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    exponent = tl.where(bits == 0, 0, (bits >> 23) - 126) - BITS + (mantissa > LIMIT).to(tl.int32)
    if found.dtype == tl.float16:
        LOW: tl.constexpr = -24 if CODES == 1 else -15
        exponent = tl.minimum(tl.maximum(exponent, LOW), 9 if CODES == 1 else 7)
    else:
        exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    wide *= ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    codes = wide.to(tl.int32)
    if CODES == 2:  # the bits of a float32, or so many of the least number there is
        bits = wide.to(tl.int32, bitcast=True)
        large = ((bits >> 20) & 0x7FF) - (120 << 3)
        codes = tl.where(tl.abs(wide) < 0.015625, (tl.abs(wide) * 512).to(tl.int32), large)
        codes |= (bits >> 24) & 0x80
    return codes.to(tl.int8), exponent.to(tl.int8)


@triton.jit
def _keep_each(own, pool, exponents, source, target, scales, kept, inside, CODES: tl.constexpr):
    found = tl.load(own + source, mask=inside, other=0.0)
    if CODES > 0:
        found, exponent = _coded(found, CODES)
        tl.store(exponents + scales, exponent, kept)
    tl.store(pool + target, found, inside)


@triton.jit
def keep_tokens(
    own_keys, own_values, keys, values, key_exponents, value_exponents,
    slots, first, count, head, own_stride, block_stride, token_stride,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Write a tile's tokens of a head to their places in the pool, of BLOCK tokens a block."""
    dim = tl.arange(0, DIM)[None, :]
    for start in range(0, count, TOKENS):
        at = start + tl.arange(0, TOKENS)
        slot = tl.load(slots + first + at, mask=at < count, other=-1)
        kept = slot >= 0
        inside = kept[:, None] & (dim < HEAD_DIM)
        source = (first + at).to(tl.int64)[:, None] * own_stride + head * HEAD_DIM + dim
        block = (slot // BLOCK).to(tl.int64) * block_stride
        target = (block + slot % BLOCK * token_stride)[:, None] + head * HEAD_DIM + dim
        scales = block + slot % BLOCK * (token_stride // HEAD_DIM) + head
        _keep_each(own_keys, keys, key_exponents, source, target, scales, kept, inside, CODES)
        _keep_each(own_values, values, value_exponents, source, target, scales, kept, inside, CODES)


@triton.jit
def keep_token(
    numbers, exponents, found, place, scale, HEAD_DIM: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """Write one token's keys or values of a head [1, dim] to a place in the pool."""
    dim = tl.arange(0, found.shape[1])[None, :]
    if CODES > 0:
        found, exponent = _coded(found, CODES)
        tl.store(exponents + scale + tl.zeros_like(exponent), exponent)
    tl.store(numbers + place + dim, found, dim < HEAD_DIM)
