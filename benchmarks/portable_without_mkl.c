/* Plain loops in place of MKL's routines that torch calls: the terms in descending order. */
#include <math.h>
#include <stddef.h>
typedef int I;
#define GEMM(NAME, T) \
void NAME##gemm_(const char *ta, const char *tb, const I *m, const I *n, const I *k, const T *alpha, \
    const T *a, const I *lda, const T *b, const I *ldb, const T *beta, T *c, const I *ldc) { \
  int na = *ta == 'n' || *ta == 'N', nb = *tb == 'n' || *tb == 'N'; \
  for (I j = 0; j < *n; j++) for (I i = 0; i < *m; i++) { \
    T s = 0; \
    for (I p = *k - 1; p >= 0; p--) \
      s += (na ? a[i + (size_t)p * *lda] : a[p + (size_t)i * *lda]) * \
           (nb ? b[p + (size_t)j * *ldb] : b[j + (size_t)p * *ldb]); \
    T *o = &c[i + (size_t)j * *ldc]; \
    *o = *alpha * s + (*beta == 0 ? 0 : *beta * *o); \
  } } \
void NAME##gemv_(const char *t, const I *m, const I *n, const T *alpha, const T *a, const I *lda, \
    const T *x, const I *ix, const T *beta, T *y, const I *iy) { \
  int no = *t == 'n' || *t == 'N'; I rows = no ? *m : *n, inner = no ? *n : *m; \
  for (I i = 0; i < rows; i++) { T s = 0; \
    for (I p = inner - 1; p >= 0; p--) \
      s += (no ? a[i + (size_t)p * *lda] : a[p + (size_t)i * *lda]) * x[(size_t)p * *ix]; \
    T *o = &y[(size_t)i * *iy]; *o = *alpha * s + (*beta == 0 ? 0 : *beta * *o); } } \
void cblas_##NAME##gemm_batch(int order, const int *ta, const int *tb, const I *m, const I *n, \
    const I *k, const T *alpha, const T **a, const I *lda, const T **b, const I *ldb, const T *beta, \
    T **c, const I *ldc, I groups, const I *sizes) { \
  size_t at = 0; \
  for (I g = 0; g < groups; g++) for (I s = 0; s < sizes[g]; s++, at++) { \
    char x = ta[g] == 111 ? 'n' : 't', y = tb[g] == 111 ? 'n' : 't'; \
    if (order == 102) NAME##gemm_(&x, &y, m + g, n + g, k + g, alpha + g, a[at], lda + g, b[at], \
        ldb + g, beta + g, c[at], ldc + g); \
    else NAME##gemm_(&y, &x, n + g, m + g, k + g, alpha + g, b[at], ldb + g, a[at], lda + g, \
        beta + g, c[at], ldc + g); } }
GEMM(s, float)
GEMM(d, double)
#define VML(N, F) \
void vms##N(I n, const float *a, float *y, long long mode) { for (I i = 0; i < n; i++) y[i] = F##f(a[i]); } \
void vmd##N(I n, const double *a, double *y, long long mode) { for (I i = 0; i < n; i++) y[i] = F(a[i]); }
VML(Tanh, tanh) VML(Log2, log2) VML(Log10, log10) VML(Ln, log) VML(Exp, exp) VML(Erfc, erfc)
VML(Erf, erf) VML(Atan, atan) VML(Asin, asin) VML(Acos, acos) VML(Tan, tan) VML(Cos, cos)
VML(Sin, sin) VML(Trunc, trunc) VML(Sqrt, sqrt)

#define MORE(S, T, F) \
void v##S##Ln(I n, const T *a, T *y) { for (I i = 0; i < n; i++) y[i] = F(a[i]); } \
T S##dot_(const I *n, const T *x, const I *ix, const T *y, const I *iy) { \
  T s = 0; for (I i = *n - 1; i >= 0; i--) s += x[(size_t)i * *ix] * y[(size_t)i * *iy]; return s; }
MORE(s, float, logf)
MORE(d, double, log)
