/* The codecs of integers.py in one pass over memory, for float32 on a CPU. They give
   the same bits as the Python code, which serves all other cases and installations without a
   compiler.

   bits = 2, 4, 8: a block of m elements is a scale of two bytes, a bfloat16, followed by
   w = ceil(m * bits / 8) bytes of codes q + 2^(bits-1). The code of element j is in byte j mod w,
   at bit bits * floor(j / w). All arithmetic is IEEE float32, in the order of the Python code,
   compiled without contraction. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __FLT_EVAL_METHOD__ != 0
#error "the kernels would not give the bits of integers.py"
#endif

#define EXPORT __attribute__((visibility("default")))
#if !defined(__x86_64__) || !defined(__gnu_linux__) || defined(__clang__)
#define CLONES EXPORT
#elif __GNUC__ >= 12
#define CLONES EXPORT __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES EXPORT __attribute__((target_clones("avx2", "default")))
#endif
#define INLINE static inline __attribute__((always_inline))

#define LEAST_SCALE 0x1p-126f
#define MOST_BLOCK 4096

/* Round x to the nearest bfloat16, ties to even. x must not be NaN. */
INLINE float to_bfloat16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    u += 0x7fff + ((u >> 16) & 1);
    u &= 0xffff0000u;
    memcpy(&x, &u, 4);
    return x;
}

/* Round y to the nearest integer, ties to even, for |y| < 2^22. Without SSE4.1, rintf would be a
   function call for each element. */
INLINE float nearest(float y) {
    const float shift = 0x1.8p23f;
    return copysignf(y + shift - shift, y);
}

INLINE float read_scale(const uint8_t *code) {
    uint32_t u = (uint32_t)code[0] << 16 | (uint32_t)code[1] << 24;
    float s;
    memcpy(&s, &u, 4);
    return s;
}

INLINE void write_scale(uint8_t *code, float s) {
    uint32_t u;
    memcpy(&u, &s, 4);
    code[0] = (uint8_t)(u >> 16);
    code[1] = (uint8_t)(u >> 24);
}

INLINE int64_t width_of(int64_t m, int bits) { return (m * bits + 7) / 8; }

/* Return the length in bytes of the code of a block of m elements. */
INLINE int64_t size_of(int64_t m, int bits) { return width_of(m, bits) + 2; }

/* Encode v = x - less + plus of one block into `code`. If `left` is given, left <- v - Q(v).
   Returns whether all of v is in range. If not, left <- v. */
INLINE int encode_block(int bits, int64_t m, const float *x, const float *less, const float *plus,
                        uint8_t *code, float *left, float most_scale) {
    const int half = 1 << (bits - 1);
    const float levels = (float)(half - 1);
    float v[MOST_BLOCK];
    int8_t q[MOST_BLOCK + 3];
    uint32_t peak = 0;

    for (int64_t j = 0; j < m; j++) v[j] = x[j];
    if (less) for (int64_t j = 0; j < m; j++) v[j] -= less[j];
    if (plus) for (int64_t j = 0; j < m; j++) v[j] += plus[j];
    for (int64_t j = 0; j < m; j++) { /* compare as integers: NaN is the largest */
        uint32_t u;
        memcpy(&u, &v[j], 4);
        u &= 0x7fffffffu;
        peak = u > peak ? u : peak;
    }
    if (peak > 0x7f7fffffu) { /* the largest float32 */
        if (left) memcpy(left, v, (size_t)m * 4);
        return 0;
    }

    float s;
    memcpy(&s, &peak, 4);
    s = to_bfloat16(s / levels);
    s = s < LEAST_SCALE ? LEAST_SCALE : s;
    s = s > most_scale ? most_scale : s;
    write_scale(code, s);
    for (int64_t j = 0; j < m; j++) {
        float r = nearest(v[j] / s);
        q[j] = (int8_t)(int32_t)r;
        v[j] -= s * r; /* s * r is exact */
    }
    if (left) memcpy(left, v, (size_t)m * 4);

    const int64_t w = width_of(m, bits);
    uint8_t *to = code + 2;
    for (int64_t j = m; j < w * (8 / bits); j++) q[j] = 0; /* unused bits hold codes of level 0 */
    for (int64_t j = 0; j < w; j++) {
        uint32_t byte = 0;
        for (int k = 0; k < 8 / bits; k++)
            byte |= (uint32_t)((q[k * w + j] + half) & (2 * half - 1)) << (bits * k);
        to[j] = (uint8_t)byte;
    }
    return 1;
}

/* Decode one block into `out`, or add it to `out`. */
INLINE void decode_block(int bits, int64_t m, const uint8_t *code, float *out, int add) {
    const int half = 1 << (bits - 1);
    const int64_t w = width_of(m, bits);
    const float s = read_scale(code);
    const uint8_t *from = code + 2;
    for (int k = 0; k < 8 / bits; k++) {
        const int64_t start = k * w, rest = m - start, n = rest < w ? rest : w;
        if (rest <= 0) break;
        float *to = out + start;
        if (add)
            for (int64_t j = 0; j < n; j++)
                to[j] += s * (float)((int)(from[j] >> (bits * k) & (2 * half - 1)) - half);
        else
            for (int64_t j = 0; j < n; j++)
                to[j] = s * (float)((int)(from[j] >> (bits * k) & (2 * half - 1)) - half);
    }
}

INLINE int encode(int bits, int64_t block, int64_t length, const float *x, const float *less,
                  const float *plus, uint8_t *code, float *left, float most_scale) {
    const int64_t step = size_of(block, bits);
    for (int64_t i = 0; i < length; i += block, code += step) {
        const int64_t m = length - i < block ? length - i : block;
        if (!encode_block(bits, m, x + i, less ? less + i : NULL, plus ? plus + i : NULL, code,
                          left ? left + i : NULL, most_scale))
            return 0;
    }
    return 1;
}

INLINE void decode(int bits, int64_t block, int64_t length, const uint8_t *code, float *out,
                   int add) {
    const int64_t step = size_of(block, bits);
    for (int64_t i = 0; i < length; i += block, code += step)
        decode_block(bits, length - i < block ? length - i : block, code, out + i, add);
}

/* Compute the mean over n codes of `length` elements, `stride` bytes apart, added in order; then
   add `first`, and then `second`, if they are given. */
INLINE void decode_mean(int bits, int64_t block, int64_t length, int64_t n, int64_t stride,
                        const uint8_t *code, const float *first, const float *second, float *out) {
    const int64_t step = size_of(block, bits);
    for (int64_t i = 0; i < length; i += block, code += step) {
        const int64_t m = length - i < block ? length - i : block;
        float total[MOST_BLOCK];
        decode_block(bits, m, code, total, 0);
        for (int64_t k = 1; k < n; k++) decode_block(bits, m, code + k * stride, total, 1);
        for (int64_t j = 0; j < m; j++) out[i + j] = total[j] / (float)n;
        if (first) for (int64_t j = 0; j < m; j++) out[i + j] += first[i + j];
        if (second) for (int64_t j = 0; j < m; j++) out[i + j] += second[i + j];
    }
}

/* Run `then` with constants for the widths and for the default block. */
#define FOR_EVERY_WIDTH(then)                                                                      \
    if (bits == 4 && block == 256) then(4, 256);                                                   \
    else if (bits == 4) then(4, block);                                                            \
    else if (bits == 8 && block == 256) then(8, 256);                                              \
    else if (bits == 8) then(8, block);                                                            \
    else then(2, block)

/* Increment this when the arguments or the behavior of the functions below change. */
EXPORT int laconic_version(void) { return 3; }

CLONES int laconic_encode(int bits, int64_t block, int64_t length, const float *x,
                          const float *less, const float *plus, uint8_t *code, float *left,
                          float most_scale) {
    int fine;
#define ENCODE(b, n) fine = encode(b, n, length, x, less, plus, code, left, most_scale)
    FOR_EVERY_WIDTH(ENCODE);
    return fine;
}

CLONES void laconic_decode(int bits, int64_t block, int64_t length, const uint8_t *code,
                           float *out, int add) {
#define DECODE(b, n) decode(b, n, length, code, out, add)
    FOR_EVERY_WIDTH(DECODE);
}

CLONES void laconic_decode_mean(int bits, int64_t block, int64_t length, int64_t n, int64_t stride,
                                const uint8_t *code, const float *first, const float *second,
                                float *out) {
#define DECODE_MEAN(b, m) decode_mean(b, m, length, n, stride, code, first, second, out)
    FOR_EVERY_WIDTH(DECODE_MEAN);
}
