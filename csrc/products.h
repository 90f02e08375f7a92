/* What the files of the library share: threads, types of 16 bits, products. */
#ifndef BEAMWRIGHT_PRODUCTS_H
#define BEAMWRIGHT_PRODUCTS_H
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#define X86 1
#endif
#define NUM_SETS 3 /* of instructions: none of vectors, AVX2, AVX-512 with VNNI */

static inline uint16_t half_at(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

static inline float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64); /* NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* --- threads -------------------------------------------------------------------------------- */

/* Threads of one call run the same code; `each` shares out what there is to do. A phase is over
 * when its work is done, not when all have come: nobody waits for a thread that the system has
 * stopped, unless it holds a piece of work. */
typedef struct {
    _Alignas(64) int64_t next;
    int64_t done;
} Phase;

typedef struct {
    Phase *phases; /* zeros; each call of `each` takes one */
    int64_t threads, at;
} Team;

/* work(given, 0 ... count - 1), `chunk` at a time; all of it is done when it returns. */
void each(Team *team, int64_t count, int64_t chunk, void (*work)(void *, int64_t), void *given);

/* work(given, team) by `threads` threads. */
typedef void (*Together)(void *given, Team *team);
void together(Together work, void *given, Phase *phases, int64_t threads);

/* --- products ------------------------------------------------------------------------------- */

/* Weights of one type: outputs of a projection that stand in a row. */
typedef struct {
    int64_t kind, outputs;
    const uint8_t *tiles;
} Part;

/* bias: [outputs], or NULL. */
typedef struct {
    const Part *parts;
    int64_t num_parts, columns, outputs;
    const float *bias;
} Projection;

/* Rows in 8 bits. scales, sums: one for each 32 columns; shares: scales times sums; halves: sums of
 * the first 16 columns. */
typedef struct {
    int8_t *codes;
    float *scales, *shares;
    int32_t *sums, *halves;
} Activations;

/* Bytes of so many rows in 8 bits, and the rows in memory of that size. */
size_t rounded_bytes(int64_t rows, int64_t columns);
Activations rounded_in(void *memory, int64_t rows, int64_t columns);

/* out [rows, outputs] = x [rows, columns] times the projection. narrow: both are bfloat16, not
 * float32. rounded: has room for x. */
void multiply(Team *team, const Projection *projection, const void *x, int narrow, int64_t rows,
              void *out, Activations rounded, int set);
#define MULTIPLY_PHASES 2
#endif
