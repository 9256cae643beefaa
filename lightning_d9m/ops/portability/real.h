/* The kernels of one floating-point type, REAL; kernels.c includes them for float and double. */

/* Rows and columns of a product that are computed at a time: they fit the registers. gcc vectorizes
   loops over more than 16 columns; it takes shorter ones apart. */
#if defined(__AVX512F__)
enum { JOIN(TALL_, REAL) = 8, JOIN(WIDE_, REAL) = sizeof(REAL) == 4 ? 32 : 24 };
#else
enum { JOIN(TALL_, REAL) = sizeof(REAL) == 4 ? 4 : 2, JOIN(WIDE_, REAL) = 24 };
#endif
#define TALL JOIN(TALL_, REAL)
#define WIDE JOIN(WIDE_, REAL)
enum { JOIN(MANY_, REAL) = 4096 / sizeof(REAL) / WIDE * WIDE };
#define MANY JOIN(MANY_, REAL) /* columns that are packed at a time */
enum { JOIN(SOME_, REAL) = 120 / TALL * TALL };
#define SOME JOIN(SOME_, REAL) /* rows that are packed at a time */

/* out[i][j] = the sum of left[i][k] * right[k][j], in blocks of DEPTH terms: in a block one product
   after the other is added to 0, with one rounding; then one block after the other is added. An
   element is where its offsets say: left[left_rows[i] + left_terms[k]]. */
struct NAME(product) {
    long rows, columns, terms;
    const REAL *left, *right;
    REAL *out;
    const long *left_rows, *left_terms, *left_batch, *right_terms, *right_columns, *right_batch;
    const long *out_rows, *out_columns, *out_batch;
};

/* Pack `columns` columns of a block, WIDE at a time: terms[WIDE] after terms[WIDE]. */
static void NAME(pack_right)(const REAL *from, const long *terms, long depth, const long *column,
                             long columns, REAL *to) {
    int flat = is_flat(terms, depth);
    for (long j0 = 0; j0 < columns; j0 += WIDE, column += WIDE, to += DEPTH * WIDE) {
        int width = columns - j0 < WIDE ? (int)(columns - j0) : WIDE, run = WIDE;
        for (int j = 1; j < width; j++)
            while (run > 1 && j % run && column[j] != column[j - 1] + 1)
                run = run == WIDE ? 8 : run / 2;
        if (width < WIDE) {
            for (long k = 0; k < depth; k++)
                for (int j = 0; j < WIDE; j++)
                    to[k * WIDE + j] = j < width ? from[terms[k] + column[j]] : 0;
        } else if (flat && run < 8) {
            for (int j = 0; j < WIDE; j++)
                for (long k = 0; k < depth; k++) to[k * WIDE + j] = from[terms[0] + column[j] + k];
        } else {
#define COPY(run)                                                                                  \
    for (long k = 0; k < depth; k++)                                                               \
        for (int j = 0; j < WIDE; j += run)                                                        \
            memcpy(to + k * WIDE + j, from + terms[k] + column[j], sizeof(REAL) * run)
            if (run == WIDE) COPY(WIDE); /* known lengths become moves of vectors */
            else if (run >= 8) COPY(8);
            else if (run >= 4) COPY(4);
            else COPY(1);
#undef COPY
        }
    }
}

/* Pack rows of a block, TALL at a time. */
static void NAME(pack_left)(const REAL *from, const long *terms, long depth, const long *row,
                            long rows, REAL *to) {
    int flat = is_flat(terms, depth);
    for (long i0 = 0; i0 < rows; i0 += TALL, row += TALL, to += DEPTH * TALL) {
        int height = rows - i0 < TALL ? (int)(rows - i0) : TALL;
        if (height < TALL) {
            for (long k = 0; k < depth; k++)
                for (int i = 0; i < height; i++) to[k * TALL + i] = from[terms[k] + row[i]];
        } else if (is_flat(row, TALL)) {
            for (long k = 0; k < depth; k++, to += TALL)
                memcpy(to, from + terms[k] + row[0], sizeof(REAL) * TALL);
            to -= depth * TALL;
        } else { /* Pointers that the compiler keeps in registers: looking up each row takes twice the time. */
            const REAL *start[TALL];
            for (int i = 0; i < TALL; i++) start[i] = from + row[i];
            if (flat)
                for (long k = 0; k < depth; k++)
                    for (int i = 0; i < TALL; i++) to[k * TALL + i] = start[i][terms[0] + k];
            else
                for (long k = 0; k < depth; k++)
                    for (int i = 0; i < TALL; i++) to[k * TALL + i] = start[i][terms[k]];
        }
    }
}

ALWAYS void NAME(tile)(
    int height, const REAL *restrict left, const REAL *restrict right, long depth,
    REAL *out, const long *row, const long *column, int width, int first) {
    REAL total[TALL][WIDE];
    for (int i = 0; i < height; i++)
        for (int j = 0; j < WIDE; j++) total[i][j] = 0;
    /* Results are read from far after the loop: fetching them during it took 9 % off a product. */
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j += 64 / (int)sizeof(REAL))
            __builtin_prefetch(out + row[i] + column[j], 1);
    for (long k = 0; k < depth; k++, left += TALL, right += WIDE) {
#pragma GCC unroll 8
        for (int i = 0; i < height; i++)
            for (int j = 0; j < WIDE; j++)
                total[i][j] = NAME(add_product)(left[i], right[j], total[i][j]);
    }
    int flat = width == WIDE && is_flat(column, WIDE);
    for (int i = 0; i < height; i++) {
        REAL *to = out + row[i];
        if (flat && first) memcpy(to + column[0], total[i], sizeof total[i]);
        else if (flat)
            for (int j = 0; j < WIDE; j++) to[column[0] + j] += total[i][j];
        else
            for (int j = 0; j < width; j++)
                to[column[j]] = first ? total[i][j] : to[column[j]] + total[i][j];
    }
}

/* One result is a column of a matrix of the batch; who has its first column has a tile of WIDE. */
void NAME(product)(const void *given, long begin, long end) {
    const struct NAME(product) *g = given;
    long tiles = (g->columns + WIDE - 1) / WIDE;
    begin = begin / g->columns * tiles + (begin % g->columns + WIDE - 1) / WIDE;
    end = end / g->columns * tiles + (end % g->columns + WIDE - 1) / WIDE;
    REAL *left = get_scratch(sizeof(REAL) * DEPTH * (SOME + MANY)), *right = left + DEPTH * SOME;
    while (begin < end) {
        long batch = begin / tiles, j0 = begin % tiles * WIDE, last = end - batch * tiles;
        long stop = last < tiles ? last * WIDE : g->columns;
        if (stop > j0 + MANY) stop = j0 + MANY;
        REAL *out = g->out + g->out_batch[batch];
        for (long k = 0; k < g->terms; k += DEPTH) {
            long depth = g->terms - k < DEPTH ? g->terms - k : DEPTH;
            NAME(pack_right)(g->right + g->right_batch[batch], g->right_terms + k, depth,
                             g->right_columns + j0, stop - j0, right);
            for (long i0 = 0; i0 < g->rows; i0 += SOME) {
                long rows = g->rows - i0 < SOME ? g->rows - i0 : SOME;
                NAME(pack_left)(g->left + g->left_batch[batch], g->left_terms + k, depth,
                                g->left_rows + i0, rows, left);
                for (long j = j0; j < stop; j += WIDE)
                    for (long i = 0; i < rows; i += TALL) {
                        int width = stop - j < WIDE ? (int)(stop - j) : WIDE;
#define COMPUTE(height)                                                                            \
    NAME(tile)((height) < TALL ? (height) : TALL, left + i * DEPTH, right + (j - j0) * DEPTH,      \
               depth, out, g->out_rows + i0 + i, g->out_columns + j, width, k == 0)
                        switch (rows - i) {
                        case 1: COMPUTE(1); break;
                        case 2: COMPUTE(2); break;
                        case 3: COMPUTE(3); break;
                        case 4: COMPUTE(4); break;
                        case 5: COMPUTE(5); break;
                        case 6: COMPUTE(6); break;
                        case 7: COMPUTE(7); break;
                        default: COMPUTE(TALL);
                        }
#undef COMPUTE
                    }
            }
        }
        begin = batch * tiles + (stop + WIDE - 1) / WIDE;
    }
}

/* Term i is added to lane i % LANES, which begins with 0; then the upper half of the lanes is added
   to the lower half, until one is left. At most BLOCK terms. */
static inline REAL NAME(add_lanes)(const REAL *x, long count) {
    REAL lane[LANES];
    long i = 0;
    for (int j = 0; j < LANES; j++) lane[j] = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += x[i + j];
    for (int j = 0; i + j < count; j++) lane[j] += x[i + j];
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
}

/* Blocks of BLOCK terms are added in order. */
static REAL NAME(add_row)(const REAL *x, long count) {
    REAL total = 0;
    for (long i = 0; i < count; i += BLOCK) {
        REAL sum = NAME(add_lanes)(x + i, count - i < BLOCK ? count - i : BLOCK);
        total = i ? total + sum : sum;
    }
    return total;
}

/* The greatest number; one of 0.0 and -0.0, and of a row with a NaN any. */
static REAL NAME(find_greatest)(const REAL *x, long count) {
    REAL lane[LANES];
    long i = 0;
    for (int j = 0; j < LANES; j++) lane[j] = x[0];
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (; i < count; i++) lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    for (int j = 1; j < LANES; j++) lane[0] = lane[j] > lane[0] ? lane[j] : lane[0];
    return lane[0];
}

/* Kernels of rows and elements: written from formulas.py. */
#include "formulas.h"

/* Sums over `count` * `inner` terms: result r adds x[r * step + i * outer_step + j * inner_step],
   in order of i, then of j. */
struct NAME(row_sums) {
    long step, count, outer_step, inner, inner_step;
    const REAL *x;
    REAL *out;
};

void NAME(row_sums)(const void *given, long begin, long end) {
    const struct NAME(row_sums) *g = given;
    REAL block[BLOCK];
    for (long r = begin; r < end; r++) {
        REAL total = 0;
        long terms = g->count * g->inner, i = 0, j = 0;
        for (long done = 0; done < terms; done += BLOCK) {
            long size = terms - done < BLOCK ? terms - done : BLOCK, filled = 0;
            const REAL *from = g->x + r * g->step + i * g->outer_step + j;
            if (g->inner_step == 1 && j + size <= g->inner) {
                filled = size, j += size;
            }
            while (filled < size) {
                const REAL *x = g->x + r * g->step + i * g->outer_step + j * g->inner_step;
                long run = size - filled < g->inner - j ? size - filled : g->inner - j;
                for (long t = 0; t < run; t++) block[filled + t] = x[t * g->inner_step];
                filled += run, j += run, from = block;
                if (j == g->inner) j = 0, i++;
            }
            if (j == g->inner) j = 0, i++;
            REAL sum = NAME(add_lanes)(from, size);
            total = done ? total + sum : sum;
        }
        g->out[r] = total;
    }
}

/* The same sums down the columns of matrices [count, columns]; one item is COLUMNS of them. */
enum { JOIN(COLUMNS_, REAL) = 64 };
#define COLUMNS JOIN(COLUMNS_, REAL)

struct NAME(column_sums) {
    long count, columns, matrix_step, row_step;
    const REAL *x;
    REAL *out;
};

void NAME(column_sums)(const void *given, long begin, long end) {
    const struct NAME(column_sums) *g = given;
    long items = (g->columns + COLUMNS - 1) / COLUMNS;
    REAL lane[LANES][COLUMNS];
    for (long item = begin; item < end; item++) {
        long j0 = item % items * COLUMNS, matrix = item / items;
        long width = g->columns - j0 < COLUMNS ? g->columns - j0 : COLUMNS;
        REAL *out = g->out + matrix * g->columns + j0;
        for (long done = 0; done < g->count; done += BLOCK) {
            long size = g->count - done < BLOCK ? g->count - done : BLOCK;
            memset(lane, 0, sizeof lane);
            for (long i = 0; i < size; i++) {
                const REAL *x = g->x + matrix * g->matrix_step + (done + i) * g->row_step + j0;
                REAL *to = lane[i % LANES];
                if (width == COLUMNS) /* gcc vectorizes a loop of known length better */
                    for (long j = 0; j < COLUMNS; j++) to[j] += x[j];
                else
                    for (long j = 0; j < width; j++) to[j] += x[j];
            }
            for (int half = LANES / 2; half; half /= 2)
                for (int i = 0; i < half; i++)
                    for (long j = 0; j < COLUMNS; j++) lane[i][j] += lane[i + half][j];
            for (long j = 0; j < width; j++) out[j] = done ? out[j] + lane[0][j] : lane[0][j];
        }
    }
}

/* Exact sums at places, of values times their weights and of what is there; patches/exact_sums.py
   describes the layout. `sums` has space for the pieces of `slots` sums, filled with -0.0, and then for
   their exponents. A result is a place of a group of a batch; each thread reads all keys. */
struct NAME(place_sums) {
    long pieces, size, taps, batch, group, rows, inner, places, tap_step, batch_step, row_step, step;
    const long *keys;
    const REAL *x, *weights;
    REAL *out;
    double *sums;
};

/* In phase 0, raise the exponents of the sums; in phase 1, add the pieces of the terms. */
ALWAYS void NAME(add_terms)(const struct NAME(place_sums) *g, long begin, long end, int phase) {
    const long slots = g->batch * g->group * g->places * g->inner;
    int64_t *tops = (int64_t *)(g->sums + g->pieces * slots);
    for (long tap = 0; tap < g->taps; tap++)
        for (long plane = 0; plane < g->batch * g->group; plane++)
            for (long row = 0; row < g->rows; row++) {
                const long at = tap * g->tap_step + plane / g->group * g->batch_step + row * g->row_step;
                const REAL *x = g->x + (plane * g->rows + row) * g->inner;
                for (long i = 0; i < g->inner; i++) {
                    long key = g->keys[at + i * g->step];
                    key += key < 0 ? g->places : 0;
                    key += plane * g->places;
                    if (key < begin || key >= end || key >= (plane + 1) * g->places) continue;
                    long s = key * g->inner + i;
                    double term = g->weights ? x[i] * g->weights[at + i * g->step] : x[i];
                    int64_t exponent = read_exponent(term);
                    if (phase)
                        add_pieces(g->sums + s, term, tops[s], g->pieces, g->size, slots);
                    else if (exponent > tops[s]) tops[s] = exponent;
                }
            }
}

void NAME(place_sums)(const void *given, long begin, long end) {
    const struct NAME(place_sums) *g = given;
    const long slots = g->batch * g->group * g->places * g->inner;
    const long first_slot = begin * g->inner, last_slot = end * g->inner;
    int64_t *tops = (int64_t *)(g->sums + g->pieces * slots);
    for (long s = first_slot; s < last_slot; s++) tops[s] = read_exponent(g->out[s]);
    NAME(add_terms)(g, begin, end, 0);
    for (long s = first_slot; s < last_slot; s++)
        add_pieces(g->sums + s, g->out[s], tops[s], g->pieces, g->size, slots);
    NAME(add_terms)(g, begin, end, 1);
    for (long s = first_slot; s < last_slot; s++) {
        const double *sum = g->sums + g->pieces * slots + s;
        double first = *(sum -= slots), total = first, tail = 0;
        for (long n = 1; n < g->pieces; n++) {
            double more = first = *(sum -= slots), all = more + total, given = all - more;
            tail = add_to_odd((more - (all - given)) + (total - given), tail);
            total = all;
        }
        if (total != 0 || tail != 0)
            total = sizeof(REAL) == 4 ? add_to_odd(total, tail) : total + tail;
        if (sizeof(REAL) == 8 && tops[s] >= 1923) total *= 0x1p64;
        if (g->out[s] == g->out[s]) /* a NaN keeps its bits */
            g->out[s] = (REAL)(read_exponent(first) < 0x7FF ? total : first == first ? first : NAN);
    }
}

/* Uniform numbers in [0, 1) of 24 or 53 bits. Of 2 * COUNTERS numbers of 53 bits, number i takes
   the words i and i + 2 * COUNTERS of a block. One item is a block. */
struct NAME(draw) {
    long key, count;
    REAL *out;
};

void NAME(draw)(const void *given, long begin, long end) {
    const struct NAME(draw) *g = given;
    enum { EACH = WORDS * 4 / sizeof(REAL) };
    for (long block = begin; block < end; block++) {
        uint32_t words[WORDS];
        REAL drawn[WORDS];
        philox((uint64_t)g->key, (uint64_t)block * COUNTERS, words);
        for (int i = 0; i < EACH; i++)
            drawn[i] = sizeof(REAL) == 4 ? (REAL)(words[i] >> 8) * (REAL)0x1p-24
                                         : (REAL)(((double)(words[i] >> 5) * 0x1p+26 +
                                                   (double)(words[(i + EACH) % WORDS] >> 6)) *
                                                  0x1p-53);
        long rest = g->count - block * EACH;
        memcpy(g->out + block * EACH, drawn, sizeof(REAL) * (rest < EACH ? rest : EACH));
    }
}

#undef TALL
#undef WIDE
#undef MANY
#undef SOME
#undef COLUMNS
