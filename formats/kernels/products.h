// Shared by the products y = x W^T of one instruction set. Definitions: formats/products.py and encodings/*.py.
#pragma once

#include "common.h"

namespace pagestone {
namespace PAGESTONE_ISA {

#define PAGESTONE_DECLARE(codec)                                                                          \
    std::size_t prepared_bytes_##codec(const Product&);                                                   \
    bool prepare_##codec(const Product&, unsigned char* prepared);                                        \
    std::size_t scratch_bytes_##codec(const Product&);                                                    \
    void matmul_##codec(const Product&, const unsigned char* prepared, unsigned char* scratch, std::size_t first, \
                        std::size_t last);
PAGESTONE_PRODUCTS(PAGESTONE_DECLARE)
#undef PAGESTONE_DECLARE

std::uint64_t read_bytes(const unsigned char* bytes, std::size_t count);

// One register of this set's width. The second type of each is for memory that is aligned to its elements only.
#if defined(__AVX512F__)
#define PAGESTONE_WIDTH 64
#elif defined(__AVX__)
#define PAGESTONE_WIDTH 32
#else
#define PAGESTONE_WIDTH 16
#endif
typedef float Floats __attribute__((vector_size(PAGESTONE_WIDTH)));
typedef std::uint32_t Words __attribute__((vector_size(PAGESTONE_WIDTH)));
typedef float FloatsAt __attribute__((vector_size(PAGESTONE_WIDTH), aligned(4), may_alias));
typedef std::uint32_t WordsAt __attribute__((vector_size(PAGESTONE_WIDTH), aligned(1), may_alias));

PAGESTONE_INLINE Floats load(const float* from) { return Floats(*reinterpret_cast<const FloatsAt*>(from)); }
PAGESTONE_INLINE void store(float* to, Floats value) { *reinterpret_cast<FloatsAt*>(to) = FloatsAt(value); }
PAGESTONE_INLINE Words load_words(const void* from) { return Words(*static_cast<const WordsAt*>(from)); }

constexpr std::size_t COLUMN_LANES = 64;  // element c of a row goes to lane c mod 64
constexpr std::size_t GROUP_LANES = 16;   // group g of a row goes to lane g mod 16
constexpr std::size_t WIDE = sizeof(Floats) / sizeof(float);
constexpr std::size_t REGISTERS = COLUMN_LANES / WIDE;

constexpr std::size_t up(std::size_t count, std::size_t step) { return (count + step - 1) / step * step; }

// Rows are short and taken several at a time, so the processor's own prefetching restarts again and again: each kernel
// asks for what lies at least AHEAD bytes further on (beyond the end of a matrix too: that does no harm).
constexpr std::size_t AHEAD = 4096;

PAGESTONE_INLINE void fetch(const void* address, std::size_t ahead) {
    __builtin_prefetch(static_cast<const unsigned char*>(address) + ahead);
}

// How far ahead is a whole number of turns of `rows` rows, so that each line is asked for once.
PAGESTONE_INLINE std::size_t turns_ahead(std::size_t rows, std::size_t row_bytes) {
    const std::size_t turn = rows * row_bytes;
    return turn == 0 ? AHEAD : up(AHEAD, turn);
}

// Lanes of one register folded in halves down to lane 0.
PAGESTONE_INLINE float fold(Floats lanes) {
#if defined(__AVX512F__)
    const __m512 all = __m512(lanes);
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__AVX__)
    const __m256 eight = __m256(lanes);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif defined(__SSE2__)
    const __m128 four = __m128(lanes);
#else
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
#endif
#if defined(__SSE2__)
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#endif
}

// In which order elements of a row lie in memory and lanes in registers: as they are, or of every 2 * WIDE first those
// of even and then those of odd number, which is how BF16 leaves its 32-bit words.
enum Order { NATURAL, PAIRS };

template <Order ORDER>
PAGESTONE_INLINE float fold_lanes(Floats* lanes) {
    constexpr std::size_t LAST = ORDER == PAIRS ? 2 : 1;
    for (std::size_t half = REGISTERS / 2; half >= LAST; half /= 2)
        for (std::size_t l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
    return ORDER == PAIRS ? fold(lanes[0]) + fold(lanes[1]) : fold(lanes[0]);
}

constexpr std::size_t TILE_ROWS = 16;  // rows taken at a time, for all tokens

PAGESTONE_INLINE std::uint16_t to_bf16(float value) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(value);
    return std::uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

PAGESTONE_INLINE std::uint16_t to_f16(float value) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(value), size = bits & 0x7FFFFFFFu;
    // Below 2^-14 the sum with 0.5 rounds to steps of 2^-24; above, the exponent is moved and the mantissa rounded.
    const float stepped = bit_cast<float>(size < (113u << 23) ? size : 0u) + 0.5f;
    const std::uint32_t subnormal = bit_cast<std::uint32_t>(stepped) - (126u << 23);
    const std::uint32_t normal = (size - (112u << 23) + 0xFFFu + ((size >> 13) & 1u)) >> 13;
    const std::uint32_t infinite = size > 0x7F800000u ? 0x7E00u : 0x7C00u;
    const std::uint32_t magnitude = size < (113u << 23) ? subnormal : size >= 0x477FF000u ? infinite : normal;
    return std::uint16_t(magnitude | ((bits >> 16) & 0x8000u));
}

// Sums of one token and the rows [first, first + count) into y: the one NaN for any NaN, then one rounding.
PAGESTONE_INLINE void put(const Product& p, std::size_t token, std::size_t first, std::size_t count,
                          const float* sums) {
    float values[TILE_ROWS];
    for (std::size_t i = 0; i < TILE_ROWS; ++i) {
        const float sum = i < count ? sums[i] : 0.0f;
        values[i] = sum == sum ? sum : bit_cast<float>(0x7FC00000u);
    }
    const std::size_t at = token * p.rows + first;
    if (p.y_type == F32) {
        std::memcpy(static_cast<float*>(p.y) + at, values, count * sizeof(float));
        return;
    }
    std::uint16_t rounded[TILE_ROWS];
    if (p.y_type == BF16)
        for (std::size_t i = 0; i < TILE_ROWS; ++i) rounded[i] = to_bf16(values[i]);
    else
        for (std::size_t i = 0; i < TILE_ROWS; ++i) rounded[i] = to_f16(values[i]);
    std::memcpy(static_cast<std::uint16_t*>(p.y) + at, rounded, count * sizeof(std::uint16_t));
}

// The values of one token, zeros up to `padded`; false if one is NaN or Inf.
template <class S>
PAGESTONE_INLINE bool widen_token(const void* x, std::size_t token, std::size_t columns, std::size_t padded,
                                  float* values) {
    const std::uint16_t* source = static_cast<const std::uint16_t*>(x) + token * columns;
    if (largest<S>(source, columns) >= S::INFINITE) return false;
    for (std::size_t c = 0; c < columns; ++c) values[c] = S::value(source[c]);
    for (std::size_t c = columns; c < padded; ++c) values[c] = 0.0f;
    return true;
}

PAGESTONE_INLINE bool token_values(const Product& p, std::size_t token, std::size_t padded, float* values) {
    return p.x_type == BF16 ? widen_token<SourceBF16>(p.x, token, p.columns, padded, values)
                            : widen_token<SourceF16>(p.x, token, p.columns, padded, values);
}

// Activations in 8 bits, zeros up to `padded`; returns their scale. `values` are `padded` finite floats.
PAGESTONE_INLINE float quantise_token(const float* values, std::size_t padded, std::int8_t* codes) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds |x| < 2^22 half to even
    std::uint32_t most = 0;
    for (std::size_t c = 0; c < padded; ++c) {
        const std::uint32_t magnitude = bit_cast<std::uint32_t>(values[c]) & 0x7FFFFFFFu;
        most = magnitude > most ? magnitude : most;
    }
    const float scale = most == 0 ? 1.0f : bit_cast<float>(most) / 127.0f;
    for (std::size_t c = 0; c < padded; ++c) {
        float quotient = values[c] / scale;
        quotient = quotient < -127.0f ? -127.0f : quotient;
        quotient = quotient > 127.0f ? 127.0f : quotient;
        codes[c] = std::int8_t(bit_cast<std::uint32_t>(quotient + MAGIC));
    }
    return scale;
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
