"""Triton kernels for top-k, top-p and min-p without a sort: they find the smallest kept logit.

All three filters keep the first tokens in the order of `sampling.filter_logits`: larger logits
first, and among equal ones the lower id. The kept tokens of a row are therefore given by a
*threshold*: the smallest value that is kept, and the last kept id among tokens of that value.
`draw_kernel` samples from the tokens that the threshold keeps.

Bisection finds the threshold on the bits of the logits, ordered as integers. It counts how many
tokens reach a value (top-k), or how much mass reaches it (top-p). The first search is among the
maxima of groups of 32 tokens: if k groups reach a value, at least k tokens do. The few tokens from
that value on are collected and searched. If they are many (a flat row, a very large k), the whole
row is searched. One program per row and piece finds the group maxima, and one program per row does
the rest.

Masses are integers, in units of 2^-40 of the most likely token's mass. Their sums do not depend on
an order, so a row's threshold depends on its logits alone. Top-p keeps a token if the tokens before
it have less mass than the share top_p of all mass that top-k kept (without top-k, of a float32 sum
over the row's pieces). The reference in `sampling` sums rounded probabilities instead. A threshold
may differ from the reference only if a sum is within rounding of top-p, or a quotient within
rounding of min-p.

This module does not postpone annotations, because Triton reads `tl.constexpr` from them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE_TOKENS = 2048  # tokens of a program of `find_maxima`
GROUP_TOKENS = 32  # tokens of a group, whose maximum is kept
CHUNK_TOKENS = 1024  # tokens that `find_thresholds` reads at a time
ROOM = 4096  # maximum number of collected tokens
# Without `maxnreg` the assembler spills registers, to fit three programs per multiprocessor.
HOW = {"num_warps": 8} | ({} if torch.version.hip else {"maxnreg": 128})
_LOG2_E = tl.constexpr(1.4426950408889634)
_ONE = tl.constexpr(float(1 << 40))


@triton.jit
def has_filters(row, greedy, top_k, top_p, min_p):
    """Return whether this row samples from fewer than all tokens."""
    some = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < float("inf"))
    return (some | (tl.load(min_p + row) > 0)) & (tl.load(greedy + row) == 0)


@triton.jit
def order_value(logit, heat):
    """Return the float32 by which tokens are ordered; of equal ones, the lowest id comes first.

    A float32 logit is divided by the temperature `heat`, as when sampling: the quotients of two
    different logits may round to the same number, and then ids decide. Quotients of different
    16-bit logits differ, so 16-bit logits need no division to have the same order.
    """
    if logit.dtype.primitive_bitwidth > 16:
        return tl.div_rn(logit.to(tl.float32), heat)
    else:
        return logit.to(tl.float32)


@triton.jit
def _share(value, highest, heat):
    """Return a token's probability divided by the most likely token's."""
    return tl.exp2((value - highest) * (_LOG2_E / heat))


@triton.jit
def _key(value, UNUSED: tl.constexpr):
    """Return a float's rank as an integer. UNUSED: low bits that this logit type lacks."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) >> UNUSED
    return bits ^ ((bits >> 63) & (0x7FFFFFFF >> UNUSED))


@triton.jit
def _value(key, dtype: tl.constexpr, UNUSED: tl.constexpr):
    """Return the logit of a rank that `_key` returned."""
    bits = (key ^ ((key >> 63) & (0x7FFFFFFF >> UNUSED))) << UNUSED
    return bits.to(tl.int32).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _weight(logit, counts, highest, heat):
    """Return what a token adds to a sum: 1 for top-k (`counts`), its mass for top-p."""
    mass = (_share(logit.to(tl.float32), highest, heat) * _ONE).to(tl.int64)
    return tl.where(counts, 1, mass)


@triton.jit
def _sum_reaching(values, size, least, counts, highest, heat, CHUNK: tl.constexpr):
    """Return the number of logits at or above `least` (if `counts`), or else their mass."""
    reached, threshold = tl.zeros([CHUNK], tl.int64), order_value(least, heat)
    for start in tl.range(0, size, CHUNK, loop_unroll_factor=2):  # loads overlap
        place = start + tl.arange(0, CHUNK)
        logit = tl.load(values + place, place < size, other=float("-inf"))
        reaches = (place < size) & (order_value(logit, heat) >= threshold)
        reached += tl.where(reaches, _weight(logit, counts, highest, heat), 0)
    return tl.sum(reached, axis=0)


@triton.jit
def _search(
    values, size, wanted, counts, lowest, highest, heat, UNUSED: tl.constexpr, CHUNK: tl.constexpr
):
    """Bisect for the largest key that at least `wanted` logits reach (top-k), or mass `wanted`.

    Return `lowest` if no key is.
    """
    low, high = lowest, _key(highest, UNUSED)
    while low < high:
        middle = high - (high - low) // 2
        least = _value(middle, values.dtype.element_ty, UNUSED)
        if _sum_reaching(values, size, least, counts, highest, heat, CHUNK) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _append_chosen(out, num, value, chosen, room):
    """Append the chosen values to `out`, which has `num` values; return the new number.

    Values beyond `room` are counted but not stored.
    """
    chosen = chosen.to(tl.int32)
    place = num + tl.cumsum(chosen, axis=0) - 1
    tl.store(out + place, value, (chosen != 0) & (place < room))
    return num + tl.sum(chosen, axis=0)


@triton.jit
def _collect_tokens(
    logits, maxima, values, groups, ids, edge, heat, num_tokens, num_groups,
    GROUP: tl.constexpr, ROOM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copy the tokens with a logit of at least `edge` to `values` and `ids`, in order of id.

    Return the number of these tokens, which is above ROOM if they did not fit.
    """
    num, least = 0, order_value(edge, heat)
    for start in range(0, num_groups, CHUNK):
        group = start + tl.arange(0, CHUNK)
        here = group < num_groups
        largest = tl.load(maxima + group, here, other=float("-inf"))
        num = _append_chosen(
            groups, num, group, here & (order_value(largest, heat) >= least), num_groups
        )
    tl.debug_barrier()
    size = 0
    if num <= ROOM:
        for start in range(0, num * GROUP, CHUNK):
            place = start + tl.arange(0, CHUNK)
            group = tl.load(groups + place // GROUP, place < num * GROUP, other=num_groups)
            token = group * GROUP + place % GROUP
            here = token < num_tokens
            logit = tl.load(logits + token, here, other=float("-inf"))
            chosen = here & (order_value(logit, heat) >= least)
            _append_chosen(values, size, logit, chosen, ROOM)
            size = _append_chosen(ids, size, token, chosen, ROOM)
    else:
        size = num
    tl.debug_barrier()
    return size


@triton.jit
def _last_kept(values, size, threshold, wanted, highest, heat, CHUNK: tl.constexpr):
    """Return the index of the last token at `threshold` with less than `wanted` mass before it."""
    above = tl.zeros([CHUNK], tl.int64)
    for start in range(0, size, CHUNK):
        place = start + tl.arange(0, CHUNK)
        logit = tl.load(values + place, place < size, other=float("-inf"))
        over = (place < size) & (order_value(logit, heat) > threshold)
        above += tl.where(over, _weight(logit, False, highest, heat), 0)
    before, last = tl.sum(above, axis=0), -1
    for start in range(0, size, CHUNK):
        place = start + tl.arange(0, CHUNK)
        here = place < size
        logit = tl.load(values + place, here, other=float("-inf"))
        equal = here & (order_value(logit, heat) == threshold)
        mass = tl.where(equal, _weight(logit, False, highest, heat), 0)
        kept = equal & (before + tl.cumsum(mass, axis=0) - mass < wanted)
        last = tl.maximum(last, tl.max(tl.where(kept, place, -1), axis=0))
        before += tl.sum(mass, axis=0)
    return last


@triton.jit
def find_maxima(
    logits, greedy, temperature, top_k, top_p, min_p, maxima, masses, num_tokens, row_stride,
    maxima_stride, TOKENS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of every 32 tokens: one program per row and piece of TOKENS tokens.

    Rows without filters are skipped. Outputs:

    maxima [rows, groups]: the largest logit of each group.
    masses [rows, pieces, 2] float32: a piece's largest logit, and the sum of its tokens'
    probabilities relative to the token with that logit.
    """
    row, piece = tl.program_id(0), tl.program_id(1)
    if has_filters(row, greedy, top_k, top_p, min_p):
        token = piece * TOKENS + tl.arange(0, TOKENS)
        logits += row.to(tl.int64) * row_stride
        logit = tl.load(logits + token, token < num_tokens, other=float("-inf")).to(tl.float32)
        group = tl.arange(0, TOKENS // GROUP)
        largest = tl.max(tl.reshape(logit, [TOKENS // GROUP, GROUP]), axis=1)
        maxima += row.to(tl.int64) * maxima_stride + piece * (TOKENS // GROUP)
        tl.store(maxima + group, largest)
        highest = tl.max(largest, axis=0)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        masses += 2 * (row * tl.num_programs(1) + piece)
        tl.store(masses, highest)
        tl.store(masses + 1, tl.sum(_share(logit, shift, tl.load(temperature + row)), axis=0))


@triton.jit
def _find_threshold(
    logits, values, ids, total, highest, heat, top_k, top_p, num_tokens, num_groups,
    GROUP: tl.constexpr, ROOM: tl.constexpr, CHUNK: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    """Return the threshold of top-k and top-p of a row that has at least one of them.

    The threshold is the smallest kept value, and the last kept id of that value. total: the mass of
    all tokens.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    counts = top_k > 0
    key = _key(tl.cast(float("-inf"), tl.float32), UNUSED)
    wanted = tl.where(counts, top_k, _mass_share(total, top_p))
    key = _search(values, num_groups, wanted, counts, key, highest, heat, UNUSED, CHUNK)
    searched, searched_ids = values + num_groups, ids + num_groups
    size = _collect_tokens(
        logits, values, searched, ids, searched_ids, _value(key, dtype, UNUSED), heat, num_tokens,
        num_groups, GROUP, ROOM, CHUNK,
    )  # fmt: skip
    is_whole = size > ROOM
    if is_whole:
        searched, size = logits, num_tokens
    if counts:
        key = _search(searched, size, top_k, True, key, highest, heat, UNUSED, CHUNK)
        least = _value(key, dtype, UNUSED)
        total = _sum_reaching(searched, size, least, False, highest, heat, CHUNK)
    last = tl.cast(num_tokens, tl.int32)
    if top_p < float("inf"):
        wanted = _mass_share(total, top_p)
        key = _search(searched, size, wanted, False, key, highest, heat, UNUSED, CHUNK)
        threshold = order_value(_value(key, dtype, UNUSED), heat)
        last = _last_kept(searched, size, threshold, wanted, highest, heat, CHUNK)
        if (last >= 0) & (is_whole == 0):
            last = tl.load(searched_ids + last)
    return order_value(_value(key, dtype, UNUSED), heat), last


@triton.jit
def _mass_share(total, top_p):
    """Return the share `top_p` of a mass, at least 1."""
    top_p = tl.minimum(top_p, 1.0)  # infinity means that top-p is off
    return tl.maximum((total.to(tl.float32) * top_p).to(tl.int64), 1)


@triton.jit
def _min_p_key(min_p, highest, heat, UNUSED: tl.constexpr):
    """Return the smallest key with at least `min_p` of the most likely token's probability."""
    low, high = _key(tl.cast(float("-inf"), tl.float32), UNUSED), _key(highest, UNUSED)
    while low < high:
        middle = low + (high - low) // 2
        if _share(_value(middle, tl.float32, UNUSED), highest, heat) >= min_p:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def find_thresholds(
    logits, greedy, temperature, top_k, top_p, min_p, values, ids, masses, thresholds, lasts,
    num_tokens, row_stride, stride, num_pieces, num_groups,
    PIECES: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr, CHUNK: tl.constexpr,
    UNUSED: tl.constexpr,
):  # fmt: skip
    """Find the threshold of each row, with one program per row.

    values, ids [rows, groups + ROOM]: the groups' maxima, then space for collected tokens.
    thresholds [rows] float32: output, values of `order_value`; minus infinity without filters.
    lasts [rows]: output, last kept id among tokens of the threshold value.
    """
    row = tl.program_id(0)
    threshold, last = tl.cast(float("-inf"), tl.float32), tl.cast(num_tokens, tl.int32)
    if has_filters(row, greedy, top_k, top_p, min_p):
        heat, most, share = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
        logits += row.to(tl.int64) * row_stride
        values += row.to(tl.int64) * stride
        ids += row.to(tl.int64) * stride
        piece = tl.arange(0, PIECES)
        place = masses + 2 * (row * num_pieces + piece)
        largest = tl.load(place, piece < num_pieces, other=float("-inf"))
        mass = tl.load(place + 1, piece < num_pieces, other=0.0)
        highest = tl.max(largest, axis=0)
        mass = tl.where(largest > float("-inf"), mass * _share(largest, highest, heat), 0.0)
        total = (tl.sum(mass, axis=0) * _ONE).to(tl.int64)
        if (most > 0) | (share < float("inf")):
            threshold, last = _find_threshold(
                logits, values, ids, total, highest, heat, most, share, num_tokens, num_groups,
                GROUP, ROOM, CHUNK, UNUSED,
            )  # fmt: skip
        floor = _min_p_key(tl.load(min_p + row), highest, heat, UNUSED)
        floor = order_value(_value(floor, logits.dtype.element_ty, UNUSED), heat)
        if floor > threshold:
            threshold, last = floor, tl.cast(num_tokens, tl.int32)
    tl.store(thresholds + row, threshold)
    tl.store(lasts + row, last)


_UNUSED = {torch.bfloat16: 16, torch.float16: 13}  # low float32 bits that these types lack


def compute_thresholds(
    logits: Tensor, greedy: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which tokens top-k, top-p and min-p keep: thresholds [rows] and last kept ids [rows].

    A row keeps tokens whose `order_value` is above its threshold, and equal ones up to the last id.

    logits: [rows, tokens] of any float type; the tokens of a row are contiguous.
    greedy: [rows]. The other parameters are [rows, 1], as in `sampling.RowSampling`.
    """
    num_rows, num_tokens = logits.shape
    num_pieces = triton.cdiv(num_tokens, PIECE_TOKENS)
    num_groups = num_pieces * (PIECE_TOKENS // GROUP_TOKENS)
    size, device = num_groups + ROOM, logits.device
    values = torch.empty(num_rows, size, dtype=logits.dtype, device=device)
    ids = torch.empty(num_rows, size, dtype=torch.int32, device=device)
    masses = torch.empty(num_rows, num_pieces, 2, device=device)
    thresholds = torch.empty(num_rows, device=device)
    lasts = torch.empty(num_rows, dtype=torch.int32, device=device)
    rows = greedy, temperature, top_k, top_p, min_p
    find_maxima[(num_rows, num_pieces)](
        logits, *rows, values, masses, num_tokens, logits.stride(0), size,
        TOKENS=PIECE_TOKENS, GROUP=GROUP_TOKENS,
    )  # fmt: skip
    find_thresholds[(num_rows,)](
        logits, *rows, values, ids, masses, thresholds, lasts, num_tokens, logits.stride(0), size,
        num_pieces, num_groups, PIECES=triton.next_power_of_2(num_pieces), GROUP=GROUP_TOKENS,
        ROOM=ROOM, CHUNK=CHUNK_TOKENS, UNUSED=_UNUSED.get(logits.dtype, 0), **HOW,
    )  # fmt: skip
    return thresholds, lasts
