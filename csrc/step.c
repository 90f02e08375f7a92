/* A decoder's step: layers of one token for each row, with nothing between their products.
 *
 * Everything is in float32 but what attention reads and gives, which may be bfloat16. What a row
 * gets depends on its own tokens alone: scores, weights and sums follow the path, however it is cut
 * into segments, and wherever those are. As in products, every instruction set runs the same
 * operations.
 */
#include "products.h"

#include <math.h>
#include <stdlib.h>

enum { SILU, GELU_TANH, RELU }; /* activations */

typedef struct {
    void (*add_norm)(float *x, float *delta, const float *after, const float *weight, float eps,
                     int64_t width, float *normed);
    void (*turn)(float *head, const float *cos, const float *sin, const float *weight, float eps,
                 int64_t width);
    void (*gate)(const float *inner, int64_t width, int kind, float *out);
    void (*score)(int64_t queries, int narrow, const float *const *query, const void *keys,
                  int64_t tokens, int64_t width, float *const *scores, int64_t first);
    void (*mix)(int64_t queries, int narrow, float *const *weights, int64_t first,
                const void *values, int64_t tokens, int64_t width, float *const *out);
    float (*weigh)(float *scores, int64_t first, int64_t end, float cap, const float *sink);
} Rows;

#define NAME(x) plain_##x
#define TARGET
#define LANES 1
#define Floats float
#define load(p) (*(p))
#define load_narrow(p) from_bfloat16(*(p))
#define store(p, a) (*(p) = (a))
#define all(x) (x)
#define plus(a, b) ((a) + (b))
#define minus(a, b) ((a) - (b))
#define times(a, b) ((a) * (b))
#define over(a, b) ((a) / (b))
#define larger plain_larger
#define smaller plain_smaller
#define to_power plain_to_power
#define sum_of plain_sum
/* The second where either is NaN, as the processor's. */
static inline float plain_larger(float a, float b) { return a > b ? a : b; }
static inline float plain_smaller(float a, float b) { return a < b ? a : b; }
static inline float plain_to_power(float value, float whole) {
    uint32_t bits, power;
    memcpy(&bits, &value, 4);
    memcpy(&power, &whole, 4);
    bits += power << 23;
    memcpy(&value, &bits, 4);
    return value;
}
static inline float plain_sum(const float *numbers) {
    float sums[16];
    memcpy(sums, numbers, sizeof sums);
    for (int half = 8; half; half /= 2)
        for (int at = 0; at < half; at++) sums[at] += sums[at + half];
    return sums[0];
}
#include "rows.h"
#include "undefine.h"

#ifdef X86
#include <immintrin.h>

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2")))
#define LANES 8
#define Floats __m256
#define load _mm256_loadu_ps
#define load_narrow(p) \
    _mm256_castsi256_ps(_mm256_slli_epi32( \
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(p))), 16))
#define store _mm256_storeu_ps
#define all _mm256_set1_ps
#define plus _mm256_add_ps
#define minus _mm256_sub_ps
#define times _mm256_mul_ps
#define over _mm256_div_ps
#define larger _mm256_max_ps
#define smaller _mm256_min_ps
#define to_power(a, n) \
    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), \
                                         _mm256_slli_epi32(_mm256_castps_si256(n), 23)))
#define sum_of(v) avx2_sum(_mm256_add_ps((v)[0], (v)[1]))
static inline __attribute__((always_inline, target("avx2"))) float avx2_sum(__m256 eight) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#include "rows.h"
#include "undefine.h"

#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx512f,avx2")))
#define LANES 16
#define Floats __m512
#define load _mm512_loadu_ps
#define load_narrow(p) \
    _mm512_castsi512_ps(_mm512_slli_epi32( \
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(p))), 16))
#define store _mm512_storeu_ps
#define all _mm512_set1_ps
#define plus _mm512_add_ps
#define minus _mm512_sub_ps
#define times _mm512_mul_ps
#define over _mm512_div_ps
#define larger _mm512_max_ps
#define smaller _mm512_min_ps
#define to_power(a, n) \
    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), \
                                         _mm512_slli_epi32(_mm512_castps_si512(n), 23)))
#define sum_of(v) \
    avx2_sum(_mm256_add_ps(_mm512_castps512_ps256((v)[0]), \
                           _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((v)[0]), 1))))
#include "rows.h"
#include "undefine.h"
#endif

static const Rows *const ROWS[NUM_SETS] = {
    &plain_rows,
#ifdef X86
    &avx2_rows,
    &avx512_rows,
#endif
};

/* --- what a step is given --------------------------------------------------------------------- */

/* Keys of a layer [entry, head, token, width], and values `values` elements behind them. layer,
 * head: elements from one to the next. */
typedef struct {
    const void *keys;
    int64_t layer, values, head;
} Source;

/* Tokens of a row's path: an entry of a source, `at` elements behind its first. */
typedef struct {
    int64_t source, at, tokens;
} Place;

/* What rows attend to in layers that are alike: places [rows, most], those without tokens last,
 * then the row's own tokens.
 *
 * own: [row, head, token, width]; own_row: elements from a row to the next. ends: [rows] the place
 * of the current token. own_rows: [rows], or NULL where row i is the i-th.
 * slots: [written, 2 * kv_heads] where a token's keys and values go in `own`, in heads from the
 * layer's first one; written: the rows of those tokens, or NULL where they are the first.
 * window: tokens that a token sees, itself included; 0: all. softcap: of scores; 0: none.
 * sinks: [heads], or NULL. narrow: keys and values are bfloat16.
 */
typedef struct {
    const Source *sources;
    const Place *places;
    int64_t most;
    Source own;
    int64_t own_row;
    const int64_t *ends, *own_rows, *slots, *written;
    int64_t num_written, window;
    float softcap;
    const float *sinks;
    int64_t narrow;
} Attention;

/* norm: before the MLP. follow: before what comes next. after_*: of what a half adds, or NULL, as
 * the norms of queries and keys. cos, sin: [context, head_dim], or NULL. group, place: which
 * attention, and which of its layers. */
typedef struct {
    Projection qkv, out, gate_up, down;
    const float *norm, *follow, *after_attention, *after_mlp, *query_norm, *key_norm, *cos, *sin;
    int64_t group, place;
} Layer;

typedef struct {
    const Layer *layers;
    const float *first_norm;
    int64_t hidden, heads, kv_heads, head_dim, inner, activation;
    float eps;
} Model;

/* Stages [begin, end): three to a layer, of which are: queries, keys and values; attention; the rest.
 * x, normed: [rows, hidden]. turned: [rows, heads + 2 * kv_heads, head_dim]. context: [rows, heads,
 * head_dim]. positions: [rows]. attentions: by group. */
typedef struct {
    int64_t begin, end, rows;
    float *x, *normed, *turned, *context;
    const int64_t *positions;
    const Attention *const *attentions;
    int64_t threads, set;
} Pass;

/* A pass, with its memory: rounded rows, what a half adds [rows, hidden], and of an MLP's rows
 * gate and up, and what is opened. */
typedef struct {
    const Model *model;
    const Pass *pass;
    const Layer *layer;
    const Attention *attention;
    const Rows *by;
    void *rounded;
    float *delta, *inner, *opened;
    const float *norm, *after;
    int64_t first, queries;
    int *failed;
    int adds;
} Step;

/* --- attention -------------------------------------------------------------------------------- */

#define QUERIES 8 /* of one piece of work */

static void write_token(void *given, int64_t number) {
    const Step *step = given;
    const Model *model = step->model;
    const Attention *seen = step->attention;
    const int64_t width = model->head_dim, heads = 2 * model->kv_heads;
    const int64_t row = seen->written ? seen->written[number] : number;
    const float *from = step->pass->turned + (row * (model->heads + heads) + model->heads) * width;
    const int64_t at = step->layer->place * seen->own.layer;
    for (int64_t head = 0; head < heads; head++, from += width) {
        const int64_t to = at + seen->slots[number * heads + head] * width;
        if (!seen->narrow) {
            memcpy((float *)seen->own.keys + to, from, (size_t)width * 4);
            continue;
        }
        for (int64_t i = 0; i < width; i++)
            ((uint16_t *)seen->own.keys)[to + i] = to_bfloat16(from[i]);
    }
}

/* Queries of one KV head, with what they have so far. lead: in front of a row's scores, which end
 * at a multiple of 16: what is out of sight does not shift the others. */
typedef struct {
    const Step *step;
    int64_t head, num_rows, first_row;
    int64_t begin[QUERIES + 1];
    int64_t total[QUERIES], lead[QUERIES], hidden[QUERIES];
    const float *query[QUERIES];
    float *scores[QUERIES], *out[QUERIES];
} Asked;

/* Queries and contexts are rounded as keys are, as where attention is called between two stages. */
static float kept(float value, int64_t narrow) {
    return narrow ? from_bfloat16(to_bfloat16(value)) : value;
}

static int64_t own_tokens(const Attention *seen, int64_t row) { return seen->ends[row] + 1; }

static Place place_of(const Attention *seen, int64_t row, int64_t number) {
    if (number < seen->most) return seen->places[row * seen->most + number];
    int64_t own = seen->own_rows ? seen->own_rows[row] : row;
    return (Place){-1, own * seen->own_row, own_tokens(seen, row)};
}

/* Score all tokens, or mix their values; rows that read the same place do so together. */
static void walk(Asked *asked, int mixes) {
    const Step *step = asked->step;
    const Attention *seen = step->attention;
    const int64_t width = step->model->head_dim;
    const int narrow = (int)seen->narrow;
    int64_t passed[QUERIES] = {0};
    for (int64_t number = 0; number <= seen->most; number++) {
        for (int64_t row = 0, end; row < asked->num_rows; row = end) {
            const Place place = place_of(seen, asked->first_row + row, number);
            for (end = row + 1; end < asked->num_rows; end++) {
                const Place other = place_of(seen, asked->first_row + end, number);
                if (memcmp(&other, &place, sizeof place) || passed[end] != passed[row]) break;
            }
            if (!place.tokens) continue;
            const Source *source = place.source < 0 ? &seen->own : seen->sources + place.source;
            int64_t at = step->layer->place * source->layer + place.at;
            at += asked->head * source->head + (mixes ? source->values : 0);
            const void *from = (const char *)source->keys + at * (narrow ? 2 : 4);
            const int64_t first = asked->begin[row], count = asked->begin[end] - first;
            float *const *scores = asked->scores + first;
            if (mixes)
                step->by->mix(count, narrow, scores, passed[row], from, place.tokens, width,
                              asked->out + first);
            else
                step->by->score(count, narrow, asked->query + first, from, place.tokens, width,
                                scores, passed[row]);
            for (int64_t each_row = row; each_row < end; each_row++)
                passed[each_row] += place.tokens;
        }
    }
}

static void attend(void *given, int64_t number) {
    const Step *step = given;
    const Model *model = step->model;
    const Attention *seen = step->attention;
    const int64_t width = model->head_dim, group = model->heads / model->kv_heads;
    const int64_t all_queries = step->pass->rows * group;
    const int64_t pieces = (all_queries + step->queries - 1) / step->queries;
    const int64_t first = number % pieces * step->queries;
    const int64_t end = first + step->queries < all_queries ? first + step->queries : all_queries;
    const int64_t count = end - first;
    Asked asked = {.step = step, .head = number / pieces, .first_row = first / group};
    int64_t room = 0;
    asked.num_rows = (end - 1) / group - asked.first_row + 1;
    for (int64_t row = 0; row < asked.num_rows; row++) {
        const int64_t at = asked.first_row + row, begin = at * group - first;
        int64_t total = own_tokens(seen, at);
        for (int64_t place = 0; place < seen->most; place++)
            total += seen->places[at * seen->most + place].tokens;
        asked.total[row] = total;
        asked.begin[row] = begin > 0 ? begin : 0;
        asked.lead[row] = -total & 15;
        asked.hidden[row] = seen->window && total > seen->window ? total - seen->window : 0;
        if (asked.lead[row] + total > room) room = asked.lead[row] + total;
    }
    asked.begin[asked.num_rows] = count;
    float *memory = malloc((size_t)(count * (room + width)) * 4);
    if (!memory) {
        __atomic_store_n(step->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    const float scale = 1.0f / sqrtf((float)width);
    for (int64_t row = 0; row < asked.num_rows; row++)
        for (int64_t q = asked.begin[row]; q < asked.begin[row + 1]; q++) {
            const int64_t at = asked.first_row + row, head = asked.head * group + (first + q) % group;
            const float *from =
                step->pass->turned + (at * (model->heads + 2 * model->kv_heads) + head) * width;
            float *query = memory + count * room + q * width;
            for (int64_t i = 0; i < width; i++) query[i] = kept(from[i], seen->narrow) * scale;
            asked.query[q] = query;
            asked.scores[q] = memory + q * room + asked.lead[row];
            asked.out[q] = step->pass->context + (at * model->heads + head) * width;
            memset(asked.out[q], 0, (size_t)width * 4);
        }
    walk(&asked, 0);
    float sums[QUERIES];
    for (int64_t row = 0; row < asked.num_rows; row++)
        for (int64_t q = asked.begin[row]; q < asked.begin[row + 1]; q++) {
            const int64_t head = asked.head * group + (first + q) % group, lead = asked.lead[row];
            sums[q] = step->by->weigh(asked.scores[q] - lead, lead + asked.hidden[row],
                                      lead + asked.total[row], seen->softcap,
                                      seen->sinks ? seen->sinks + head : NULL);
        }
    walk(&asked, 1);
    for (int64_t q = 0; q < count; q++)
        for (int64_t i = 0; i < width; i++)
            asked.out[q][i] = kept(asked.out[q][i] / sums[q], seen->narrow);
    free(memory);
}

/* --- layers ----------------------------------------------------------------------------------- */

static void normalise(void *given, int64_t row) {
    const Step *step = given;
    const int64_t width = step->model->hidden, at = (step->first + row) * width;
    step->by->add_norm(step->pass->x + at, step->adds ? step->delta + at : NULL, step->after,
                       step->norm, step->model->eps, width, step->pass->normed + at);
}

static void turn_row(void *given, int64_t row) {
    const Step *step = given;
    const Model *model = step->model;
    const Layer *layer = step->layer;
    const int64_t width = model->head_dim, angle = step->pass->positions[row] * width;
    float *head = step->pass->turned + row * (model->heads + 2 * model->kv_heads) * width;
    for (int64_t number = 0; number < model->heads + model->kv_heads; number++, head += width)
        step->by->turn(head, layer->cos ? layer->cos + angle : NULL,
                       layer->sin ? layer->sin + angle : NULL,
                       number < model->heads ? layer->query_norm : layer->key_norm, model->eps,
                       width);
}

static void open_row(void *given, int64_t row) {
    const Step *step = given;
    const int64_t width = step->model->inner;
    step->by->gate(step->inner + 2 * row * width, width, (int)step->model->activation,
                   step->opened + row * width);
}

static void product(Team *team, const Step *step, const Projection *projection, const float *x,
                    int64_t rows, float *out) {
    multiply(team, projection, x, 0, rows, out, rounded_in(step->rounded, rows, projection->columns),
             (int)step->pass->set);
}

#define MLP_ROWS 512 /* at a time: inside, a row is some ten times as wide */

static void rest_of(Team *team, Step step) {
    const Layer *layer = step.layer;
    const Pass *pass = step.pass;
    const int64_t hidden = step.model->hidden;
    product(team, &step, &layer->out, pass->context, pass->rows, step.delta);
    Step norm = step;
    norm.adds = 1, norm.norm = layer->norm, norm.after = layer->after_attention;
    each(team, pass->rows, 1, normalise, &norm);
    for (int64_t first = 0; first < pass->rows; first += MLP_ROWS) {
        const int64_t rows = pass->rows - first < MLP_ROWS ? pass->rows - first : MLP_ROWS;
        product(team, &step, &layer->gate_up, pass->normed + first * hidden, rows, step.inner);
        each(team, rows, 1, open_row, &step);
        product(team, &step, &layer->down, step.opened, rows, step.delta + first * hidden);
    }
    Step last = step;
    last.adds = 1, last.norm = layer->follow, last.after = layer->after_mlp;
    each(team, pass->rows, 1, normalise, &last);
}

static void run_pass(void *given, Team *team) {
    Step step = *(const Step *)given;
    const Model *model = step.model;
    const Pass *pass = step.pass;
    if (pass->begin == 0) {
        step.norm = model->first_norm;
        each(team, pass->rows, 1, normalise, &step);
    }
    for (int64_t stage = pass->begin; stage < pass->end; stage++) {
        Step now = step;
        now.layer = model->layers + stage / 3;
        if (stage % 3 == 0) {
            product(team, &now, &now.layer->qkv, pass->normed, pass->rows, pass->turned);
            each(team, pass->rows, 1, turn_row, &now);
        } else if (stage % 3 == 1) {
            now.attention = pass->attentions[now.layer->group];
            const int64_t queries = pass->rows * (model->heads / model->kv_heads);
            now.queries = queries * model->kv_heads / (team->threads * 2);
            if (now.queries < 4) now.queries = queries < 4 ? queries : 4;
            if (now.queries > QUERIES) now.queries = QUERIES;
            const int64_t pieces = (queries + now.queries - 1) / now.queries * model->kv_heads;
            each(team, now.attention->num_written, 1, write_token, &now);
            each(team, pieces, 1, attend, &now);
        } else {
            rest_of(team, now);
        }
    }
}

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

/* Run a pass. Returns 0, or -1 where there is no memory for it. */
int bw_run(const Model *model, const Pass *pass) {
    const int64_t rows = pass->rows, chunk = rows < MLP_ROWS ? rows : MLP_ROWS;
    const int64_t wide = model->heads * model->head_dim;
    const int64_t widest = largest(largest(model->hidden, wide), model->inner);
    const size_t rounded = (rounded_bytes(rows, widest) + 63) / 64 * 64;
    const size_t floats = (size_t)(rows * model->hidden + chunk * 3 * model->inner);
    const int64_t chunks = (rows + MLP_ROWS - 1) / MLP_ROWS, stages = pass->end - pass->begin;
    const size_t phases = (size_t)(1 + stages * (6 + chunks * 5));
    Phase *memory = aligned_alloc(64, (phases * sizeof(Phase) + rounded + floats * 4 + 63) / 64 * 64);
    if (!memory) return -1;
    memset(memory, 0, phases * sizeof(Phase));
    int failed = 0;
    Step step = {.model = model, .pass = pass, .by = ROWS[pass->set], .failed = &failed};
    step.rounded = memory + phases;
    step.delta = (float *)((char *)step.rounded + rounded);
    step.inner = step.delta + rows * model->hidden;
    step.opened = step.inner + 2 * chunk * model->inner;
    together(run_pass, &step, memory, pass->threads);
    free(memory);
    return -failed;
}
