/* Products with quantised weights: rows of activations times the codes that a file holds.
 *
 * Weights are packed once into tiles of 16 outputs. A tile is a run of records of 32 columns:
 * scales of its outputs, then their codes, so that one vector holds four columns of all outputs.
 * Activations are rounded to 8 bits with a scale for each 32 columns. Integer sums are exact; each
 * output adds the sums of its records in the order of columns, a product and an addition apart. So
 * a row's bits depend neither on the other rows, nor on the number of threads, nor on the CPU:
 * every instruction set runs the same operations, lane by lane, and `plain` is their definition.
 *
 * Nothing here knows Python or PyTorch. Threads are those of the caller's OpenMP runtime, if it
 * passes one to `bw_threads`.
 */
#include "products.h"

#include <sched.h>
#include <stddef.h>
#include <stdlib.h>

#define TILE 16 /* outputs */
#define COLUMNS 32
#define MOST_ROWS 8 /* of one pass over a tile */
/* From so many rows on, a pass reads too slowly for the CPU's own prefetcher; with fewer rows our
 * requests cost time (measured). */
#define PREFETCHED_ROWS 4
#define AHEAD 4096 /* bytes */

#ifdef X86
#include <immintrin.h>
#define pause_a_little _mm_pause
#else
#define pause_a_little() ((void)0)
#endif

/* How weights of one GGUF type are kept. */
typedef struct {
    int bits;   /* of a code */
    int zero;   /* the code whose value is 0, or 0 where there are minimums */
    int super;  /* records that share a scale of 16 bits */
    int scales; /* 8-bit factors of that scale in a record, one for each 32 or 16 columns; 0: none */
    int lows;   /* 1 if there are minimums */
    int block;  /* bytes of the file's block */
} Kind;

/* Numbers are GGUF's: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K; the last three are ours: codes
 * of 4 bits in groups of 32, 64, 128 columns, then their scale and minimum. */
static const Kind KINDS[] = {
    [2] = {4, 8, 1, 0, 0, 18},   [3] = {4, 0, 1, 0, 1, 20},   [6] = {5, 16, 1, 0, 0, 22},
    [7] = {5, 0, 1, 0, 1, 24},   [8] = {8, 128, 1, 0, 0, 34}, [12] = {4, 0, 8, 1, 1, 144},
    [13] = {5, 0, 8, 1, 1, 176}, [14] = {6, 32, 8, 2, 0, 210},
    [48] = {4, 0, 1, 0, 1, 20},  [49] = {4, 0, 2, 0, 1, 36},  [50] = {4, 0, 4, 0, 1, 68},
};
#define NUM_KINDS ((int)(sizeof KINDS / sizeof *KINDS))

static const Kind *kind_of(int number) {
    int known = number >= 0 && number < NUM_KINDS && KINDS[number].bits;
    return known ? &KINDS[number] : NULL;
}

static size_t head_bytes(const Kind *kind) { return (size_t)(1 + kind->lows) * TILE * 2; }

static size_t factor_bytes(const Kind *kind) {
    return (size_t)(kind->scales ? kind->scales + kind->lows : 0) * TILE;
}

static size_t code_bytes(const Kind *kind) { return (size_t)kind->bits * TILE * COLUMNS / 8; }

static size_t super_bytes(const Kind *kind) {
    return head_bytes(kind) + (size_t)kind->super * (factor_bytes(kind) + code_bytes(kind));
}

/* Bytes of a tile of 16 outputs; 0 where the type or the number of columns is not taken. */
size_t bw_tile_bytes(int number, int64_t columns) {
    const Kind *kind = kind_of(number);
    if (!kind || columns <= 0 || columns % (COLUMNS * kind->super)) return 0;
    return super_bytes(kind) * (size_t)(columns / COLUMNS / kind->super);
}

/* --- activations --------------------------------------------------------------------------- */

/* Magnitudes are compared as bits, where NaN is the largest: a row that holds one gives NaN. */
static void round_row(const void *row, int narrow, int64_t columns, Activations to, int64_t at) {
    const float in_place = 0x1.8p23f; /* added to it, a code stands in the lowest byte */
    int64_t records = columns / COLUMNS;
    for (int64_t record = 0; record < records; record++) {
        float values[COLUMNS], largest;
        int32_t bits[COLUMNS], most = 0, halves[2] = {0, 0};
        int8_t *codes = to.codes + at * columns + record * COLUMNS;
        int64_t first = at * columns + record * COLUMNS;
        if (narrow)
            for (int i = 0; i < COLUMNS; i++)
                bits[i] = (int32_t)((uint32_t)((const uint16_t *)row)[first + i] << 16);
        else
            memcpy(bits, (const float *)row + first, sizeof bits);
        memcpy(values, bits, sizeof bits);
        for (int i = 0; i < COLUMNS; i++) {
            int32_t magnitude = bits[i] & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        memcpy(&largest, &most, 4);
        float scale = largest / 127.0f, steps = most ? 127.0f / largest : 0;
        for (int i = 0; i < COLUMNS; i++) values[i] = values[i] * steps + in_place;
        memcpy(bits, values, sizeof bits);
        for (int i = 0; i < COLUMNS; i++) codes[i] = (int8_t)bits[i];
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < COLUMNS / 2; i++) halves[half] += codes[half * COLUMNS / 2 + i];
        to.scales[at * records + record] = scale;
        to.sums[at * records + record] = halves[0] + halves[1];
        to.shares[at * records + record] = scale * (float)(halves[0] + halves[1]);
        to.halves[at * records + record] = halves[0];
    }
}

/* --- instruction sets ---------------------------------------------------------------------- */

/* One tile times 1, 2, 4 or 8 rows, from row `first` on: out [rows][16]. */
typedef void (*Pass)(const Kind *, const uint8_t *tile, int64_t columns, Activations, int64_t first,
                     float *out);

static float from_half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31;
    uint32_t fraction = bits & 1023, wide = sign | (exponent + 112) << 23 | fraction << 13;
    float value;
    if (exponent == 31) wide = sign | 0x7f800000 | fraction << 13;
    memcpy(&value, &wide, 4);
    if (exponent == 0) value = (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    return value;
}

/* The definition, of one output at a time. */
#define NAME(x) plain_##x
#define TARGET
#define LANES 1
#define SIGNED8 0
typedef struct {
    uint8_t of[4];
} PlainBytes;
#define Bytes PlainBytes
#define Sums int32_t
#define Floats float
#define EACH(value) \
    PlainBytes found; \
    for (int i = 0; i < 4; i++) found.of[i] = (uint8_t)(value); \
    return found
static inline PlainBytes plain_loads(const void *p) { EACH(((const uint8_t *)p)[i]); }
static inline PlainBytes plain_every(int n) { EACH(n); }
static inline PlainBytes plain_and(PlainBytes a, PlainBytes b) { EACH(a.of[i] & b.of[i]); }
static inline PlainBytes plain_or(PlainBytes a, PlainBytes b) { EACH(a.of[i] | b.of[i]); }
static inline PlainBytes plain_left(PlainBytes a, int n) { EACH(a.of[i] << n); }
static inline PlainBytes plain_right(PlainBytes a, int n) { EACH(a.of[i] >> n); }
static inline int32_t plain_dots(const PlainBytes *w, const int8_t *x, int count, int bits) {
    int32_t sum = 0;
    for (int i = 0; i < 4 * count; i++) sum += w[i / 4].of[i % 4] * x[i];
    return (void)bits, sum;
}
#define loads plain_loads
#define every plain_every
#define both_of plain_and
#define either plain_or
#define left plain_left
#define right plain_right
#define dots plain_dots
#define less(s, n) ((s) - (n))
#define floats(s) ((float)(s))
#define zeros() 0.0f
#define all(x) (x)
#define times(a, b) ((a) * (b))
#define plus(a, b) ((a) + (b))
#define minus(a) (-(a))
#define store(p, a) (*(p) = (a))
#define scales16(p) from_half(half_at(p))
#define factors(p) ((float)*(p))
#define signed_factors(p) ((float)(int8_t) * (p))
#include "tile.h"
#include "undefine.h"

#ifdef X86
/* Eight outputs: products are added in 16 bits, as many as codes of that size cannot fill; those of
 * 8 bits are made signed, and the sign goes to the activation. */
#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,f16c")))
#define LANES 8
#define SIGNED8 1
#define Bytes __m256i
#define Sums __m256i
#define Floats __m256
#define four(p) _mm256_set1_epi32(*(const int32_t *)(const void *)(p))
static inline __attribute__((always_inline)) TARGET __m256i avx2_dots(const __m256i *w,
                                                                      const int8_t *x, int count,
                                                                      int bits) {
    const int most = bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
    const int run = most < count ? most : count;
    __m256i sum = _mm256_setzero_si256();
    for (int first = 0; first < count; first += run) {
        __m256i pairs = _mm256_setzero_si256();
        for (int at = first; at < first + run; at++) {
            __m256i codes = w[at], signed_by = four(x + 4 * at);
            if (bits == 8) {
                codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
                signed_by = _mm256_sign_epi8(signed_by, codes);
                codes = _mm256_abs_epi8(codes);
            }
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes, signed_by));
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sum;
}
#define loads(p) _mm256_loadu_si256((const void *)(p))
#define every(n) _mm256_set1_epi8(n)
#define both_of _mm256_and_si256
#define either _mm256_or_si256
#define left _mm256_slli_epi16
#define right _mm256_srli_epi16
#define dots avx2_dots
#define less(s, n) _mm256_sub_epi32(s, _mm256_set1_epi32(n))
#define floats _mm256_cvtepi32_ps
#define zeros _mm256_setzero_ps
#define all _mm256_set1_ps
#define times _mm256_mul_ps
#define plus _mm256_add_ps
#define minus(a) _mm256_xor_ps(a, _mm256_set1_ps(-0.0f))
#define store _mm256_storeu_ps
#define scales16(p) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#define factors(p) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(p))))
#define signed_factors(p) \
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(p))))
#include "tile.h"
#include "undefine.h"

#define NAME(x) vnni_##x
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define LANES 16
#define SIGNED8 0
#define Bytes __m512i
#define Sums __m512i
#define Floats __m512
static inline __attribute__((always_inline)) TARGET __m512i vnni_dots(const __m512i *w,
                                                                      const int8_t *x, int count,
                                                                      int bits) {
    __m512i sum = _mm512_setzero_si512();
    for (int at = 0; at < count; at++)
        sum = _mm512_dpbusd_epi32(
            sum, w[at], _mm512_set1_epi32(*(const int32_t *)(const void *)(x + 4 * at)));
    return (void)bits, sum;
}
#define loads(p) _mm512_loadu_si512((const void *)(p))
#define every(n) _mm512_set1_epi8(n)
#define both_of _mm512_and_si512
#define either _mm512_or_si512
#define left _mm512_slli_epi16
#define right _mm512_srli_epi16
#define dots vnni_dots
#define less(s, n) _mm512_sub_epi32(s, _mm512_set1_epi32(n))
#define floats _mm512_cvtepi32_ps
#define zeros _mm512_setzero_ps
#define all _mm512_set1_ps
#define times _mm512_mul_ps
#define plus _mm512_add_ps
#define minus(a) \
    _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32(INT32_MIN)))
#define store _mm512_storeu_ps
#define scales16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p)))
#define factors(p) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(p))))
#define signed_factors(p) \
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(p))))
#include "tile.h"
#include "undefine.h"
#endif

static const Pass (*const SETS[])[4] = {
    plain_passes,
#ifdef X86
    avx2_passes,
    vnni_passes,
#endif
};

/* The best instruction set of this CPU: 0 plain, 1 AVX2, 2 AVX-512 with VNNI. */
int bw_best(void) {
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")) return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return 1;
#endif
    return 0;
}

/* --- threads ------------------------------------------------------------------------------- */

typedef void (*Parallel)(void (*)(void *), void *, unsigned threads, unsigned flags);
static Parallel in_parallel;

/* Take the caller's `GOMP_parallel`; without one a call runs in the thread that asks for it. */
void bw_threads(Parallel parallel) { in_parallel = parallel; }

#define SPINS 2000 /* before a thread that waits lets others run */

void each(Team *team, int64_t count, int64_t chunk, void (*work)(void *, int64_t), void *given) {
    Phase *phase = &team->phases[team->at++];
    if (team->threads == 1) chunk = count;
    while (__atomic_load_n(&phase->next, __ATOMIC_RELAXED) < count) {
        int64_t first = __atomic_fetch_add(&phase->next, chunk, __ATOMIC_RELAXED);
        int64_t end = first + chunk < count ? first + chunk : count;
        for (int64_t at = first; at < end; at++) work(given, at);
        if (first < end) __atomic_fetch_add(&phase->done, end - first, __ATOMIC_RELEASE);
    }
    for (int turn = 0; __atomic_load_n(&phase->done, __ATOMIC_ACQUIRE) < count; turn++)
        turn < SPINS ? pause_a_little() : (void)sched_yield();
}

typedef struct {
    Together work;
    void *given;
    Team team;
} Call;

static void run(void *given) {
    const Call *call = given;
    Team own = call->team;
    call->work(call->given, &own);
}

void together(Together work, void *given, Phase *phases, int64_t threads) {
    Call call = {work, given, {phases, in_parallel ? threads : 1, 0}};
    if (call.team.threads > 1)
        in_parallel(run, &call, (unsigned)threads, 0);
    else
        run(&call);
}

/* --- packing ------------------------------------------------------------------------------- */

/* A block of the file for one output: what `spread` puts into a tile. */
typedef struct {
    uint8_t codes[256];
    uint16_t scale, low;
    uint8_t factors[16], lows[8];
} Block;

static int is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

/* Of each run of bytes the low halves, then the high ones. */
static void nibbles(const uint8_t *from, int run, int count, uint8_t *restrict codes) {
    for (int first = 0; first < count; first += run, from += run, codes += 2 * run)
        for (int at = 0; at < run; at++) {
            codes[at] = from[at] & 15;
            codes[run + at] = from[at] >> 4;
        }
}

static void pairs(const uint8_t *from, int bytes, Block *block) {
    for (int at = 0; at < bytes; at++) {
        block->codes[2 * at] = from[at] & 15;
        block->codes[2 * at + 1] = from[at] >> 4;
    }
    block->scale = half_at(from + bytes);
    block->low = half_at(from + bytes + 2);
}

static void fifth_bits(const uint8_t *from, uint8_t *codes) {
    for (int at = 0; at < 32; at++) codes[at] |= (uint8_t)((from[at / 8] >> at % 8 & 1) << 4);
}

/* What stands above four bits: of each run of 32 codes the next bits of the same 32 bytes. */
static void upper_bits(const uint8_t *from, int bits, uint8_t *restrict codes) {
    for (int shift = 0; shift < 8; shift += bits, codes += 32)
        for (int at = 0; at < 32; at++)
            codes[at] |= (uint8_t)((from[at] >> shift & ((1 << bits) - 1)) << 4);
}

static void six_bit_factors(const uint8_t *from, Block *block) {
    for (int at = 0; at < 4; at++) {
        block->factors[at] = from[at] & 63;
        block->lows[at] = from[at + 4] & 63;
        block->factors[at + 4] = (uint8_t)((from[at + 8] & 15) | from[at] >> 6 << 4);
        block->lows[at + 4] = (uint8_t)(from[at + 8] >> 4 | from[at + 4] >> 6 << 4);
    }
}

static void read_block(int number, const uint8_t *from, Block *block) {
    uint8_t *codes = block->codes;
    block->scale = half_at(from);
    block->low = half_at(from + 2);
    switch (number) {
    case 2: nibbles(from + 2, 16, 16, codes); break;
    case 3: nibbles(from + 4, 16, 16, codes); break;
    case 6: nibbles(from + 6, 16, 16, codes), fifth_bits(from + 2, codes); break;
    case 7: nibbles(from + 8, 16, 16, codes), fifth_bits(from + 4, codes); break;
    case 8:
        for (int at = 0; at < 32; at++) codes[at] = from[2 + at] ^ 128;
        break;
    case 12: nibbles(from + 16, 32, 128, codes), six_bit_factors(from + 4, block); break;
    case 13:
        nibbles(from + 48, 32, 128, codes), upper_bits(from + 16, 1, codes);
        six_bit_factors(from + 4, block);
        break;
    case 14:
        nibbles(from, 64, 128, codes);
        upper_bits(from + 128, 2, codes), upper_bits(from + 160, 2, codes + 128);
        memcpy(block->factors, from + 192, 16);
        block->scale = half_at(from + 208);
        break;
    default: pairs(from, KINDS[number].block - 4, block);
    }
}

/* Put 32 codes of one output where `vectors` reads them: four columns, a quad, at once. */
static void spread(const Kind *kind, const uint8_t *codes, int output, uint8_t *record) {
    uint32_t quads[8], words[8] = {0};
    memcpy(quads, codes, sizeof quads);
    for (int quad = 0; quad < 8; quad++) {
        const uint32_t nibbles = quads[quad] & 0x0f0f0f0f, above = quads[quad] >> 4 & 0x0f0f0f0f;
        if (kind->bits == 8) words[quad] = quads[quad];
        if (kind->bits < 8) words[quad % 4] |= nibbles << quad / 4 * 4;
        if (kind->bits == 5) words[4] |= above << quad;
        if (kind->bits == 6) words[4 + quad / 4] |= above << quad % 4 * 2;
    }
    for (int word = 0; word < kind->bits; word++)
        memcpy(record + word * 64 + output * 4, words + word, 4);
}

typedef struct {
    const uint8_t *rows;
    uint8_t *tiles;
    int64_t outputs, columns;
    int number, damaged;
} Packing;

static void pack_tile(void *given, int64_t tile) {
    Packing *packing = given;
    const Kind *kind = kind_of(packing->number);
    const size_t record = factor_bytes(kind) + code_bytes(kind);
    const int64_t supers = packing->columns / COLUMNS / kind->super, first = tile * TILE;
    const int64_t count = packing->outputs - first < TILE ? packing->outputs - first : TILE;
    const uint8_t *from = packing->rows + first * supers * kind->block;
    uint8_t *tiles = packing->tiles + (size_t)tile * bw_tile_bytes(packing->number, packing->columns);
    if (count < TILE) memset(tiles, 0, bw_tile_bytes(packing->number, packing->columns));
    for (int64_t lane = 0; lane < count; lane++) {
        uint8_t *to = tiles;
        for (int64_t at = 0; at < supers; at++, from += kind->block, to += super_bytes(kind)) {
            Block block;
            read_block(packing->number, from, &block);
            if (!is_finite(block.scale) || (kind->lows && !is_finite(block.low)))
                __atomic_store_n(&packing->damaged, 1, __ATOMIC_RELAXED);
            memcpy(to + lane * 2, &block.scale, 2);
            if (kind->lows) memcpy(to + TILE * 2 + lane * 2, &block.low, 2);
            uint8_t *records = to + head_bytes(kind);
            for (int part = 0; part < kind->super; part++, records += record) {
                for (int f = 0; f < kind->scales; f++)
                    records[f * TILE + lane] = block.factors[part * kind->scales + f];
                if (kind->scales && kind->lows) records[TILE + lane] = block.lows[part];
                spread(kind, block.codes + part * COLUMNS, (int)lane, records + factor_bytes(kind));
            }
        }
    }
}

static void pack_all(void *given, Team *team) {
    const Packing *packing = given;
    each(team, (packing->outputs + TILE - 1) / TILE, 1, pack_tile, given);
}

/* Pack `outputs` rows of blocks, as a file holds them, into tiles; the last is filled with zeros.
 * Returns 0, -1 where the type is not taken, or -2 where a scale is NaN or infinite. */
int bw_pack(int number, const uint8_t *rows, int64_t outputs, int64_t columns, uint8_t *tiles,
            int64_t threads) {
    if (!bw_tile_bytes(number, columns)) return -1;
    Packing packing = {rows, tiles, outputs, columns, number, 0};
    Phase phases[1] = {0};
    together(pack_all, &packing, phases, threads);
    return packing.damaged ? -2 : 0;
}

/* --- a projection -------------------------------------------------------------------------- */

/* narrow: x and out are bfloat16, not float32. set: of `SETS`. */
typedef struct {
    const Projection *projection;
    const void *x;
    void *out;
    Activations rounded;
    int64_t rows;
    int narrow, set;
} Product;

size_t rounded_bytes(int64_t rows, int64_t columns) {
    return (size_t)(rows * (columns / COLUMNS)) * (COLUMNS + 4 * 4);
}

Activations rounded_in(void *memory, int64_t rows, int64_t columns) {
    int64_t records = rows * (columns / COLUMNS);
    Activations found = {.scales = memory};
    found.shares = found.scales + records;
    found.sums = (int32_t *)(found.shares + records);
    found.halves = found.sums + records;
    found.codes = (int8_t *)(found.halves + records);
    return found;
}

static void round_rows(void *given, int64_t row) {
    const Product *product = given;
    round_row(product->x, product->narrow, product->projection->columns, product->rounded, row);
}

static void write_rows(const Product *product, const float *sums, int64_t rows, int64_t first,
                       int64_t at, int64_t count) {
    const float *bias = product->projection->bias;
    for (int64_t row = 0; row < rows; row++) {
        int64_t place = (first + row) * product->projection->outputs + at;
        for (int64_t i = 0; i < count; i++) {
            float value = sums[row * TILE + i] + (bias ? bias[at + i] : 0);
            if (product->narrow)
                ((uint16_t *)product->out)[place + i] = to_bfloat16(value);
            else
                ((float *)product->out)[place + i] = value;
        }
    }
}

static void multiply_tile(void *given, int64_t number) {
    const Product *product = given;
    const Part *part = product->projection->parts;
    int64_t at = 0, columns = product->projection->columns;
    for (; number >= (part->outputs + TILE - 1) / TILE; at += part++->outputs)
        number -= (part->outputs + TILE - 1) / TILE;
    const Kind *kind = kind_of((int)part->kind);
    const uint8_t *tile = part->tiles + bw_tile_bytes((int)part->kind, columns) * (size_t)number;
    const Pass *passes = SETS[product->set][kind->bits == 8 ? 3 : kind->bits - 4];
    int64_t count = part->outputs - number * TILE;
    if (count > TILE) count = TILE;
    float sums[MOST_ROWS * TILE];
    for (int64_t first = 0; first < product->rows;) {
        int power = 3;
        while (1 << power > product->rows - first) power--;
        passes[power](kind, tile, columns, product->rounded, first, sums);
        write_rows(product, sums, 1 << power, first, at + number * TILE, count);
        first += 1 << power;
    }
}

void multiply(Team *team, const Projection *projection, const void *x, int narrow, int64_t rows,
              void *out, Activations rounded, int set) {
    Product product = {projection, x, out, rounded, rows, narrow, set};
    int64_t tiles = 0;
    for (int64_t part = 0; part < projection->num_parts; part++)
        tiles += (projection->parts[part].outputs + TILE - 1) / TILE;
    each(team, rows, 1, round_rows, &product);
    each(team, tiles, tiles / (team->threads * 8) + 1, multiply_tile, &product);
}

#define FEW (1 << 18) /* products of two numbers: waking another thread takes as long */

static void multiply_all(void *given, Team *team) {
    const Product *product = given;
    multiply(team, product->projection, product->x, product->narrow, product->rows, product->out,
             product->rounded, product->set);
}

/* See `multiply`. Returns 0, or -1 where there is no memory for the rounded rows. */
int bw_multiply(const Projection *projection, const void *x, int64_t narrow, int64_t rows,
                void *out, int64_t threads, int64_t set) {
    Phase phases[MULTIPLY_PHASES] = {0};
    void *memory = malloc(rounded_bytes(rows, projection->columns));
    if (!memory) return -1;
    Activations rounded = rounded_in(memory, rows, projection->columns);
    Product product = {projection, x, out, rounded, rows, (int)narrow, (int)set};
    if (rows * projection->columns * projection->outputs < FEW) threads = 1;
    together(multiply_all, &product, phases, threads);
    free(memory);
    return 0;
}
