/* Elementary functions of float64 numbers, by additions, products, quotients and square roots.

   functions.py says the same in torch operations; both must give the same bits. There is no loop and
   no call in most of them, so that a compiler computes several numbers at once. */

#include "coefficients.h"

#define LOG2_E 0x1.71547652b82fep+0
#define PI 0x1.921fb54442d18p+1
#define ROUND 0x1.8p+52 /* added and subtracted, it rounds to a whole number */
#define POLYNOMIAL(table, x) polynomial(table, sizeof(table) / sizeof(double), x)

static inline double polynomial(const double *table, int count, double x) {
    double total = table[0];
#pragma GCC unroll 32
    for (int i = 1; i < count; i++) total = total * x + table[i];
    return total;
}

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

static inline double round_whole(double x) { return (x + ROUND) - ROUND; }

/* 2 to a whole number between -1022 and 1023: the last bits of ROUND + k are those of k. */
static inline double power_of_2(double k) {
    return from_bits((int64_t)((uint64_t)(read_bits(k + ROUND) + 1023) << 52));
}

/* (1 + q) * 2**k; half of k at a time, because 2**k itself may be out of range. */
static inline double scale(double q, double k) {
    double half = round_whole(k * 0.5);
    return ((1.0 + q) * power_of_2(half)) * power_of_2(k - half);
}

static inline double d9m_exp(double x) {
    x = x < -746.0 ? -746.0 : x > 710.0 ? 710.0 : x;
    double k = round_whole(x * LOG2_E), r = (x - k * LOG2[0]) - k * LOG2[1];
    return scale(r * POLYNOMIAL(EXPM1, r), k);
}

static inline double d9m_exp2(double x) {
    x = x < -1080.0 ? -1080.0 : x > 1025.0 ? 1025.0 : x;
    double k = round_whole(x), r = (x - k) * (LOG2[0] + LOG2[1]);
    return scale(r * POLYNOMIAL(EXPM1, r), k);
}

static inline double d9m_expm1(double x) {
    return fabs(x) < 0.34657 ? x * POLYNOMIAL(EXPM1, x) : d9m_exp(x) - 1.0;
}

/* x = 2**k * m, m between the roots of 1/2 and of 2; returns log(m). */
static inline double split_log(double x, double *k) {
    double small = x < 0x1p-1022 ? 0x1p+54 : 1.0;
    int64_t bits = read_bits(x * small);
    int64_t exponent = (bits - 0x3fe6a09e667f3bcd) >> 52;
    double m = from_bits(bits - (int64_t)((uint64_t)exponent << 52));
    *k = (from_bits(read_bits(ROUND) + exponent) - ROUND) - (small > 1.0 ? 54.0 : 0.0);
    double f = m - 1.0, s = f / (2.0 + f);
    return (2.0 * s) * POLYNOMIAL(ATANH, s * s);
}

static inline double guard_log(double x, double found) {
    return x > 0.0 ? (x < INFINITY ? found : x) : (x == 0.0 ? -INFINITY : NAN);
}

static inline double d9m_log(double x) {
    double k, y = split_log(x, &k);
    return guard_log(x, k * LOG2[0] + (y + k * LOG2[1]));
}

static inline double d9m_log2(double x) {
    double k, y = split_log(x, &k);
    return guard_log(x, k + y * LOG2_E);
}

static inline double d9m_log10(double x) { return d9m_log(x) * 0x1.bcb7b1526e50ep-2; }

static inline double d9m_log1p(double x) {
    double u = 1.0 + x, lost = (x - (u - 1.0)) / u, y = d9m_log(u);
    return x == 0.0 ? x : (u > 0.0 && u < INFINITY ? y + lost : y);
}

static inline double d9m_sigmoid(double x) { return 1.0 / (1.0 + d9m_exp(-x)); }

static inline double d9m_tanh(double x) {
    double t = d9m_expm1(-2.0 * fabs(x));
    return copysign(-t / (t + 2.0), x);
}

static inline double d9m_sinh(double x) {
    double size = fabs(x), t = d9m_expm1(size), h = d9m_exp(size * 0.5);
    return copysign(size > 20.0 ? (0.5 * h) * h : 0.5 * (t + t / (t + 1.0)), x);
}

static inline double d9m_cosh(double x) {
    double size = fabs(x), e = d9m_exp(size), h = d9m_exp(size * 0.5);
    return size > 20.0 ? (0.5 * h) * h : 0.5 * e + 0.5 / e;
}

static inline double d9m_asinh(double x) {
    double a = fabs(x), near = d9m_log1p(a + a * a / (1.0 + sqrt(a * a + 1.0)));
    return copysign(a > 1e8 ? d9m_log(a) + (LOG2[0] + LOG2[1]) : near, x);
}

static inline double d9m_acosh(double x) {
    double t = x - 1.0, near = d9m_log1p(t + sqrt(2.0 * t + t * t));
    return x > 1e8 ? d9m_log(x) + (LOG2[0] + LOG2[1]) : x >= 1.0 ? near : NAN;
}

static inline double d9m_atanh(double x) {
    double a = fabs(x);
    return copysign(0.5 * d9m_log1p((2.0 * a) / (1.0 - a)), x);
}

/* The angle of a number between 0 and 1. */
static inline double find_angle(double t) {
    int wide = t > 0.41421356237309503;
    double s = wide ? (t - 1.0) / (t + 1.0) : t, angle = s * POLYNOMIAL(ATAN, s * s);
    return wide ? PI / 4 + angle : angle;
}

static inline double d9m_atan(double x) {
    double a = fabs(x), angle = find_angle(a > 1.0 ? 1.0 / a : a);
    return copysign(a > 1.0 ? PI / 2 - angle : angle, x);
}

static inline double d9m_asin(double x) { return d9m_atan(x / sqrt((1.0 - x) * (1.0 + x))); }

static inline double d9m_acos(double x) { return 2.0 * d9m_atan(sqrt((1.0 - x) / (1.0 + x))); }

static inline double d9m_atan2(double y, double x) {
    double a = fabs(x), b = fabs(y), high = a > b ? a : b, low = a > b ? b : a;
    double t = high == 0.0 ? 0.0 : low == INFINITY ? 1.0 : low / high, angle = find_angle(t);
    angle = b > a ? PI / 2 - angle : angle;
    angle = copysign(read_bits(x) < 0 ? PI - angle : angle, y);
    return x != x || y != y ? NAN : angle;
}

/* Subtract the nearest multiple of pi / 2; return the rest and the multiple. */
static inline double reduce_small(double x, int64_t *quadrant) {
    double n = round_whole(x * (2.0 / PI));
    *quadrant = read_bits(n + ROUND) & 3;
    return ((x - n * HALF_PI[0]) - n * HALF_PI[1]) - n * HALF_PI[2];
}

/* The same for any size, by whole numbers: x = m * 2**e, and of x * 2 / pi only the part below 4
   counts, so only the bits of 2 / pi from a place that e tells. */
static double reduce(double x, int64_t *quadrant) {
    if (fabs(x) < 0x1p+20) return reduce_small(x, quadrant);
    int64_t bits = read_bits(fabs(x)), place = (bits >> 52) - 1023 - 52 - 2 + 64;
    uint64_t m = (uint64_t)((bits & 0xfffffffffffff) | 0x10000000000000), part[2];
    *quadrant = 0;
    if (x - x != 0.0) return NAN;
    for (int i = 0; i < 2; i++) {
        int64_t word = (place >> 6) + i - 1, shift = place & 63;
        uint64_t high = word < 0 ? 0 : TWO_OVER_PI[word];
        part[i] = shift ? high << shift | TWO_OVER_PI[word + 1] >> (64 - shift) : high;
    }
    uint64_t turns = m * part[0] + (uint64_t)((unsigned __int128)m * part[1] >> 64);
    uint64_t nearest = (turns + (1ull << 61)) >> 62 & 3;
    double rest = (double)(int64_t)(turns - (nearest << 62)) * (0x1p-62 * (PI / 2));
    *quadrant = x < 0 ? (int64_t)(-nearest & 3) : (int64_t)nearest;
    return x < 0 ? -rest : rest;
}

static inline double sine_of(double r) { return r * POLYNOMIAL(SIN, r * r); }
static inline double cosine_of(double r) { return POLYNOMIAL(COS, r * r); }

static inline double turn(double r, int64_t quadrant) {
    double size = quadrant & 1 ? cosine_of(r) : sine_of(r);
    return quadrant & 2 ? -size : size;
}

static inline double d9m_sin(double x) {
    int64_t quadrant;
    double r = reduce(x, &quadrant);
    return turn(r, quadrant);
}

static inline double d9m_cos(double x) {
    int64_t quadrant;
    double r = reduce(x, &quadrant);
    return turn(r, quadrant + 1);
}

static inline double d9m_tan(double x) {
    int64_t quadrant;
    double r = reduce(x, &quadrant), s = sine_of(r), c = cosine_of(r);
    return quadrant & 1 ? -c / s : s / c;
}

static inline double erfc_above(double a) {
    double t = 2.0 / (2.0 + a);
    return t * d9m_exp(POLYNOMIAL(ERFC, 2.0 * t - 1.0) - a * a);
}

static inline double d9m_erfc(double x) {
    double found = erfc_above(fabs(x));
    return x < 0.0 ? 2.0 - found : found;
}

static inline double d9m_erf(double x) {
    double a = fabs(x);
    return a < 1.0 ? x * POLYNOMIAL(ERF, x * x) : copysign(1.0 - erfc_above(a), x);
}

static inline double d9m_erfinv(double x) {
    double a = fabs(x), rest = 1.0 - a, w = -d9m_log(rest * (1.0 + a));
    double tail = POLYNOMIAL(ERFINV_TAIL, sqrt(w) - 3.0);
    double y = a * (w < 5.0 ? POLYNOMIAL(ERFINV, w - 2.5) : tail);
    for (int i = 0; i < 3; i++) { /* Halley's method */
        double error = rest < 0.5 ? rest - erfc_above(y) : d9m_erf(y) - a;
        double step = error * d9m_exp(y * y) * 0x1.c5bf891b4ef6ap-1;
        y = y - step / (1.0 + y * step);
    }
    return a < 1.0 ? copysign(y, x) : a == 1.0 ? copysign(INFINITY, x) : NAN;
}

static inline double d9m_hypot(double x, double y) {
    double a = fabs(x), b = fabs(y), high = a > b ? a : b, low = a > b ? b : a, r = low / high;
    double found = high == 0.0 ? high + low : high * sqrt(1.0 + r * r);
    return a == INFINITY || b == INFINITY ? INFINITY : x != x || y != y ? NAN : found;
}

static inline int is_whole(double size) {
    return size >= 0x1p+52 || (size + 0x1p+52) - 0x1p+52 == size;
}

static inline double d9m_pow(double x, double y) {
    double a = fabs(x), b = fabs(y), found = d9m_exp(y * d9m_log(a));
    int whole = is_whole(b), odd = whole && b < 0x1p+53 && !is_whole(b * 0.5);
    found = x < 0.0 && a < INFINITY && !whole ? NAN : read_bits(x) < 0 && odd ? -found : found;
    found = x != x || y != y ? NAN : found;
    return y == 0.0 || x == 1.0 || (a == 1.0 && b == INFINITY) ? 1.0 : found;
}

/* A normal number from two uniform ones, of which one is an angle (Box and Muller). */
static inline double d9m_normal(double u, double angle) {
    int64_t quadrant;
    double r = reduce_small(angle, &quadrant);
    return sqrt(d9m_log(u) * -2.0) * turn(r, quadrant + 1);
}

static inline double d9m_gelu(double x) { return x * (0.5 * d9m_erfc(x * -0x1.6a09e667f3bcdp-1)); }

static inline double d9m_gelu_backward(double g, double x) {
    double density = d9m_exp(-0.5 * x * x) * 0x1.9884533d43651p-2;
    return g * (0.5 * d9m_erfc(x * -0x1.6a09e667f3bcdp-1) + x * density);
}

static inline double d9m_silu(double x) { return x / (1.0 + d9m_exp(-x)); }

static inline double d9m_silu_backward(double g, double x) {
    double s = d9m_sigmoid(x);
    return g * (s * (1.0 + x * (1.0 - s)));
}
