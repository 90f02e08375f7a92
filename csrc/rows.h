/* A layer's work beside its products, of one instruction set: included once for each, with these
 * names defined.
 *
 *   NAME(x), TARGET       a name of this set, and the attribute of its functions
 *   Floats, LANES         a vector, and how many numbers it has
 *   larger, smaller       the second where either is NaN
 *   to_power(x, n)        x times 2 to the power of n, which stands in the lowest bits of a float
 *   sum_of(v)             of 16 numbers in PER vectors: halves are added, and halves of those
 *
 * Sums along a row go to 16 numbers in turn, whatever the vectors. Widths are multiples of 16.
 */
#define PER (16 / LANES)
#define INLINE static inline __attribute__((always_inline)) TARGET

/* e to the power of x, to 2 units in the last place; below -87 it stays at 1e-38. */
INLINE Floats NAME(exp)(Floats x) {
    const Floats in_place = all(0x1.8p23f); /* added to it, a whole number stands in lowest bits */
    x = smaller(all(88.0f), larger(all(-87.0f), x));
    Floats whole = plus(times(x, all(1.44269504f)), in_place), near = minus(whole, in_place);
    Floats rest = minus(minus(x, times(near, all(0.693359375f))), times(near, all(-2.12194440e-4f)));
    Floats sum = all(1.9875691500e-4f);
    sum = plus(times(sum, rest), all(1.3981999507e-3f));
    sum = plus(times(sum, rest), all(8.3334519073e-3f));
    sum = plus(times(sum, rest), all(4.1665795894e-2f));
    sum = plus(times(sum, rest), all(1.6666665459e-1f));
    sum = plus(times(sum, rest), all(5.0000001201e-1f));
    sum = plus(plus(times(times(sum, rest), rest), rest), all(1.0f));
    return to_power(sum, whole);
}

INLINE float NAME(squares)(const float *row, int64_t width) {
    Floats sums[PER];
    for (int part = 0; part < PER; part++) sums[part] = all(0.0f);
    for (int64_t at = 0; at < width; at += 16)
        for (int part = 0; part < PER; part++) {
            Floats x = load(row + at + part * LANES);
            sums[part] = plus(sums[part], times(x, x));
        }
    return sum_of(sums);
}

/* out = row / its root mean square * weight. */
INLINE void NAME(norm)(const float *row, const float *weight, float eps, int64_t width,
                       float *out) {
    const Floats scale = all(1.0f / sqrtf(NAME(squares)(row, width) / (float)width + eps));
    for (int64_t at = 0; at < width; at += LANES)
        store(out + at, times(times(load(row + at), scale), load(weight + at)));
}

/* x += delta, normalised where there are weights for that; normed = x normalised. */
static TARGET void NAME(add_norm)(float *x, float *delta, const float *after, const float *weight,
                                  float eps, int64_t width, float *normed) {
    if (delta && after) NAME(norm)(delta, after, eps, width, delta);
    for (int64_t at = 0; delta && at < width; at += LANES)
        store(x + at, plus(load(x + at), load(delta + at)));
    NAME(norm)(x, weight, eps, width, normed);
}

/* A head, normalised where there are weights, turned by its position's angles. The first half of
 * `sin` is negated. */
static TARGET void NAME(turn)(float *head, const float *cos, const float *sin, const float *weight,
                              float eps, int64_t width) {
    const int64_t half = width / 2;
    if (weight) NAME(norm)(head, weight, eps, width, head);
    for (int64_t at = 0; cos && at < half; at++) {
        const float low = head[at], high = head[at + half];
        head[at] = low * cos[at] + high * sin[at];
        head[at + half] = high * cos[at + half] + low * sin[at + half];
    }
}

/* out [width] = activation(gate) * up of inner [2 * width]. */
static TARGET void NAME(gate)(const float *inner, int64_t width, int kind, float *out) {
    for (int64_t at = 0; at < width; at += LANES) {
        Floats gate = load(inner + at), opened = gate;
        if (kind == GELU_TANH) /* 1 + tanh(y) is 2 / (1 + exp(-2 y)) */
            opened = times(all(1.5957691216f),
                           plus(gate, times(times(all(0.044715f), gate), times(gate, gate))));
        if (kind == RELU)
            opened = larger(all(0.0f), gate);
        else
            opened = over(gate, plus(all(1.0f), NAME(exp)(minus(all(0.0f), opened))));
        store(out + at, times(opened, load(inner + width + at)));
    }
}

/* scores[q][at ...] of `queries` queries with `tokens` keys. */
INLINE void NAME(score_few)(int queries, int narrow, const float *const *query, const void *keys,
                            int64_t tokens, int64_t width, float *const *scores, int64_t first) {
    for (int64_t token = 0; token < tokens; token++) {
        Floats sums[4][PER];
        for (int q = 0; q < queries; q++)
            for (int part = 0; part < PER; part++) sums[q][part] = all(0.0f);
        for (int64_t at = 0; at < width; at += 16)
            for (int part = 0; part < PER; part++) {
                const int64_t place = at + part * LANES;
                Floats key = narrow ? load_narrow((const uint16_t *)keys + token * width + place)
                                    : load((const float *)keys + token * width + place);
                for (int q = 0; q < queries; q++)
                    sums[q][part] = plus(sums[q][part], times(load(query[q] + place), key));
            }
        for (int q = 0; q < queries; q++) scores[q][first + token] = sum_of(sums[q]);
    }
}

/* out[q] += the sum of weights[q][at ...] times values, token by token, 16 * `wide` numbers at once:
 * one query alone would wait for its own sums. */
INLINE void NAME(mix_few)(int queries, int wide, int narrow, float *const *weights, int64_t first,
                          const void *values, int64_t tokens, int64_t width, float *const *out,
                          int64_t at) {
    Floats sums[4][4 * PER];
    for (int q = 0; q < queries; q++)
        for (int part = 0; part < wide * PER; part++)
            sums[q][part] = load(out[q] + at + part * LANES);
    for (int64_t token = 0; token < tokens; token++)
        for (int part = 0; part < wide * PER; part++) {
            const int64_t place = token * width + at + part * LANES;
            Floats value = narrow ? load_narrow((const uint16_t *)values + place)
                                  : load((const float *)values + place);
            for (int q = 0; q < queries; q++)
                sums[q][part] = plus(sums[q][part], times(all(weights[q][first + token]), value));
        }
    for (int q = 0; q < queries; q++)
        for (int part = 0; part < wide * PER; part++)
            store(out[q] + at + part * LANES, sums[q][part]);
}

#define BLOCK 64 /* keys that stay in the nearest cache while all queries read them */

#define SCORE(few, narrow) \
    case 2 * few + narrow: \
        NAME(score_few)(few, narrow, query + q, from, count, width, scores + q, first + block); \
        break;

/* See `score_few`: any number of queries. */
static TARGET void NAME(score)(int64_t queries, int narrow, const float *const *query,
                               const void *keys, int64_t tokens, int64_t width,
                               float *const *scores, int64_t first) {
    for (int64_t block = 0; block < tokens; block += BLOCK) {
        const void *from = (const char *)keys + block * width * (narrow ? 2 : 4);
        const int64_t count = tokens - block < BLOCK ? tokens - block : BLOCK;
        for (int64_t q = 0, few; q < queries; q += few) {
            few = queries - q < 4 ? queries - q : 4;
            switch (2 * few + narrow) {
                SCORE(1, 0) SCORE(1, 1) SCORE(2, 0) SCORE(2, 1)
                SCORE(3, 0) SCORE(3, 1) SCORE(4, 0) SCORE(4, 1)
            }
        }
    }
}

#define MIX(few, wide, narrow) \
    case 2 * few + narrow: \
        for (; at + 16 * wide <= width; at += 16 * wide) \
            NAME(mix_few)(few, wide, narrow, weights + q, first + block, from, count, width, \
                          out + q, at); \
        for (; at < width; at += 16) \
            NAME(mix_few)(few, 1, narrow, weights + q, first + block, from, count, width, out + q, \
                          at); \
        break;

/* See `mix_few`. */
static TARGET void NAME(mix)(int64_t queries, int narrow, float *const *weights, int64_t first,
                             const void *values, int64_t tokens, int64_t width,
                             float *const *out) {
    for (int64_t block = 0; block < tokens; block += BLOCK) {
        const void *from = (const char *)values + block * width * (narrow ? 2 : 4);
        const int64_t count = tokens - block < BLOCK ? tokens - block : BLOCK;
        for (int64_t q = 0, few, at; q < queries; q += few) {
            few = queries - q < 4 ? queries - q : 4, at = 0;
            switch (2 * few + narrow) {
                MIX(1, 4, 0) MIX(1, 4, 1) MIX(2, 2, 0) MIX(2, 2, 1)
                MIX(3, 1, 0) MIX(3, 1, 1) MIX(4, 1, 0) MIX(4, 1, 1)
            }
        }
    }
}

/* Make scores [first, end) weights, and give their sum; those before are out of sight. end: a
 * multiple of 16. cap: of scores, or 0. sink: a score without a value, or NULL. */
static TARGET float NAME(weigh)(float *scores, int64_t first, int64_t end, float cap,
                                const float *sink) {
    for (int64_t at = 0; at < first; at++) scores[at] = -INFINITY;
    Floats most = all(sink ? *sink : -INFINITY), sums[PER];
    float mosts[LANES], largest = -INFINITY;
    for (int64_t at = 0; at < end; at += LANES) {
        if (cap > 0) { /* tanh(y) is 1 - 2 / (1 + exp(2 y)) */
            Floats grown = NAME(exp)(times(load(scores + at), all(2.0f / cap)));
            Floats bent = minus(all(1.0f), over(all(2.0f), plus(all(1.0f), grown)));
            store(scores + at, times(all(cap), bent));
        }
        most = larger(most, load(scores + at));
    }
    store(mosts, most);
    for (int lane = 0; lane < LANES; lane++) largest = mosts[lane] > largest ? mosts[lane] : largest;
    for (int64_t at = 0; at < end; at += LANES)
        store(scores + at, NAME(exp)(minus(load(scores + at), all(largest))));
    for (int64_t at = 0; at < first; at++) scores[at] = 0;
    for (int part = 0; part < PER; part++) sums[part] = all(0.0f);
    for (int64_t at = 0; at < end; at += 16)
        for (int part = 0; part < PER; part++)
            sums[part] = plus(sums[part], load(scores + at + part * LANES));
    float total = sum_of(sums);
    if (sink) {
        float alone[LANES];
        store(alone, NAME(exp)(all(*sink - largest)));
        total += alone[0];
    }
    return total;
}

static const Rows NAME(rows) = {NAME(add_norm), NAME(turn), NAME(gate),
                                NAME(score),    NAME(mix),  NAME(weigh)};
#undef PER
#undef INLINE
#undef BLOCK
#undef SCORE
#undef MIX
