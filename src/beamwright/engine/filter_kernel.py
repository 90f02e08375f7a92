"""Where top-k, top-p and min-p of a row end, in Triton, without a sort.

All three keep the first tokens of the order of `sampling.allow`: larger ones first, of equal ones
the lower id. So what a row keeps is its border: the least value that is kept, and of the tokens
that have it the last one. `draw_kernel` draws above it.

The border is found by bisection on the bits of the logits, ordered as whole numbers: how many
tokens reach a value (top-k), or how much mass (top-p). First among the largest of groups of 32
tokens: k groups reach what at least k tokens reach. The few tokens from there on are collected,
and searched. Where they are many (a flat row, a very large k) the whole row is. One program per row
and piece finds the groups' largest, one per row the rest.

Masses are whole numbers, 2^-40 of the likeliest token's, so their sums do not depend on an order,
and a row's border follows from its logits alone. Top-p keeps a token if those before it have less
mass than its share of all that top-k left (of all tokens, a sum in float32 of its pieces). The
oracle adds up rounded probabilities instead: a border may differ where its sum lies within rounding
of top-p, or a quotient within rounding of min-p, and nowhere else.

No annotations are postponed here: Triton reads `tl.constexpr` from them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE_TOKENS = 2048
GROUP_TOKENS = 32
CHUNK_TOKENS = 1024
ROOM = 4096  # tokens that are collected at most
# Left alone, the assembler spills a few registers here to have three programs a multiprocessor.
HOW = {"num_warps": 8} | ({} if torch.version.hip else {"maxnreg": 128})
_LOG2_E = tl.constexpr(1.4426950408889634)
_ONE = tl.constexpr(float(1 << 40))


@triton.jit
def has_filters(row, greedy, top_k, top_p, min_p):
    """Whether this row draws from fewer than all tokens."""
    some = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < float("inf"))
    return (some | (tl.load(min_p + row) > 0)) & (tl.load(greedy + row) == 0)


@triton.jit
def in_order(logit, heat):
    """What decides before ids do: logits by temperature, in which neighbours may become equal.

    Those of 16 bits never do, and stand for themselves.
    """
    if logit.dtype.primitive_bitwidth > 16:
        return tl.div_rn(logit.to(tl.float32), heat)
    else:
        return logit.to(tl.float32)


@triton.jit
def _share(value, highest, heat):
    """Of the likeliest token's probability."""
    return tl.exp2((value - highest) * (_LOG2_E / heat))


@triton.jit
def _key(value, UNUSED: tl.constexpr):
    """A float's place in the order of all; UNUSED: so many bits no logit has."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) >> UNUSED
    return bits ^ ((bits >> 63) & (0x7FFFFFFF >> UNUSED))


@triton.jit
def _value(key, dtype: tl.constexpr, UNUSED: tl.constexpr):
    """The logit of a key."""
    bits = (key ^ ((key >> 63) & (0x7FFFFFFF >> UNUSED))) << UNUSED
    return bits.to(tl.int32).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _weight(logit, counts, highest, heat):
    """1 if tokens are counted, else their mass."""
    mass = (_share(logit.to(tl.float32), highest, heat) * _ONE).to(tl.int64)
    return tl.where(counts, 1, mass)


@triton.jit
def _reaching(values, size, least, counts, highest, heat, CHUNK: tl.constexpr):
    """How many of some logits are at or above `least`, or their mass."""
    found, border = tl.zeros([CHUNK], tl.int64), in_order(least, heat)
    for start in tl.range(0, size, CHUNK, loop_unroll_factor=2):  # several loads under way
        place = start + tl.arange(0, CHUNK)
        logit = tl.load(values + place, place < size, other=float("-inf"))
        reaches = (place < size) & (in_order(logit, heat) >= border)
        found += tl.where(reaches, _weight(logit, counts, highest, heat), 0)
    return tl.sum(found, axis=0)


@triton.jit
def _search(
    values, size, wanted, counts, lowest, highest, heat, UNUSED: tl.constexpr, CHUNK: tl.constexpr
):
    """The largest key that `wanted` of these logits reach (or their mass); `lowest` if none is."""
    low, high = lowest, _key(highest, UNUSED)
    while low < high:
        middle = high - (high - low) // 2
        least = _value(middle, values.dtype.element_ty, UNUSED)
        if _reaching(values, size, least, counts, highest, heat, CHUNK) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _appended(out, num, value, chosen, room):
    """Behind `num` others, those that are chosen, as far as there is room; how many there are."""
    chosen = chosen.to(tl.int32)
    place = num + tl.cumsum(chosen, axis=0) - 1
    tl.store(out + place, value, (chosen != 0) & (place < room))
    return num + tl.sum(chosen, axis=0)


@triton.jit
def _collected(
    logits, maxima, values, groups, ids, edge, heat, num_tokens, num_groups,
    GROUP: tl.constexpr, ROOM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The tokens from `edge` on, by ids; how many there are, if at most ROOM."""
    num, least = 0, in_order(edge, heat)
    for start in range(0, num_groups, CHUNK):
        group = start + tl.arange(0, CHUNK)
        here = group < num_groups
        largest = tl.load(maxima + group, here, other=float("-inf"))
        num = _appended(groups, num, group, here & (in_order(largest, heat) >= least), num_groups)
    tl.debug_barrier()
    size = 0
    if num <= ROOM:
        for start in range(0, num * GROUP, CHUNK):
            place = start + tl.arange(0, CHUNK)
            group = tl.load(groups + place // GROUP, place < num * GROUP, other=num_groups)
            token = group * GROUP + place % GROUP
            here = token < num_tokens
            logit = tl.load(logits + token, here, other=float("-inf"))
            chosen = here & (in_order(logit, heat) >= least)
            _appended(values, size, logit, chosen, ROOM)
            size = _appended(ids, size, token, chosen, ROOM)
    else:
        size = num
    tl.debug_barrier()
    return size


@triton.jit
def _last_kept(values, size, border, wanted, highest, heat, CHUNK: tl.constexpr):
    """The place of the last one at the border before which there is less mass than is wanted."""
    above = tl.zeros([CHUNK], tl.int64)
    for start in range(0, size, CHUNK):
        place = start + tl.arange(0, CHUNK)
        logit = tl.load(values + place, place < size, other=float("-inf"))
        over = (place < size) & (in_order(logit, heat) > border)
        above += tl.where(over, _weight(logit, False, highest, heat), 0)
    before, last = tl.sum(above, axis=0), -1
    for start in range(0, size, CHUNK):
        place = start + tl.arange(0, CHUNK)
        here = place < size
        logit = tl.load(values + place, here, other=float("-inf"))
        equal = here & (in_order(logit, heat) == border)
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
    """One program per row and piece of TOKENS tokens; rows without filters are left out.

    maxima [rows, groups]: the largest logit of each group. masses [rows, pieces, 2] float32: a
    piece's largest logit, and its sum of shares of that token's probability.
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
def _border(
    logits, values, ids, total, highest, heat, top_k, top_p, num_tokens, num_groups,
    GROUP: tl.constexpr, ROOM: tl.constexpr, CHUNK: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    """What top-k and top-p leave, at least one of which a row has: from where on, and up to whom.

    total: the mass of all tokens.
    """
    dtype: tl.constexpr = logits.dtype.element_ty
    counts = top_k > 0
    key = _key(tl.cast(float("-inf"), tl.float32), UNUSED)
    wanted = tl.where(counts, top_k, _part(total, top_p))
    key = _search(values, num_groups, wanted, counts, key, highest, heat, UNUSED, CHUNK)
    found, found_ids = values + num_groups, ids + num_groups
    size = _collected(
        logits, values, found, ids, found_ids, _value(key, dtype, UNUSED), heat, num_tokens,
        num_groups, GROUP, ROOM, CHUNK,
    )  # fmt: skip
    is_whole = size > ROOM
    if is_whole:
        found, size = logits, num_tokens
    if counts:
        key = _search(found, size, top_k, True, key, highest, heat, UNUSED, CHUNK)
        least = _value(key, dtype, UNUSED)
        total = _reaching(found, size, least, False, highest, heat, CHUNK)
    last = tl.cast(num_tokens, tl.int32)
    if top_p < float("inf"):
        wanted = _part(total, top_p)
        key = _search(found, size, wanted, False, key, highest, heat, UNUSED, CHUNK)
        border = in_order(_value(key, dtype, UNUSED), heat)
        last = _last_kept(found, size, border, wanted, highest, heat, CHUNK)
        if (last >= 0) & (is_whole == 0):
            last = tl.load(found_ids + last)
    return in_order(_value(key, dtype, UNUSED), heat), last


@triton.jit
def _part(total, top_p):
    """So much of a mass, and something."""
    top_p = tl.minimum(top_p, 1.0)  # infinity: no row's to ask for
    return tl.maximum((total.to(tl.float32) * top_p).to(tl.int64), 1)


@triton.jit
def _floor(min_p, highest, heat, UNUSED: tl.constexpr):
    """The least key with so large a share of the likeliest token's probability."""
    low, high = _key(tl.cast(float("-inf"), tl.float32), UNUSED), _key(highest, UNUSED)
    while low < high:
        middle = low + (high - low) // 2
        if _share(_value(middle, tl.float32, UNUSED), highest, heat) >= min_p:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def find_borders(
    logits, greedy, temperature, top_k, top_p, min_p, values, ids, masses, borders, lasts,
    num_tokens, row_stride, stride, num_pieces, num_groups,
    PIECES: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr, CHUNK: tl.constexpr,
    UNUSED: tl.constexpr,
):  # fmt: skip
    """One program per row.

    values, ids [rows, groups + ROOM]: groups' largest logits, and room for what is collected.
    borders [rows] float32, `in_order`: of a row without filters minus infinity. lasts [rows].
    """
    row = tl.program_id(0)
    border, last = tl.cast(float("-inf"), tl.float32), tl.cast(num_tokens, tl.int32)
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
            border, last = _border(
                logits, values, ids, total, highest, heat, most, share, num_tokens, num_groups,
                GROUP, ROOM, CHUNK, UNUSED,
            )  # fmt: skip
        floor = _floor(tl.load(min_p + row), highest, heat, UNUSED)
        floor = in_order(_value(floor, logits.dtype.element_ty, UNUSED), heat)
        if floor > border:
            border, last = floor, tl.cast(num_tokens, tl.int32)
    tl.store(borders + row, border)
    tl.store(lasts + row, last)


_UNUSED = {torch.bfloat16: 16, torch.float16: 13}  # bits of a float32 that they do not have


def borders_of(
    logits: Tensor, greedy: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Of rows, what they keep: `in_order` from the border [rows] on; of equal ones up to an id.

    logits [rows, tokens] of any float type, the tokens of a row side by side; greedy [rows] and the
    others [rows, 1] as in `sampling.RowSampling`.
    """
    num_rows, num_tokens = logits.shape
    num_pieces = triton.cdiv(num_tokens, PIECE_TOKENS)
    num_groups = num_pieces * (PIECE_TOKENS // GROUP_TOKENS)
    size, device = num_groups + ROOM, logits.device
    values = torch.empty(num_rows, size, dtype=logits.dtype, device=device)
    ids = torch.empty(num_rows, size, dtype=torch.int32, device=device)
    masses = torch.empty(num_rows, num_pieces, 2, device=device)
    borders = torch.empty(num_rows, device=device)
    lasts = torch.empty(num_rows, dtype=torch.int32, device=device)
    rows = greedy, temperature, top_k, top_p, min_p
    find_maxima[(num_rows, num_pieces)](
        logits, *rows, values, masses, num_tokens, logits.stride(0), size,
        TOKENS=PIECE_TOKENS, GROUP=GROUP_TOKENS,
    )  # fmt: skip
    find_borders[(num_rows,)](
        logits, *rows, values, ids, masses, borders, lasts, num_tokens, logits.stride(0), size,
        num_pieces, num_groups, PIECES=triton.next_power_of_2(num_pieces), GROUP=GROUP_TOKENS,
        ROOM=ROOM, CHUNK=CHUNK_TOKENS, UNUSED=_UNUSED.get(logits.dtype, 0), **HOW,
    )  # fmt: skip
    return borders, lasts
