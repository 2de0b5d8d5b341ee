/* out[n][o] = sum_i x[n][i] * w[o][i] for a few rows n: bfloat16 weights, float32 rows and sums.

   A weight is read from memory and widened once, and multiplied into all rows while it is in a register; this is what
   makes a pass over several tokens cost little more than a pass over one. Compiled on first use by ops/native.py. */

#include <stdint.h>

static inline float widen(uint16_t w) {
    union {
        uint32_t bits;
        float value;
    } u = {(uint32_t)w << 16};
    return u.value;
}

#define SIMD _Pragma("omp simd reduction(+ : a, b, c, d)")

void few_rows(const float *x, const uint16_t *w, float *out, long rows, long outputs, long inputs) {
#pragma omp parallel for schedule(static)
    for (long o = 0; o < outputs; o++) {
        const uint16_t *restrict row = w + o * inputs;
        for (long n = 0; n < rows; n += 4) {
            long left = rows - n;
            const float *restrict p = x + n * inputs;
            const float *restrict q = left > 1 ? p + inputs : p;
            const float *restrict r = left > 2 ? q + inputs : p;
            const float *restrict s = left > 3 ? r + inputs : p;
            float a = 0, b = 0, c = 0, d = 0;
            if (left == 1) {
                SIMD for (long i = 0; i < inputs; i++) a += widen(row[i]) * p[i];
            } else if (left == 2) {
                SIMD for (long i = 0; i < inputs; i++) {
                    float f = widen(row[i]);
                    a += f * p[i];
                    b += f * q[i];
                }
            } else if (left == 3) {
                SIMD for (long i = 0; i < inputs; i++) {
                    float f = widen(row[i]);
                    a += f * p[i];
                    b += f * q[i];
                    c += f * r[i];
                }
            } else {
                SIMD for (long i = 0; i < inputs; i++) {
                    float f = widen(row[i]);
                    a += f * p[i];
                    b += f * q[i];
                    c += f * r[i];
                    d += f * s[i];
                }
            }
            float sums[4] = {a, b, c, d};
            for (long m = 0; m < (left < 4 ? left : 4); m++) out[(n + m) * outputs + o] = sums[m];
        }
    }
}
