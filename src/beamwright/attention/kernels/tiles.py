"""Triton functions that the kernels share: load tiles, fold them into a softmax, store new KV.

`programs` explains the arguments in capitals. A prefill program stores the keys and values of its
tile at the start, when it needs few registers. A decode program stores the current token of its
row. With CODES, the model has already rounded these values to 8-bit codes with `kv.codes`, so
coding them here is exact.

This module has no `from __future__ import annotations`, because Triton reads `tl.constexpr` from
the annotations.
"""

import triton
import triton.language as tl


@triton.jit
def fold(
    query, key, value, seen, scale, best, total, context,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Fold a tile of keys and values [tokens, dim] into a running (online) softmax.

    A pair is a (query token, query head of the group).

    seen: [1 or pairs, tokens] True where a query attends to a token.
    best, total: [pairs] the largest score so far, and the sum of weights relative to it.
    context: [pairs, dim] the weighted sum of values so far.
    WIDE: compute in float32, because Triton's interpreter would multiply bfloat16 as integers. The
        products are exact in float32.
    """
    if WIDE:
        query, key = query.to(tl.float32), key.to(tl.float32)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP > 0:
        LIMIT: tl.constexpr = SOFTCAP * 1.4426950408889634
        scores = LIMIT * (2 * tl.sigmoid(scores * (2 / LIMIT)) - 1)  # tanh
    scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(best, tl.max(scores, axis=1))
    offset = larger
    if WINDOW > 0:
        offset = tl.where(larger == float("-inf"), 0.0, larger)  # no key was in the window so far
    weights = tl.exp2(scores - offset[:, None])
    shrink = tl.exp2(best - offset)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = weights.to(value.dtype)
    if WIDE:
        weights, value = weights.to(tl.float32), value.to(tl.float32)
    context = tl.dot(weights, value, acc=context * shrink[:, None], input_precision="ieee")
    return larger, total, context


@triton.jit
def read_tile(numbers, exponents, place, inside, scale_place, seen, query, CODES: tl.constexpr):
    """Load and dequantise a tile [tokens, dim] of the pool, in the query's dtype.

    place: [tokens, dim] offsets of the numbers. scale_place: [tokens] offsets of the exponents.
    inside, seen: masks of the two loads.
    """
    if CODES == 0:
        values = tl.load(numbers + place, mask=inside, other=0.0)
    else:
        codes = tl.load(numbers + place, mask=inside, other=0).to(tl.int32)
        exponent = tl.load(exponents + scale_place, mask=seen, other=0).to(tl.int32)
        power = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        if CODES == 1:
            wide = codes.to(tl.float32)
        else:  # fp8 bits moved into a float32; 2 ** 120 corrects for the other exponent bias
            bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
            wide = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
        values = (wide * power[:, None]).to(query.dtype)
    return values


@triton.jit
def entries_of(blocks, tokens, first, entry, num_entries, num_tokens, ENTRY_TOKENS: tl.constexpr):
    """Load the block numbers of the entries `first` + `entry`, and their numbers of valid tokens.

    An entry is a block of the pool, or a piece of a block.

    tokens: number of valid tokens of each entry. None: the entries hold `num_tokens` tokens in all,
        and only the last entry may be partly filled.
    """
    listed = entry < num_entries
    block = tl.load(blocks + first + entry, mask=listed, other=0)
    if tokens is None:
        held = num_tokens - entry * ENTRY_TOKENS
    else:
        held = tl.load(tokens + first + entry, mask=listed, other=0)
    return block, held


@triton.jit
def fold_entries(
    query, keys, values, key_exponents, value_exponents, head,
    entry_blocks, entry_tokens, entry_firsts, first_entry, num_entries, num_tokens, block, held,
    reach, scale, block_stride, token_stride, best, total, context,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ENTRY_TOKENS: tl.constexpr,
    PIECES: tl.constexpr, TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Fold all tokens of `num_entries` entries into a running softmax, tile by tile.

    An entry is a block of the pool, or one of PIECES pieces of a block.

    keys, values: address of block 0 in this layer, at this head; key_exponents, value_exponents:
        address of block 0 in this layer.
    entry_tokens, num_tokens: see `entries_of`.
    entry_firsts: number of the part's tokens before each entry; None: all earlier entries are full.
    block, held: [tokens] result of `entries_of` for the first tile. The loop loads the entries of
        the next tile while it folds the current one: the copy of keys and values needs the block
        address, and could otherwise not be started in advance.
    reach: [pairs] number of path tokens from the first token of the entries to the query's token.
    """
    tl.static_assert(TOKENS % ENTRY_TOKENS == 0, "a tile holds whole entries")
    STEP: tl.constexpr = TOKENS // ENTRY_TOKENS
    dim = tl.arange(0, DIM)
    own = tl.arange(0, TOKENS) // ENTRY_TOKENS
    slot = tl.arange(0, TOKENS) % ENTRY_TOKENS
    for start in range(0, num_entries, STEP):
        entry = start + STEP + own
        after = entries_of(
            entry_blocks, entry_tokens, first_entry, entry, num_entries, num_tokens, ENTRY_TOKENS
        )
        seen = slot < held
        piece = block % PIECES * ENTRY_TOKENS + slot
        first = (block // PIECES).to(tl.int64) * block_stride
        place = (first + piece * token_stride)[:, None] + dim[None, :]
        inside = seen[:, None] & (dim < HEAD_DIM)[None, :]
        scales = first + piece * (token_stride // HEAD_DIM) + head
        key = read_tile(keys, key_exponents, place, inside, scales, seen, query, CODES)
        value = read_tile(values, value_exponents, place, inside, scales, seen, query, CODES)
        seen = seen[None, :]
        if WINDOW > 0:
            entry -= STEP
            if entry_firsts is None:
                at = entry * ENTRY_TOKENS + slot
            else:
                listed = entry < num_entries
                at = tl.load(entry_firsts + first_entry + entry, mask=listed, other=0) + slot
            seen = seen & (reach[:, None] - at[None, :] < WINDOW)
        best, total, context = fold(
            query, key, value, seen, scale, best, total, context, SOFTCAP, WINDOW, WIDE
        )
        block, held = after
    return best, total, context


@triton.jit
def load_queries(
    query, rows, head, real, query_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Load the queries [pairs, dim], and return them with their query heads [pairs].

    rows: [pairs] the row of each pair. real: [pairs] False for padding.
    """
    dim = tl.arange(0, DIM)
    heads = head * GROUP + tl.arange(0, PAIRS) % GROUP
    place = rows.to(tl.int64) * query_stride + heads * HEAD_DIM
    inside = real[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(query + place[:, None] + dim[None, :], mask=inside, other=0.0), heads


@triton.jit
def _coded(numbers, CODES: tl.constexpr):
    """Return int8 codes and exponents of `numbers` [tokens, dim], like `kv.codes.quantise`.

    The numbers must be exactly representable, because nothing is rounded here.
    """
    BITS: tl.constexpr = 7 if CODES == 1 else 9
    LIMIT: tl.constexpr = 127 / 128 if CODES == 1 else 448 / 512
    wide = numbers.to(tl.float32)
    bits = tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    exponent = tl.where(bits == 0, 0, (bits >> 23) - 126) - BITS + (mantissa > LIMIT).to(tl.int32)
    if numbers.dtype == tl.float16:
        LOW: tl.constexpr = -24 if CODES == 1 else -15
        exponent = tl.minimum(tl.maximum(exponent, LOW), 9 if CODES == 1 else 7)
    else:
        exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    wide *= ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    codes = wide.to(tl.int32)
    # fp8: the upper bits of a float32 with another exponent bias, or, below 2 ** -6 (subnormal
    # numbers), a multiple of 2 ** -9.
    if CODES == 2:
        bits = wide.to(tl.int32, bitcast=True)
        large = ((bits >> 20) & 0x7FF) - (120 << 3)
        codes = tl.where(tl.abs(wide) < 0.015625, (tl.abs(wide) * 512).to(tl.int32), large)
        codes |= (bits >> 24) & 0x80
    return codes.to(tl.int8), exponent.to(tl.int8)


@triton.jit
def _store(own, pool, exponents, source, target, scales, kept, inside, CODES: tl.constexpr):
    """Store a tile of keys or of values in the pool, as codes if CODES is set."""
    values = tl.load(own + source, mask=inside, other=0.0)
    if CODES > 0:
        values, exponent = _coded(values, CODES)
        tl.store(exponents + scales, exponent, kept)
    tl.store(pool + target, values, inside)


@triton.jit
def store_tokens(
    own_keys, own_values, keys, values, key_exponents, value_exponents,
    slots, first, count, head, own_stride, block_stride, token_stride,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Store keys and values of a tile's tokens for one head in the pool.

    slots: [tokens] places in the pool, counted in tokens with BLOCK tokens per block; negative for
        tokens that are not stored.
    """
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
        _store(own_keys, keys, key_exponents, source, target, scales, kept, inside, CODES)
        _store(own_values, values, value_exponents, source, target, scales, kept, inside, CODES)


@triton.jit
def store_token(
    numbers, exponents, values, place, scale, HEAD_DIM: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """Store the keys or values [1, dim] of one token and head at `place` in the pool."""
    dim = tl.arange(0, values.shape[1])[None, :]
    if CODES > 0:
        values, exponent = _coded(values, CODES)
        tl.store(exponents + scale + tl.zeros_like(exponent), exponent)
    tl.store(numbers + place + dim, values, dim < HEAD_DIM)
