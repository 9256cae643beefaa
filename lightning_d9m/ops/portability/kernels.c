/* Kernels that compute each result by one sequence of IEEE operations, on every machine.

   Compile without contraction (-ffp-contract=off): then a compiler may compute several results at
   once, but may not change the operations of one. formulas.py and triton/kernels.py say each
   sequence. Threads share out whole results. A kernel takes a struct whose members all have 8
   bytes, and computes the results from `begin` to `end`. */

#include <fenv.h>
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

#include "table.h" /* written from formulas.py, which has the formulas, too */

typedef void kernel(const void *given, long begin, long end);

/* Memory for one kernel at a time, which stays between calls: fresh pages would cost more than the
   packing that writes them. */
static __thread struct {
    void *start;
    size_t size;
} kept;

static pthread_key_t at_exit; /* frees the memory of a thread that ends */

__attribute__((constructor)) static void make_key(void) { pthread_key_create(&at_exit, free); }

static void *get_scratch(size_t size) {
    if (kept.size < size) {
        free(kept.start);
        kept.size = size;
        kept.start = aligned_alloc(64, (size + 63) / 64 * 64);
        if (!kept.start) abort();
        pthread_setspecific(at_exit, kept.start);
    }
    return kept.start;
}

struct work {
    kernel *kernel;
    const void *given;
    long count, parts, next;
};

/* Compute parts until none is left: OpenMP may give fewer threads than were wanted. Its threads keep
   the floating-point state in which they began, which may flush subnormal numbers. */
static void run_parts(void *given) {
    struct work *w = given;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    for (long i; (i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED)) < w->parts;)
        w->kernel(w->given, w->count * i / w->parts, w->count * (i + 1) / w->parts);
    fesetenv(&before);
}

/* Share the results out among the threads of torch's OpenMP, by its GOMP_parallel. Threads of our own
   would compete with those, which spin for some milliseconds after each operation of torch. */
void d9m_share(kernel *kernel, const void *given, long count, long threads,
               void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    long parts = threads < count ? threads : count;
    struct work work = {kernel, given, count, parts < 1 ? 1 : parts, 0};
    if (parts > 1 && parallel) parallel(run_parts, &work, (unsigned)parts, 0);
    else run_parts(&work);
}

/* a + b, with a last bit of 1 unless it is exact: then it can be rounded again. */
static inline double add_to_odd(double a, double b) {
    double total = a + b, given = total - a;
    double error = (a - (total - given)) + (b - given);
    int64_t bits = read_bits(total), odd = (error > 0.0 || error < 0.0) && !(bits & 1);
    return from_bits(bits + odd * ((error > 0.0) == (bits >= 0) ? 1 : -1));
}

/* a * b + c, rounded once. Without a fused operation float64 holds the product. */
static inline float add_product_float(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return (float)add_to_odd((double)a * b, c);
#endif
}

/* Whether offsets follow each other. */
static int is_flat(const long *offsets, long count) {
    for (long i = 1; i < count; i++)
        if (offsets[i] != offsets[i - 1] + 1) return 0;
    return 1;
}

/* Of float64 numbers the product is rounded, and then the sum. */
static inline double add_product_double(double a, double b, double c) { return a * b + c; }

static inline int64_t read_exponent(double x) { return read_bits(x) >> 52 & 0x7FF; }

/* Cut a term into pieces, relative to the greatest exponent of its sum, and add them. Terms that are
   too large are scaled. patches/exact_sums.py says why no addition rounds. */
static inline void add_pieces(double *sum, double x, int64_t top, long pieces, long size, long step) {
    top = top > 2046 ? 2046 : top;
    int large = top >= 1923, is_cut;
    x *= large ? 0x1p-64 : 1.0;
    is_cut = read_exponent(x) < 0x7FF && x != 0;
    top = large ? top - 64 : top;
    for (long last = (top < 1 ? 1 : top) + size; pieces--; last -= 54 - size, sum += step) {
        double constant = from_bits((last < 1 ? 1 : last) << 52 | 1LL << 51);
        double piece = is_cut ? (x + constant) - constant : x;
        *sum += piece; /* the first one decides the sign of a zero */
        x = is_cut ? x - piece : -0.0;
    }
}

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
