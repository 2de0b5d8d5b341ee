/* out[n][o] = sum_i x[n][i] * w[o][i] for some rows n, all bfloat16, with float32 sums.

   A weight is read from memory and widened once, and multiplied into many rows while it is near; this is what makes a pass
   over several tokens cost little more than a pass over one. Up to 10 rows are dot products, four rows at a time, bound by
   reading the weights. Every 16 rows more are a panel, transposed so that a vector holds one input of 8 rows: 6 outputs x 16
   rows of sums stay in registers, bound by arithmetic; the weights of the next 6 outputs are on their way meanwhile. Compiled on
   first use by ops/native.py. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define OUTPUTS 6
#define PANEL 16
#define CHUNK 96
#define MOST_DOT_ROWS 10
#define GROUP 16
#define LINE 32

typedef float vec __attribute__((vector_size(32), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(32), aligned(2), may_alias));

static inline float widen(uint16_t w) {
    union {
        uint32_t bits;
        float value;
    } u = {(uint32_t)w << 16};
    return u.value;
}

/* Round to nearest, ties to even. NaN stays NaN: its payload may round away only into the exponent, which is all ones. */
static inline uint16_t narrow(float value) {
    union {
        float value;
        uint32_t bits;
    } u = {value};
    if ((u.bits & 0x7fffffff) > 0x7f800000) return (u.bits >> 16) | 0x40;
    return (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
}

/* The same for 8 values; the results are in the low halves. */
static inline bits narrow8(vec values) {
    bits b = (bits)values;
    bits rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16, nan = b >> 16 | 0x40;
    bits is_nan = (bits)((b & 0x7fffffff) > 0x7f800000);
    return (rounded & ~is_nan) | (nan & is_nan);
}

#define SIMD _Pragma("omp simd reduction(+ : a, b, c, d)")

static void dot_rows(const float *x, const uint16_t *w, uint16_t *out, long rows, long outputs, long inputs) {
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
            for (long m = 0; m < (left < 4 ? left : 4); m++) out[(n + m) * outputs + o] = narrow(sums[m]);
        }
    }
}

/* Of every GROUP inputs the even ones come first: so widening needs no shuffle. */
static inline void widen_row(const uint16_t *restrict source, float *restrict target, long inputs) {
    long i = 0;
    for (; i + GROUP <= inputs; i += GROUP) {
        bits both = *(const bits *)(source + i);
        *(bits *)(target + i) = both << 16;
        *(bits *)(target + i + GROUP / 2) = both & 0xffff0000;
    }
    for (; i < inputs; i++) target[i] = widen(source[i]);
}

/* Rows in panels of PANEL; `across` has room for whole panels, and holds zeros where there is no row. */
static void panel_rows(const uint16_t *x, const uint16_t *w, uint16_t *out, long rows, long outputs, long inputs, float *across) {
#pragma omp parallel
    {
        float *wide = malloc(sizeof(float) * OUTPUTS * inputs);
#pragma omp for schedule(static)
        for (long from = 0; from < inputs; from += CHUNK) {
            long count = inputs - from < CHUNK ? inputs - from : CHUNK;
            for (long n = 0; n < rows; n++) {
                float values[CHUNK];
                widen_row(x + n * inputs + from, values, count);
                float *restrict target = across + (n / PANEL * inputs + from) * PANEL + n % PANEL;
                for (long i = 0; i < count; i++) target[i * PANEL] = values[i];
            }
        }
#pragma omp for schedule(static)
        for (long tile = 0; tile < (outputs + OUTPUTS - 1) / OUTPUTS; tile++) {
            long o = tile * OUTPUTS;
            long count = outputs - o < OUTPUTS ? outputs - o : OUTPUTS;
            for (long j = 0; j < OUTPUTS; j++) widen_row(w + (o + (j < count ? j : 0)) * inputs, wide + j * inputs, inputs);
            const uint16_t *next = w + (o + OUTPUTS) * inputs;
            for (long n = 0; n < rows; n += PANEL) {
                vec sums[OUTPUTS][2];
                memset(sums, 0, sizeof sums);
                for (long from = 0; from < inputs; from += LINE) {
                    long to = inputs - from < LINE ? inputs : from + LINE;
                    for (int j = 0; j < OUTPUTS; j++) __builtin_prefetch(next + j * inputs + from, 0, 2);
                    for (long i = from; i < to; i++) {
                        const vec *panel = (const vec *)(across + n * inputs + i * PANEL);
                        vec low = panel[0], high = panel[1];
#pragma GCC unroll 6
                        for (int j = 0; j < OUTPUTS; j++) {
                            float f = wide[j * inputs + i];
                            sums[j][0] += f * low;
                            sums[j][1] += f * high;
                        }
                    }
                }
                bits rounded[OUTPUTS][2];
                for (int j = 0; j < OUTPUTS; j++) {
                    rounded[j][0] = narrow8(sums[j][0]);
                    rounded[j][1] = narrow8(sums[j][1]);
                }
                long left = rows - n < PANEL ? rows - n : PANEL;
                for (long m = 0; m < left; m++)
                    for (long j = 0; j < count; j++) out[(n + m) * outputs + o + j] = rounded[j][m / 8][m % 8];
            }
        }
        free(wide);
    }
}

void few_rows(const uint16_t *x, const uint16_t *w, uint16_t *out, long rows, long outputs, long inputs) {
    long rest = rows % PANEL > MOST_DOT_ROWS ? 0 : rows % PANEL;
    long in_panels = rows - rest;
    if (in_panels) {
        float *across = calloc((in_panels + PANEL - 1) / PANEL * PANEL * inputs, sizeof(float));
        panel_rows(x, w, out, in_panels, outputs, inputs, across);
        free(across);
    }
    if (rest) {
        float *wide = malloc(sizeof(float) * rest * inputs);
        for (long i = 0; i < rest * inputs; i++) wide[i] = widen(x[in_panels * inputs + i]);
        dot_rows(wide, w, out + in_panels * outputs, rest, outputs, inputs);
        free(wide);
    }
}
