// int8: activations in 8 bits, exact sums, y = (f32(acc) * s_x) * s_w. Definition: encodings/int8.py.
#include "products.h"

namespace pagestone {
namespace PAGESTONE_ISA {
namespace {

constexpr std::size_t STEP = 64;  // codes of a row are taken as many at a time; tokens are padded up to it

// prepared: scales of the tokens, then their codes, then room for the values of one.
PAGESTONE_INLINE std::size_t scales_bytes(const Product& p) { return up(p.tokens * sizeof(float), 64); }

// Exact sums of ROWS rows and TOKENS tokens, modulo 2^32: sums[token * TILE_ROWS + row].
#if defined(__AVX512F__)
constexpr std::uint8_t OFFSET = 128;  // activations are unsigned here: each row has 128 * its row sum too much
constexpr int AT_ONCE = 4;

template <int ROWS, int TOKENS>
PAGESTONE_INLINE void dots(const std::int8_t* rows, std::size_t columns, const std::uint8_t* tokens,
                           std::size_t padded, std::int32_t* sums) {
    __m512i found[ROWS][TOKENS];
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TOKENS; ++t) found[r][t] = _mm512_setzero_si512();
    const std::size_t ahead = turns_ahead(ROWS, columns);
    std::size_t c = 0;
    for (; c + STEP <= columns; c += STEP) {
        __m512i w[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            fetch(rows + r * columns + c, ahead);
            w[r] = _mm512_loadu_si512(rows + r * columns + c);
        }
        for (int t = 0; t < TOKENS; ++t) {
            const __m512i a = _mm512_loadu_si512(tokens + t * padded + c);
            for (int r = 0; r < ROWS; ++r) found[r][t] = _mm512_dpbusd_epi32(found[r][t], a, w[r]);
        }
    }
    if (c < columns) {
        const __mmask64 rest = (__mmask64(1) << (columns - c)) - 1;
        for (int r = 0; r < ROWS; ++r) {
            const __m512i w = _mm512_maskz_loadu_epi8(rest, rows + r * columns + c);
            for (int t = 0; t < TOKENS; ++t)
                found[r][t] = _mm512_dpbusd_epi32(found[r][t], _mm512_loadu_si512(tokens + t * padded + c), w);
        }
    }
    for (int t = 0; t < TOKENS; ++t)
        if constexpr (ROWS == 4) {
            const __m512i a = found[0][t], b = found[1][t], c_ = found[2][t], d = found[3][t];
            const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c_, d), _mm512_unpackhi_epi32(c_, d));
            const __m512i each = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
            const __m256i eight =
                _mm256_add_epi32(_mm512_castsi512_si256(each), _mm512_extracti64x4_epi64(each, 1));
            const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(sums + t * TILE_ROWS), four);
        } else {
            for (int r = 0; r < ROWS; ++r) sums[t * TILE_ROWS + r] = _mm512_reduce_add_epi32(found[r][t]);
        }
}
#elif defined(__AVX2__)
constexpr std::uint8_t OFFSET = 0;
constexpr int AT_ONCE = 2;

// |w| as unsigned and a with the sign of w: pairs fit 16 bits, 2 * 128 * 127 = 32512, even of the code -128.
template <int ROWS, int TOKENS>
PAGESTONE_INLINE void add(__m256i (&found)[ROWS][TOKENS], const std::int8_t* rows, std::size_t stride,
                          const std::uint8_t* tokens, std::size_t padded) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (std::size_t half = 0; half < STEP; half += 32)
        for (int r = 0; r < ROWS; ++r) {
            const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + r * stride + half));
            const __m256i size = _mm256_abs_epi8(w);
            for (int t = 0; t < TOKENS; ++t) {
                const __m256i a =
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tokens + t * padded + half));
                const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(a, w));
                found[r][t] = _mm256_add_epi32(found[r][t], _mm256_madd_epi16(pairs, ones));
            }
        }
}

template <int ROWS, int TOKENS>
PAGESTONE_INLINE void dots(const std::int8_t* rows, std::size_t columns, const std::uint8_t* tokens,
                           std::size_t padded, std::int32_t* sums) {
    __m256i found[ROWS][TOKENS];
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TOKENS; ++t) found[r][t] = _mm256_setzero_si256();
    const std::size_t ahead = turns_ahead(ROWS, columns);
    std::size_t c = 0;
    for (; c + STEP <= columns; c += STEP) {
        for (int r = 0; r < ROWS; ++r) fetch(rows + r * columns + c, ahead);
        add<ROWS, TOKENS>(found, rows + c, columns, tokens + c, padded);
    }
    if (c < columns) {
        std::int8_t tail[ROWS][STEP] = {};
        for (int r = 0; r < ROWS; ++r) std::memcpy(tail[r], rows + r * columns + c, columns - c);
        add<ROWS, TOKENS>(found, tail[0], STEP, tokens + c, padded);
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int r = 0; r < ROWS; ++r) {
            const __m256i all = found[r][t];
            const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
            const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
            sums[t * TILE_ROWS + r] = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
        }
}
#else
constexpr std::uint8_t OFFSET = 0;
constexpr int AT_ONCE = 1;

template <int ROWS, int TOKENS>
PAGESTONE_INLINE void dots(const std::int8_t* rows, std::size_t columns, const std::uint8_t* tokens,
                           std::size_t padded, std::int32_t* sums) {
    for (int t = 0; t < TOKENS; ++t)
        for (int r = 0; r < ROWS; ++r) {
            const std::int8_t* row = rows + r * columns;
            const std::int8_t* token = reinterpret_cast<const std::int8_t*>(tokens) + t * padded;
            std::int32_t sum = 0;
            for (std::size_t c = 0; c < columns; ++c) sum += std::int16_t(row[c]) * std::int16_t(token[c]);
            sums[t * TILE_ROWS + r] = sum;
        }
}
#endif

template <int TOKENS>
PAGESTONE_INLINE void rows_of_tokens(const std::int8_t* rows, std::size_t count, std::size_t columns,
                                     const std::uint8_t* tokens, std::size_t padded, std::int32_t* sums) {
    std::size_t r = 0;
    for (; r + AT_ONCE <= count; r += AT_ONCE)
        dots<AT_ONCE, TOKENS>(rows + r * columns, columns, tokens, padded, sums + r);
    for (; r < count; ++r) dots<1, TOKENS>(rows + r * columns, columns, tokens, padded, sums + r);
}

}  // namespace

std::size_t prepared_bytes_int8(const Product& p) {
    const std::size_t padded = up(p.columns, STEP);
    return scales_bytes(p) + p.tokens * padded + padded * sizeof(float);
}

bool prepare_int8(const Product& p, unsigned char* prepared) {
    const std::size_t padded = up(p.columns, STEP);
    float* scales = reinterpret_cast<float*>(prepared);
    std::uint8_t* tokens = prepared + scales_bytes(p);
    float* values = reinterpret_cast<float*>(tokens + p.tokens * padded);
    for (std::size_t t = 0; t < p.tokens; ++t) {
        if (!token_values(p, t, padded, values)) return false;
        std::uint8_t* codes = tokens + t * padded;
        scales[t] = quantise_token(values, padded, reinterpret_cast<std::int8_t*>(codes));
        if (OFFSET)
            for (std::size_t c = 0; c < padded; ++c) codes[c] = std::uint8_t(codes[c] + OFFSET);
    }
    return true;
}

std::size_t scratch_bytes_int8(const Product&) { return 0; }

void matmul_int8(const Product& p, const unsigned char* prepared, unsigned char*, std::size_t first,
                 std::size_t last) {
    const std::size_t padded = up(p.columns, STEP);
    const std::int8_t* codes = static_cast<const std::int8_t*>(p.codes);
    const float* row_scales = static_cast<const float*>(p.scales);
    const float* scales = reinterpret_cast<const float*>(prepared);
    const std::uint8_t* tokens = prepared + scales_bytes(p);
    for (; first < last; first += TILE_ROWS) {
        const std::size_t count = last - first < TILE_ROWS ? last - first : TILE_ROWS;
        const std::int8_t* tile = codes + first * p.columns;
        std::int32_t sums[AT_ONCE * TILE_ROWS];
        for (std::size_t t = 0; t < p.tokens;) {
            const std::size_t these = p.tokens - t < AT_ONCE ? 1 : AT_ONCE;
            if (these == AT_ONCE)
                rows_of_tokens<AT_ONCE>(tile, count, p.columns, tokens + t * padded, padded, sums);
            else
                rows_of_tokens<1>(tile, count, p.columns, tokens + t * padded, padded, sums);
            for (std::size_t i = 0; i < these; ++i) {
                float results[TILE_ROWS];
                for (std::size_t r = 0; r < count; ++r) {
                    const std::uint32_t extra = std::uint32_t(OFFSET) * std::uint32_t(p.row_sums[first + r]);
                    const std::int32_t sum = std::int32_t(std::uint32_t(sums[i * TILE_ROWS + r]) - extra);
                    results[r] = (float(sum) * scales[t + i]) * row_scales[first + r];
                }
                put(p, t + i, first, count, results);
            }
            t += these;
        }
    }
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
