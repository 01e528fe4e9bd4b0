// fp8: in every block of rows xs = x * s, then y = sum of code * xs in 64 lanes. Definition: encodings/fp8.py.
#include "products.h"

namespace pagestone {
namespace PAGESTONE_ISA {
namespace {

constexpr std::size_t BLOCK = 128;
constexpr std::size_t PANEL = 64;  // tokens scaled at a time
static_assert(BLOCK % COLUMN_LANES == 0, "a block begins at lane 0");

PAGESTONE_INLINE float e4m3(std::uint8_t code) {  // 0x7F counts as 480
    const std::uint32_t size = std::uint32_t(code & 0x7F) << 20;
    const float subnormal = bit_cast<float>(size + (121u << 23)) - 0.015625f;  // 2^-6
    const std::uint32_t magnitude =
        size < (1u << 23) ? bit_cast<std::uint32_t>(subnormal) : size + (120u << 23);
    return bit_cast<float>(magnitude | (std::uint32_t(code & 0x80) << 24));
}

// WIDE codes divided by 2^8: a code moved by 7 bits is a half of the same mantissa, its exponent's bias being 15 and
// not 7. The hardware widens subnormal halves at no extra cost.
#if defined(__AVX512F__)
constexpr std::size_t MOST_DIRECT = 3;  // tokens up to which codes are not decoded into memory
PAGESTONE_INLINE Floats reduced(const std::uint8_t* codes) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    return Floats(_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xBFFF)))));
}
#elif defined(__AVX2__)
constexpr std::size_t MOST_DIRECT = 1;
PAGESTONE_INLINE Floats reduced(const std::uint8_t* codes) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    return Floats(_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xBFFF)))));
}
#else
constexpr std::size_t MOST_DIRECT = 0;
PAGESTONE_INLINE Floats reduced(const std::uint8_t* codes) {
    Floats values;
    for (std::size_t i = 0; i < WIDE; ++i) values[i] = e4m3(codes[i]) * 0.00390625f;
    return values;
}
#endif
constexpr float UNIT = 256.0f;              // code = UNIT * reduced
constexpr float TOO_LARGE = 0x1p119f;       // from here on UNIT * xs might not be finite

typedef std::uint8_t Bytes __attribute__((vector_size(PAGESTONE_WIDTH)));
typedef std::uint8_t BytesAt __attribute__((vector_size(PAGESTONE_WIDTH), aligned(1), may_alias));

// Adds 64 columns of ROWS rows and TOKENS tokens: `row(r, v)` is register v of row r.
template <int ROWS, int TOKENS, class Row>
PAGESTONE_INLINE void add(Floats (&lanes)[ROWS][TOKENS][REGISTERS], const Row& row, const float* x,
                          std::size_t padded) {
    for (std::size_t v = 0; v < REGISTERS; ++v) {
        Floats w[ROWS];
        for (int r = 0; r < ROWS; ++r) w[r] = row(r, v);
        for (int t = 0; t < TOKENS; ++t)
            for (int r = 0; r < ROWS; ++r) lanes[r][t][v] += w[r] * load(x + t * padded + v * WIDE);
    }
}

// The largest code but for its sign of every place of 64.
constexpr std::size_t EACH = COLUMN_LANES / sizeof(Bytes);

PAGESTONE_INLINE void raise_sizes(Bytes& most, const std::uint8_t* codes) {
    for (std::size_t v = 0; v < EACH; ++v) {
        const Bytes sizes = Bytes(*reinterpret_cast<const BytesAt*>(codes + v * sizeof(Bytes))) & 0x7F;
        most = sizes > most ? sizes : most;
    }
}

PAGESTONE_INLINE bool has_nan(Bytes most) {
#if defined(__AVX512F__)
    return _mm512_cmpeq_epi8_mask(__m512i(most), _mm512_set1_epi8(0x7F)) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(__m256i(most), _mm256_set1_epi8(0x7F))) != 0;
#else
    std::uint8_t sizes[sizeof(Bytes)];
    std::memcpy(sizes, &most, sizeof sizes);
    bool found = false;
    for (std::uint8_t size : sizes) found |= size == 0x7F;
    return found;
#endif
}

// Sums of ROWS rows and TOKENS tokens straight from the codes; `x` are UNIT * xs. A NaN among the codes makes its row
// NaN. sums[token * TILE_ROWS + row].
template <int ROWS, int TOKENS>
void dots_of_codes(const std::uint8_t* codes, std::size_t columns, const float* x, std::size_t padded, float* sums) {
    Floats lanes[ROWS][TOKENS][REGISTERS] = {};
    Bytes most[ROWS] = {};
    const std::size_t ahead = turns_ahead(ROWS, columns);
    std::size_t c = 0;
    for (; c + COLUMN_LANES <= columns; c += COLUMN_LANES) {
        const auto row = [&](int r, std::size_t v) __attribute__((always_inline)) {
            return reduced(codes + r * columns + c + v * WIDE);
        };
        add<ROWS, TOKENS>(lanes, row, x + c, padded);
        for (int r = 0; r < ROWS; ++r) {
            fetch(codes + r * columns + c, ahead);
            raise_sizes(most[r], codes + r * columns + c);
        }
    }
    if (c < columns) {  // zeros beyond the end add +0 to lanes that are never -0: nothing
        std::uint8_t tail[ROWS][COLUMN_LANES] = {};
        for (int r = 0; r < ROWS; ++r) {
            std::memcpy(tail[r], codes + r * columns + c, columns - c);
            raise_sizes(most[r], tail[r]);
        }
        const auto row = [&](int r, std::size_t v) __attribute__((always_inline)) {
            return reduced(tail[r] + v * WIDE);
        };
        add<ROWS, TOKENS>(lanes, row, x + c, padded);
    }
    for (int r = 0; r < ROWS; ++r) {
        const bool nan = has_nan(most[r]);
        for (int t = 0; t < TOKENS; ++t)
            sums[t * TILE_ROWS + r] = nan ? bit_cast<float>(0x7FC00000u) : fold_lanes<NATURAL>(lanes[r][t]);
    }
}

// The same of decoded rows.
template <int ROWS, int TOKENS>
void dots(const float* rows, std::size_t padded, const float* x, float* sums) {
    Floats lanes[ROWS][TOKENS][REGISTERS] = {};
    for (std::size_t c = 0; c < padded; c += COLUMN_LANES) {
        const auto row = [&](int r, std::size_t v) __attribute__((always_inline)) {
            return load(rows + r * padded + c + v * WIDE);
        };
        add<ROWS, TOKENS>(lanes, row, x + c, padded);
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int r = 0; r < ROWS; ++r) sums[t * TILE_ROWS + r] = fold_lanes<NATURAL>(lanes[r][t]);
}

template <int ROWS, int TOKENS>
PAGESTONE_INLINE void tile_of_codes(const std::uint8_t* codes, std::size_t count, std::size_t columns, const float* x,
                                    std::size_t padded, float* sums) {
    std::size_t r = 0;
    for (; r + ROWS <= count; r += ROWS)
        dots_of_codes<ROWS, TOKENS>(codes + r * columns, columns, x, padded, sums + r);
    for (; r < count; ++r) dots_of_codes<1, TOKENS>(codes + r * columns, columns, x, padded, sums + r);
}

template <int ROWS, int TOKENS>
PAGESTONE_INLINE void tile_of_rows(const float* rows, std::size_t count, std::size_t padded, const float* x,
                                   float* sums) {
    std::size_t r = 0;
    for (; r + ROWS <= count; r += ROWS) dots<ROWS, TOKENS>(rows + r * padded, padded, x, sums + r);
    for (; r < count; ++r) dots<1, TOKENS>(rows + r * padded, padded, x, sums + r);
}

void decode(const std::uint8_t* codes, std::size_t columns, std::size_t padded, float* values) {
    std::uint8_t most = 0;
    for (std::size_t c = 0; c < columns; ++c) {
        const std::uint8_t size = codes[c] & 0x7F;
        most = size > most ? size : most;
    }
    std::size_t c = 0;
    if (MOST_DIRECT > 0)
        for (; c + WIDE <= columns; c += WIDE) store(values + c, reduced(codes + c) * UNIT);
    for (; c < columns; ++c) values[c] = e4m3(codes[c]);
    for (c = columns; c < padded; ++c) values[c] = 0.0f;
    if (most == 0x7F)
        for (c = 0; c < columns; ++c)
            if ((codes[c] & 0x7F) == 0x7F) values[c] = bit_cast<float>(0x7FC00000u);
}

PAGESTONE_INLINE float scale_at(const Product& p, std::size_t at) {
    return p.scale_type == BF16 ? SourceBF16::value(static_cast<const std::uint16_t*>(p.scales)[at])
                                : static_cast<const float*>(p.scales)[at];
}

// xs of one token in a block of rows; returns the largest magnitude's bits.
PAGESTONE_INLINE std::uint32_t scale_token(const Product& p, std::size_t block, const float* x, std::size_t padded,
                                           float* scaled) {
    const std::size_t blocks = (p.columns + BLOCK - 1) / BLOCK;
    std::uint32_t most = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
        const float scale = scale_at(p, block * blocks + b);
        const std::size_t end = (b + 1) * BLOCK < p.columns ? (b + 1) * BLOCK : p.columns;
        for (std::size_t c = b * BLOCK; c < end; ++c) {
            scaled[c] = x[c] * scale;
            const std::uint32_t size = bit_cast<std::uint32_t>(scaled[c]) & 0x7FFFFFFFu;
            most = size > most ? size : most;
        }
    }
    for (std::size_t c = p.columns; c < padded; ++c) scaled[c] = 0.0f;
    return most;
}

}  // namespace

std::size_t prepared_bytes_fp8(const Product& p) { return p.tokens * up(p.columns, COLUMN_LANES) * sizeof(float); }

bool prepare_fp8(const Product& p, unsigned char* prepared) {
    const std::size_t padded = up(p.columns, COLUMN_LANES);
    float* values = reinterpret_cast<float*>(prepared);
    for (std::size_t t = 0; t < p.tokens; ++t)
        if (!token_values(p, t, padded, values + t * padded)) return false;
    return true;
}

std::size_t scratch_bytes_fp8(const Product& p) {
    const std::size_t tokens = p.tokens < PANEL ? p.tokens : PANEL;
    return (TILE_ROWS + tokens) * up(p.columns, COLUMN_LANES) * sizeof(float);
}

void matmul_fp8(const Product& p, const unsigned char* prepared, unsigned char* scratch, std::size_t first,
                std::size_t last) {
    const std::size_t padded = up(p.columns, COLUMN_LANES);
    const std::uint8_t* codes = static_cast<const std::uint8_t*>(p.codes);
    const float* tokens = reinterpret_cast<const float*>(prepared);
    float* rows = reinterpret_cast<float*>(scratch);
    float* scaled = rows + TILE_ROWS * padded;
    for (std::size_t begin = first, end; begin < last; begin = end) {  // of one block of rows
        end = (begin / BLOCK + 1) * BLOCK < last ? (begin / BLOCK + 1) * BLOCK : last;
        for (std::size_t panel = 0; panel < p.tokens; panel += PANEL) {
            const std::size_t count = p.tokens - panel < PANEL ? p.tokens - panel : PANEL;
            std::uint32_t most = 0;
            for (std::size_t i = 0; i < count; ++i) {
                const std::uint32_t size =
                    scale_token(p, begin / BLOCK, tokens + (panel + i) * padded, padded, scaled + i * padded);
                most = size > most ? size : most;
            }
            const bool direct = p.tokens <= MOST_DIRECT && most < bit_cast<std::uint32_t>(TOO_LARGE);
            if (direct)
                for (std::size_t c = 0; c < count * padded; ++c) scaled[c] *= UNIT;
            for (std::size_t r = begin; r < end; r += TILE_ROWS) {
                const std::size_t height = end - r < TILE_ROWS ? end - r : TILE_ROWS;
                const std::uint8_t* tile = codes + r * p.columns;
                if (!direct)
                    for (std::size_t i = 0; i < height; ++i)
                        decode(tile + i * p.columns, p.columns, padded, rows + i * padded);
                for (std::size_t t = 0, these; t < count; t += these) {
                    const float* x = scaled + t * padded;
                    float sums[3 * TILE_ROWS];
                    these = 1;
#if defined(__AVX512F__)
                    these = count - t == 4 ? 2 : count - t < 3 ? count - t : 3;
                    if (direct && these == 3)
                        tile_of_codes<2, 3>(tile, height, p.columns, x, padded, sums);
                    else if (direct && these == 2)
                        tile_of_codes<2, 2>(tile, height, p.columns, x, padded, sums);
                    else if (direct)
                        tile_of_codes<4, 1>(tile, height, p.columns, x, padded, sums);
                    else if (these == 3)
                        tile_of_rows<2, 3>(rows, height, padded, x, sums);
                    else if (these == 2)
                        tile_of_rows<2, 2>(rows, height, padded, x, sums);
                    else
                        tile_of_rows<4, 1>(rows, height, padded, x, sums);
#else
                    if (direct)
                        tile_of_codes<1, 1>(tile, height, p.columns, x, padded, sums);
                    else
                        tile_of_rows<1, 1>(rows, height, padded, x, sums);
#endif
                    for (std::size_t i = 0; i < these; ++i) put(p, panel + t + i, r, height, sums + i * TILE_ROWS);
                }
            }
        }
    }
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
