/* The product of one instruction set: included once for each, with these names defined.
 *
 *   NAME(x), TARGET      a name of this set, and the attribute of its functions
 *   Bytes, Sums, Floats  vectors of as many outputs as it has lanes: four bytes, an integer, a float
 *   dots(w, x, n, bits)  sums of w[i] * x[4 i ...] over the four bytes of a lane, i < n; codes w are
 *                        unsigned, but those of 8 bits count from 128 where SIGNED8 is 1
 */

/* The eight vectors of a record: of each output four columns, from codes of `bits`. */
static inline __attribute__((always_inline)) TARGET void NAME(vectors)(const uint8_t *codes,
                                                                       int bits, Bytes *to) {
    if (bits == 8) {
        for (int quad = 0; quad < 8; quad++) to[quad] = loads(codes + quad * 64);
        return;
    }
    const Bytes nibble = every(15), fifth = every(16), sixth = every(48);
    for (int quad = 0; quad < 4; quad++) {
        Bytes both = loads(codes + quad * 64);
        to[quad] = both_of(both, nibble);
        to[quad + 4] = both_of(right(both, 4), nibble);
    }
    if (bits == 5) {
        Bytes plane = loads(codes + 256);
        for (int quad = 0; quad < 4; quad++)
            to[quad] = either(to[quad], both_of(left(plane, 4 - quad), fifth));
        for (int quad = 4; quad < 8; quad++)
            to[quad] = either(to[quad], both_of(right(plane, quad - 4), fifth));
    }
    if (bits == 6) {
        for (int plane = 0; plane < 2; plane++) {
            Bytes two = loads(codes + 256 + plane * 64), *quads = to + plane * 4;
            quads[0] = either(quads[0], both_of(left(two, 4), sixth));
            quads[1] = either(quads[1], both_of(left(two, 2), sixth));
            quads[2] = either(quads[2], both_of(two, sixth));
            quads[3] = either(quads[3], both_of(right(two, 2), sixth));
        }
    }
}

/* LANES outputs, from `lane` on, of `rows` rows: bits and rows are constants of each copy. */
static inline __attribute__((always_inline)) TARGET void NAME(pass)(
    const Kind *kind, int bits, int rows, const uint8_t *tile, int lane, int64_t columns,
    Activations x, int64_t first, float *out) {
    const int64_t records = columns / COLUMNS, supers = records / kind->super;
    const int scales = kind->scales, lows = kind->lows;
    Floats sums[MOST_ROWS];
    for (int row = 0; row < rows; row++) sums[row] = zeros();
    int64_t record = 0;
    for (int64_t super = 0; super < supers; super++) {
        const Floats scale = scales16(tile + lane * 2);
        const Floats low = lows ? scales16(tile + TILE * 2 + lane * 2) : zeros();
        tile += head_bytes(kind);
        for (int part = 0; part < kind->super; part++, record++) {
            const uint8_t *codes = tile + factor_bytes(kind);
            if (rows >= PREFETCHED_ROWS && first == 0)
                for (size_t at = 0; at < code_bytes(kind); at += 64)
                    __builtin_prefetch(codes + AHEAD + at);
            Bytes weights[8];
            NAME(vectors)(codes + lane * 4, bits, weights);
            Floats first_scale = scale, second_scale = scale, own_low = low;
            if (scales == 1) first_scale = times(scale, factors(tile + lane));
            if (scales == 2) {
                first_scale = times(scale, signed_factors(tile + lane));
                second_scale = times(scale, signed_factors(tile + TILE + lane));
            }
            if (scales && lows) own_low = minus(times(low, factors(tile + TILE + lane)));
            for (int row = 0; row < rows; row++) {
                const int64_t at = (first + row) * records + record;
                const int8_t *four_columns = x.codes + (first + row) * columns + record * COLUMNS;
                const float step = x.scales[at];
                if (scales == 2) {
                    const int32_t half = kind->zero * x.halves[at];
                    Sums exact = less(dots(weights, four_columns, 4, bits), half);
                    sums[row] = plus(sums[row],
                                     times(floats(exact), times(first_scale, all(step))));
                    exact = dots(weights + 4, four_columns + 16, 4, bits);
                    exact = less(exact, kind->zero * x.sums[at] - half);
                    sums[row] = plus(sums[row],
                                     times(floats(exact), times(second_scale, all(step))));
                    continue;
                }
                Sums exact = dots(weights, four_columns, 8, bits);
                if (!lows && !(bits == 8 && SIGNED8)) exact = less(exact, kind->zero * x.sums[at]);
                sums[row] = plus(sums[row], times(floats(exact), times(first_scale, all(step))));
                if (lows)
                    sums[row] = plus(sums[row], times(own_low, all(x.shares[at])));
            }
            tile = codes + code_bytes(kind);
        }
    }
    for (int row = 0; row < rows; row++) store(out + row * TILE + lane, sums[row]);
}

#define PASS(bits, rows)                                                                           \
    static TARGET void NAME(pass_##bits##_##rows)(const Kind *kind, const uint8_t *tile,           \
                                                  int64_t columns, Activations x, int64_t first,   \
                                                  float *out) {                                    \
        for (int lane = 0; lane < TILE; lane += LANES)                                             \
            NAME(pass)(kind, bits, rows, tile, lane, columns, x, first, out);                      \
    }
#define PASSES(bits) PASS(bits, 1) PASS(bits, 2) PASS(bits, 4) PASS(bits, 8)
PASSES(4) PASSES(5) PASSES(6) PASSES(8)

#define BY_ROWS(bits)                                                                              \
    {NAME(pass_##bits##_1), NAME(pass_##bits##_2), NAME(pass_##bits##_4), NAME(pass_##bits##_8)}
static const Pass NAME(passes)[4][4] = {BY_ROWS(4), BY_ROWS(5), BY_ROWS(6), BY_ROWS(8)};
#undef PASS
#undef PASSES
#undef BY_ROWS
