// bf16: y = sum of w * x in 64 lanes. Definition: encodings/bf16.py.
#include "products.h"

namespace pagestone {
namespace PAGESTONE_ISA {
namespace {

constexpr std::uint32_t UPPER = 0xFFFF0000u;
constexpr std::size_t SHORT_ROW = 1024;  // below, four rows at a time would be read from one page, out of order

// Sums of ROWS rows and TOKENS tokens, straight from the codes, which a shift or a mask decodes: keeping decoded rows
// would save nothing. sums[token * TILE_ROWS + row].
template <int ROWS, int TOKENS>
PAGESTONE_INLINE void add(Floats (&lanes)[ROWS][TOKENS][REGISTERS], const std::uint16_t* codes, std::size_t stride,
                          const float* x, std::size_t padded) {
    for (std::size_t v = 0; v < REGISTERS; v += 2) {
        Floats even[ROWS], odd[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            const Words pairs = load_words(codes + r * stride + v * WIDE);
            even[r] = Floats(pairs << 16);
            odd[r] = Floats(pairs & UPPER);
        }
        for (int t = 0; t < TOKENS; ++t) {
            const Floats x_even = load(x + t * padded + v * WIDE), x_odd = load(x + t * padded + (v + 1) * WIDE);
            for (int r = 0; r < ROWS; ++r) {
                lanes[r][t][v] += even[r] * x_even;
                lanes[r][t][v + 1] += odd[r] * x_odd;
            }
        }
    }
}

template <int ROWS, int TOKENS>
void dots_of_codes(const std::uint16_t* codes, std::size_t columns, const float* x, std::size_t padded, float* sums) {
    Floats lanes[ROWS][TOKENS][REGISTERS] = {};
    const std::size_t ahead = turns_ahead(ROWS, columns * sizeof *codes);
    std::size_t c = 0;
    for (; c + COLUMN_LANES <= columns; c += COLUMN_LANES) {
        for (int r = 0; r < ROWS; ++r) {
            fetch(codes + r * columns + c, ahead);
            fetch(codes + r * columns + c + COLUMN_LANES / 2, ahead);
        }
        add<ROWS, TOKENS>(lanes, codes + c, columns, x + c, padded);
    }
    if (c < columns) {  // zeros beyond the end add +0 to lanes that are never -0: nothing
        std::uint16_t tail[ROWS][COLUMN_LANES] = {};
        for (int r = 0; r < ROWS; ++r) std::memcpy(tail[r], codes + r * columns + c, (columns - c) * sizeof **tail);
        add<ROWS, TOKENS>(lanes, tail[0], COLUMN_LANES, x + c, padded);
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int r = 0; r < ROWS; ++r) sums[t * TILE_ROWS + r] = fold_lanes<PAIRS>(lanes[r][t]);
}

template <int ROWS, int TOKENS>
PAGESTONE_INLINE void tile_of_codes(const std::uint16_t* codes, std::size_t count, std::size_t columns, const float* x,
                                    std::size_t padded, float* sums) {
    std::size_t r = 0;
    for (; r + ROWS <= count; r += ROWS)
        dots_of_codes<ROWS, TOKENS>(codes + r * columns, columns, x, padded, sums + r);
    for (; r < count; ++r) dots_of_codes<1, TOKENS>(codes + r * columns, columns, x, padded, sums + r);
}

}  // namespace

std::size_t prepared_bytes_bf16(const Product& p) {
    return (p.tokens + 1) * up(p.columns, COLUMN_LANES) * sizeof(float);
}

bool prepare_bf16(const Product& p, unsigned char* prepared) {
    const std::size_t padded = up(p.columns, COLUMN_LANES);
    float* values = reinterpret_cast<float*>(prepared);
    float* natural = values + p.tokens * padded;
    for (std::size_t t = 0; t < p.tokens; ++t, values += padded) {
        if (!token_values(p, t, padded, natural)) return false;
        for (std::size_t c = 0; c < padded; c += 2 * WIDE)
            for (std::size_t i = 0; i < WIDE; ++i) {
                values[c + i] = natural[c + 2 * i];
                values[c + WIDE + i] = natural[c + 2 * i + 1];
            }
    }
    return true;
}

std::size_t scratch_bytes_bf16(const Product&) { return 0; }

void matmul_bf16(const Product& p, const unsigned char* prepared, unsigned char*, std::size_t first,
                 std::size_t last) {
    const std::size_t padded = up(p.columns, COLUMN_LANES);
    const std::uint16_t* codes = static_cast<const std::uint16_t*>(p.codes);
    for (; first < last; first += TILE_ROWS) {
        const std::size_t count = last - first < TILE_ROWS ? last - first : TILE_ROWS;
        const std::uint16_t* tile = codes + first * p.columns;
        for (std::size_t t = 0, these; t < p.tokens; t += these) {
            const float* x = reinterpret_cast<const float*>(prepared) + t * padded;
            float sums[3 * TILE_ROWS];
            these = 1;
#if defined(__AVX512F__)
            these = p.tokens - t == 4 ? 2 : p.tokens - t < 3 ? p.tokens - t : 3;
            if (these == 3)
                tile_of_codes<2, 3>(tile, count, p.columns, x, padded, sums);
            else if (these == 2)
                tile_of_codes<2, 2>(tile, count, p.columns, x, padded, sums);
            else if (p.columns < SHORT_ROW)
                tile_of_codes<1, 1>(tile, count, p.columns, x, padded, sums);
            else
                tile_of_codes<4, 1>(tile, count, p.columns, x, padded, sums);
#else
            tile_of_codes<1, 1>(tile, count, p.columns, x, padded, sums);
#endif
            for (std::size_t i = 0; i < these; ++i) put(p, t + i, first, count, sums + i * TILE_ROWS);
        }
    }
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
