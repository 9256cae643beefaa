/* Kernels that compute each result by one sequence of IEEE operations, on every machine.

   Compile without contraction (-ffp-contract=off): then a compiler may compute several results at
   once, but may not change the operations of one. formulas.py and definitions.py say each
   sequence. Threads share out whole results. A kernel takes a struct whose members all have 8
   bytes, and computes the results from `begin` to `end`. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static inline int64_t read_bits(double x) {
    int64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

static inline double from_bits(int64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

#define ALWAYS static inline __attribute__((always_inline))

#include "functions.h" /* written from formulas.py */

typedef void kernel(const void *given, long begin, long end);

enum { MOST = 256 };

/* Memory for one kernel at a time: of this thread, and of those that it starts, which take it from
   this one, so that it stays between calls. */
struct memory {
    void *start;
    size_t size;
};
static __thread struct memory kept[MOST], *given_memory;

static void *get_scratch(size_t size) {
    struct memory *own = given_memory ? given_memory : kept;
    if (own->size < size) {
        free(own->start);
        *own = (struct memory){aligned_alloc(64, (size + 63) / 64 * 64), size};
        if (!own->start) abort();
    }
    return own->start;
}

struct part {
    kernel *kernel;
    const void *given;
    long begin, end;
    struct memory *memory;
};

static void *run_part(void *given) {
    struct part *part = given;
    given_memory = part->memory;
    part->kernel(part->given, part->begin, part->end);
    return NULL;
}

/* Share the results out among threads, which take their floating-point state from this one. */
void d9m_share(kernel *kernel, const void *given, long count, long threads) {
    pthread_t started[MOST];
    struct part parts[MOST];
    threads = threads < 1 ? 1 : threads > MOST ? MOST : threads;
    threads = threads > count ? (count ? count : 1) : threads;
    long running = 0;
    for (; running < threads - 1; running++) {
        long begin = count * running / threads, end = count * (running + 1) / threads;
        parts[running] = (struct part){kernel, given, begin, end, &kept[running + 1]};
        if (pthread_create(&started[running], NULL, run_part, &parts[running])) break;
    }
    kernel(given, count * running / threads, count);
    for (long i = 0; i < running; i++) pthread_join(started[i], NULL);
}

/* a * b + c, rounded once. Without a fused operation: float64 holds the product, and a last bit of 1
   of an inexact sum lets it be rounded again. */
static inline float add_product_float(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    double p = (double)a * b, total = p + c, given = total - p;
    double error = (p - (total - given)) + (c - given);
    int64_t bits = read_bits(total), odd = (error > 0.0 || error < 0.0) && !(bits & 1);
    return (float)from_bits(bits + odd * ((error > 0.0) == (bits >= 0) ? 1 : -1));
#endif
}

static inline float root_float(float x) { return sqrtf(x); }
static inline double root_double(double x) { return sqrt(x); }

/* Whether offsets follow each other. */
static int is_flat(const long *offsets, long count) {
    for (long i = 1; i < count; i++)
        if (offsets[i] != offsets[i - 1] + 1) return 0;
    return 1;
}

/* Of float64 numbers the product is rounded, and then the sum. */
static inline double add_product_double(double a, double b, double c) { return a * b + c; }

/* Random bits of Philox4x32-10 (Salmon et al. 2011). Counters are taken 16 at a time: the first
   words of all, then the second ones. Returns words of 32 bits. */
enum { COUNTERS = 16, WORDS = 4 * COUNTERS };

static void philox(uint64_t key, uint64_t counter, uint32_t *words) {
    uint32_t first = (uint32_t)key, second = (uint32_t)(key >> 32);
    uint32_t *x = words, *y = x + COUNTERS, *z = y + COUNTERS, *w = z + COUNTERS;
    for (int i = 0; i < COUNTERS; i++) {
        x[i] = (uint32_t)(counter + i);
        y[i] = (uint32_t)((counter + i) >> 32);
        z[i] = w[i] = 0;
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < COUNTERS; i++) {
            uint64_t left = (uint64_t)x[i] * 0xD2511F53, right = (uint64_t)z[i] * 0xCD9E8D57;
            x[i] = (uint32_t)(right >> 32) ^ y[i] ^ first;
            y[i] = (uint32_t)right;
            z[i] = (uint32_t)(left >> 32) ^ w[i] ^ second;
            w[i] = (uint32_t)left;
        }
        first += 0x9E3779B9;
        second += 0xBB67AE85;
    }
}

enum { LANES = 32, BLOCK = 4096, DEPTH = 256 };

#define PASTE(a, b) a##b
#define JOIN(a, b) PASTE(a, b)
#define NAME(name) JOIN(name##_, REAL)

#define REAL float
#include "real.h"
#undef REAL
#define REAL double
#include "real.h"
