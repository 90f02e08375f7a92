"""The Triton attention kernels for decoding and prefill over paged KV.

Each kernel runs one program per (work item, KV head), see `worklist`.

Scores are in base 2: `scale` is head_dim ** -0.5 * log2(e), and log-sum-exps are in base 2 too.
Products of float32 use IEEE arithmetic, never TF32. Sums are in float32. The order of summation
depends only on the tile size and on the row's own path.

Compile-time arguments (code for an option that is off is not compiled):
SOFTCAP: scores become softcap * tanh(score / softcap); 0 for none.
WINDOW: number of tokens that a token attends to, itself included; 0 for all.
SINKS: one score per head joins the softmax after all keys of a row.
CODES: blocks contain plain numbers (0), int8 codes (1) or float8_e4m3 codes (2). Codes have one
    scale exponent per token and head, see `kv.codes`. Dequantised values are exact in the model's
    dtype.
EARLY: the kernel starts before the previous kernel has ended (programmatic dependent launch).
    Before `gdc_wait` it may only read data that is older than the previous kernel: work lists and
    the counts of rows' own tokens.
WIDE: Triton's interpreter runs bfloat16 products in float32, see `tiles.fold`.

This module has no `from __future__ import annotations`, because Triton reads `tl.constexpr` from
the annotations.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from beamwright.attention.kernels.tiles import (
    entries_of,
    fold,
    fold_entries,
    load_queries,
    store_token,
    store_tokens,
)


@triton.jit
def _store_partial(
    context, lse, slots, heads, real, best, total, weighted,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Normalise the running softmax of one program, and store it in the program's slots."""
    dim = tl.arange(0, DIM)
    if WINDOW > 0:  # a query whose window reaches none of the keys gets zero weight, not NaN
        best = tl.where(total > 0, best, float("-inf"))
        total = tl.where(total > 0, total, 1.0)
    place = slots.to(tl.int64) * HEADS + heads
    inside = real[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(context + place[:, None] * HEAD_DIM + dim[None, :], weighted / total[:, None], inside)
    tl.store(lse + place, best + tl.log2(total), real)


@triton.jit
def _attend_own(
    query, new, keys, values, key_exponents, value_exponents, own_blocks, num_own, context, lse,
    row, head, first_own_slot, scale, query_stride, new_stride, block_stride, token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ENTRY_TOKENS: tl.constexpr, PIECES: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Store the current token of a row in its block, then attend to the row's newest tokens."""
    pair = tl.arange(0, PAIRS)
    real = pair < GROUP
    num_tokens = tl.load(num_own + row)
    past = num_tokens - 1
    first_entry = row * MOST
    num_entries = past // ENTRY_TOKENS + 1
    entry = tl.arange(0, TOKENS) // ENTRY_TOKENS
    block, held = entries_of(
        own_blocks, None, first_entry, entry, num_entries, num_tokens, ENTRY_TOKENS
    )
    last = tl.load(own_blocks + first_entry + num_entries - 1)
    if EARLY:
        gdc_wait()
    queries, heads = load_queries(
        query, row + pair * 0, head, real, query_stride, GROUP, HEAD_DIM, DIM, PAIRS
    )
    dim = tl.arange(0, DIM)[None, :]
    new_key = new + row.to(tl.int64) * new_stride + head * HEAD_DIM + dim
    key = tl.load(new_key, dim < HEAD_DIM, other=0.0)
    value = tl.load(new_key + KV_HEADS * HEAD_DIM, dim < HEAD_DIM, other=0.0)
    piece = last % PIECES * ENTRY_TOKENS + past % ENTRY_TOKENS
    first = (last // PIECES).to(tl.int64) * block_stride
    place = first + piece * token_stride + head * HEAD_DIM
    scale_place = first + piece * (token_stride // HEAD_DIM) + head
    store_token(keys, key_exponents, key, place, scale_place, HEAD_DIM, CODES)
    store_token(values, value_exponents, value, place, scale_place, HEAD_DIM, CODES)
    tl.debug_barrier()  # other threads of this program read the stored token below
    best = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.full([PAIRS], 0.0, tl.float32)
    weighted = tl.full([PAIRS, DIM], 0.0, tl.float32)
    best, total, weighted = fold_entries(
        queries, keys + head * HEAD_DIM, values + head * HEAD_DIM,
        key_exponents, value_exponents, head,
        own_blocks, None, None, first_entry, num_entries, num_tokens, block, held,
        past + pair * 0, scale, block_stride, token_stride, best, total, weighted,
        HEAD_DIM, DIM, ENTRY_TOKENS, PIECES, TOKENS, SOFTCAP, WINDOW, WIDE, CODES,
    )  # fmt: skip
    slots = first_own_slot + row + pair * 0
    HEADS: tl.constexpr = KV_HEADS * GROUP
    _store_partial(
        context, lse, slots, heads, real, best, total, weighted, HEADS, HEAD_DIM, DIM, WINDOW
    )


@triton.jit
def _attend_item(
    query, keys, values, key_exponents, value_exponents, num_own, context, lse,
    items, entry_blocks, entry_tokens, entry_firsts, slot_rows, slot_reach, item, head,
    scale, query_stride, block_stride, token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ENTRY_TOKENS: tl.constexpr, PIECES: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one work item: the attention of several rows to one part of their paths."""
    first_entry = tl.load(items + item * 4)
    num_entries = tl.load(items + item * 4 + 1)
    first_slot = tl.load(items + item * 4 + 2)
    num_slots = tl.load(items + item * 4 + 3)
    if num_slots > 0:
        pair = tl.arange(0, PAIRS)
        slots = first_slot + pair // GROUP
        real = pair < num_slots * GROUP
        rows = tl.load(slot_rows + slots, mask=real, other=0)
        entry = tl.arange(0, TOKENS) // ENTRY_TOKENS
        block, held = entries_of(
            entry_blocks, entry_tokens, first_entry, entry, num_entries, 0, ENTRY_TOKENS
        )
        if EARLY:
            gdc_wait()
        queries, heads = load_queries(
            query, rows, head, real, query_stride, GROUP, HEAD_DIM, DIM, PAIRS
        )
        reach = rows
        if WINDOW > 0:
            reach = tl.load(slot_reach + slots, mask=real, other=0)
            reach += tl.load(num_own + rows, mask=real, other=1) - 1
        best = tl.full([PAIRS], float("-inf"), tl.float32)
        total = tl.full([PAIRS], 0.0, tl.float32)
        weighted = tl.full([PAIRS, DIM], 0.0, tl.float32)
        best, total, weighted = fold_entries(
            queries, keys + head * HEAD_DIM, values + head * HEAD_DIM,
            key_exponents, value_exponents, head,
            entry_blocks, entry_tokens, entry_firsts, first_entry, num_entries, 0, block, held,
            reach, scale, block_stride, token_stride, best, total, weighted,
            HEAD_DIM, DIM, ENTRY_TOKENS, PIECES, TOKENS, SOFTCAP, WINDOW, WIDE, CODES,
        )  # fmt: skip
        HEADS: tl.constexpr = KV_HEADS * GROUP
        _store_partial(
            context, lse, slots, heads, real, best, total, weighted, HEADS, HEAD_DIM, DIM, WINDOW
        )


@triton.jit(do_not_specialize=["num_rows", "first_own_slot"])
def attend_parts(
    query, new, keys, values, key_exponents, value_exponents, own_blocks, num_own, context, lse,
    items, entry_blocks, entry_tokens, entry_firsts, slot_rows, slot_reach,
    num_rows, first_own_slot, scale,
    query_stride, new_stride, block_stride, token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ENTRY_TOKENS: tl.constexpr, PIECES: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the partial (context, log-sum-exp) of every slot for a decode step.

    The first programs attend to the rows' own newest tokens, the others to work items.

    new: [rows, K or V, kv_heads, head_dim] of the current tokens, which this kernel stores.
    own_blocks: [rows, MOST] entries of the pool with each row's newest tokens.
    num_own: [rows] number of newest tokens, the current token included.
    slot_reach: [slots] path tokens from the first token of the part to the row's newest tokens.
    items: [items, 4] first entry, number of entries, first slot, number of slots. An item without
        slots is empty.
    context, lse: [slots, heads, head_dim] and [slots, heads], float32, written by this kernel.
    """
    program = tl.program_id(0)
    item = program // KV_HEADS
    head = program % KV_HEADS
    if EARLY:
        gdc_launch_dependents()
    if item < num_rows:
        _attend_own(
            query, new, keys, values, key_exponents, value_exponents, own_blocks, num_own,
            context, lse, item, head, first_own_slot, scale,
            query_stride, new_stride, block_stride, token_stride,
            KV_HEADS, GROUP, HEAD_DIM, DIM, ENTRY_TOKENS, PIECES, PAIRS, TOKENS, MOST,
            SOFTCAP, WINDOW, WIDE, CODES, EARLY,
        )  # fmt: skip
    else:
        _attend_item(
            query, keys, values, key_exponents, value_exponents, num_own, context, lse,
            items, entry_blocks, entry_tokens, entry_firsts, slot_rows, slot_reach,
            item - num_rows, head, scale, query_stride, block_stride, token_stride,
            KV_HEADS, GROUP, HEAD_DIM, DIM, ENTRY_TOKENS, PIECES, PAIRS, TOKENS,
            SOFTCAP, WINDOW, WIDE, CODES, EARLY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_own_slot"])
def merge_rows(
    context, lse, row_parts, row_slots, sinks, out, first_own_slot,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of each row in path order, own tokens last, PARTS at once.

    One program runs per (row, query head).

    row_parts: [rows, 2] start of the row's slots in `row_slots`, and the row's number of parts, its
        own tokens included.
    sinks: [heads] scores, not converted to base 2.
    out: [rows, heads, head_dim], written by this kernel.
    """
    program = tl.program_id(0)
    row = program // HEADS
    head = program % HEADS
    first = tl.load(row_parts + row * 2)
    num_parts = tl.load(row_parts + row * 2 + 1)
    dim = tl.arange(0, DIM)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    merged = tl.full([DIM], 0.0, tl.float32)
    part = tl.arange(0, PARTS)
    listed = tl.load(row_slots + first + part, mask=part < num_parts - 1, other=0)
    if EARLY:
        gdc_wait()
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        here = part < num_parts
        slot = tl.where(part < num_parts - 1, listed, first_own_slot + row)
        place = slot.to(tl.int64) * HEADS + head
        inside = here[:, None] & (dim < HEAD_DIM)[None, :]
        piece = tl.load(context + place[:, None] * HEAD_DIM + dim[None, :], inside, other=0.0)
        logs = tl.load(lse + place, mask=here, other=float("-inf"))
        larger = tl.maximum(best, tl.max(logs, axis=0))
        offset = larger
        if WINDOW > 0:
            offset = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(logs - offset)
        shrink = tl.exp2(best - offset)
        total = total * shrink + tl.sum(weights, axis=0)
        merged = merged * shrink + tl.sum(weights[:, None] * piece, axis=0)
        best = larger
        after = part + PARTS
        listed = tl.load(row_slots + first + after, mask=after < num_parts - 1, other=0)
    if SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - best)
    place = (row.to(tl.int64) * HEADS + head) * HEAD_DIM + dim
    tl.store(out + place, (merged / total).to(out.dtype.element_ty), dim < HEAD_DIM)


@triton.jit
def attend_chunks(
    query, keys, values, key_exponents, value_exponents, own_keys, own_values, sinks, out,
    tiles, entry_blocks, entry_tokens, entry_firsts, slots, scale,
    query_stride, own_stride, block_stride, token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ENTRY_TOKENS: tl.constexpr, PIECES: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr,
    SINKS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, WIDE: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Compute a prefill: each tile attends to its whole path, then causally to its own chunk.

    A chunk is the new tokens of one path; a tile is a range of these tokens.

    tiles: [tiles, 7] first entry and number of entries of the path; the chunk's first token in the
        packed batch; the tile's first token and number of tokens, 0 for an empty tile; number of
        tokens from the chunk's first to the tile's last; number of tokens of the path.
    slots: [tokens] places in the pool where a tile stores its own keys and values; negative for
        tokens that are not stored. No tile reads these slots of the pool.
    sinks: [heads] scores, not converted to base 2.
    out: [tokens, heads, head_dim], written by this kernel.
    """
    program = tl.program_id(0)
    tile = tiles + program // KV_HEADS * 7
    head = program % KV_HEADS
    first_entry = tl.load(tile)
    num_entries = tl.load(tile + 1)
    first_own = tl.load(tile + 2)
    first_query = tl.load(tile + 3)
    num_queries = tl.load(tile + 4)
    num_own = tl.load(tile + 5)
    if num_queries > 0:
        if slots is not None:
            store_tokens(
                own_keys, own_values, keys, values, key_exponents, value_exponents,
                slots, first_query, num_queries, head, own_stride, block_stride, token_stride,
                HEAD_DIM, DIM, ENTRY_TOKENS * PIECES, TOKENS, CODES,
            )  # fmt: skip
        pair = tl.arange(0, PAIRS)
        dim = tl.arange(0, DIM)
        entry = tl.arange(0, TOKENS) // ENTRY_TOKENS
        block, held = entries_of(
            entry_blocks, entry_tokens, first_entry, entry, num_entries, 0, ENTRY_TOKENS
        )
        token = first_query + pair // GROUP
        real = pair < num_queries * GROUP
        queries, heads = load_queries(
            query, token, head, real, query_stride, GROUP, HEAD_DIM, DIM, PAIRS
        )
        best = tl.full([PAIRS], float("-inf"), tl.float32)
        total = tl.full([PAIRS], 0.0, tl.float32)
        weighted = tl.full([PAIRS, DIM], 0.0, tl.float32)
        best, total, weighted = fold_entries(
            queries, keys + head * HEAD_DIM, values + head * HEAD_DIM,
            key_exponents, value_exponents, head,
            entry_blocks, entry_tokens, entry_firsts, first_entry, num_entries, 0, block, held,
            tl.load(tile + 6) + token - first_own, scale,
            block_stride, token_stride, best, total, weighted,
            HEAD_DIM, DIM, ENTRY_TOKENS, PIECES, TOKENS, SOFTCAP, WINDOW, WIDE, CODES,
        )  # fmt: skip
        for start in range(0, num_own, TOKENS):
            at = start + tl.arange(0, TOKENS)
            inside = (at < num_own)[:, None] & (dim < HEAD_DIM)[None, :]
            place = (first_own + at).to(tl.int64) * own_stride + head * HEAD_DIM
            place = place[:, None] + dim[None, :]
            key = tl.load(own_keys + place, mask=inside, other=0.0)
            value = tl.load(own_values + place, mask=inside, other=0.0)
            seen = at[None, :] <= (token - first_own)[:, None]
            if WINDOW > 0:
                seen = seen & ((token - first_own)[:, None] - at[None, :] < WINDOW)
            best, total, weighted = fold(
                queries, key, value, seen, scale, best, total, weighted, SOFTCAP, WINDOW, WIDE
            )
        if SINKS:
            bias = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32)
            total += tl.exp2(bias * 1.4426950408889634 - best)
        place = (token.to(tl.int64) * (KV_HEADS * GROUP) + heads) * HEAD_DIM
        inside = real[:, None] & (dim < HEAD_DIM)[None, :]
        weighted = (weighted / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] + dim[None, :], weighted, inside)
