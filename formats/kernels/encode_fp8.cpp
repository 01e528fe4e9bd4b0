// fp8: blocks of 128 x 128, s = stored(amax / 448), code = e4m3fn_rne(clamp(f32(w / s), -448, 448)).
// Definition: encodings/fp8.py.
#include "encoders.h"

namespace pagestone {
namespace PAGESTONE_ISA {
namespace {

constexpr std::size_t BLOCK = TILE;
constexpr std::size_t AT_ONCE = 16 * BLOCK;  // columns whose maxima are kept at a time

// A stored type of scales; values are positive and finite.
struct ScaleBF16 {
    using Bits = std::uint16_t;
    PAGESTONE_MEMBER Bits store(float value) {  // half to even
        const std::uint32_t bits = bit_cast<std::uint32_t>(value);
        return Bits((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
    PAGESTONE_MEMBER float load(Bits bits) { return bit_cast<float>(std::uint32_t(bits) << 16); }
};

struct ScaleF32 {
    using Bits = float;
    PAGESTONE_MEMBER Bits store(float value) { return value; }
    PAGESTONE_MEMBER float load(Bits value) { return value; }
};

// One row of a block: its codes, and its statistics into `lanes`.
//
// Rounding: a power of two m = 2^(e + 20), e the quotient's exponent but at least that of 2^-6, has 2^(e - 3) as its unit
// in the last place, which is the step of E4M3 at e, normal or subnormal. So |q| + m rounds once, half to even, straight
// to E4M3; its low bits count steps n, and the code is n + 8 * (E - 1) with E = e + 7, also where n carries to 16.
//
// The clamp of the definition is left out: |w| <= amax, and s is amax / 448 less at most 2^-8 of it, so |q| < 450, which
// rounds to 448 (464 would be the tie).
template <class S>
PAGESTONE_INLINE void quantise(const typename S::Bits* source, float scale, std::uint8_t* codes, Lanes& lanes) {
    constexpr std::uint32_t SMALLEST = (127u - 6u + 20u) << 23;  // m of 2^-6, the smallest normal E4M3 number
    constexpr std::uint32_t SIGN = 0x80000000u, EXPONENT = 0x7F800000u;
    constexpr std::uint32_t BASE = (127u - 7u + 20u) * 8u + 8u;  // m >> 20 is 8 * E plus (127 - 7 + 20) * 8
    float values[BLOCK], decoded[BLOCK];
    std::uint32_t wide[BLOCK];
    for (std::size_t i = 0; i < BLOCK; ++i) {
        const float w = S::value(source[i]);
        const std::uint32_t bits = bit_cast<std::uint32_t>(w / scale);
        const std::uint32_t sign = bits & SIGN;
        const std::uint32_t magnitude = bits & ~SIGN;
        const std::uint32_t raised = (bits & EXPONENT) + (20u << 23);
        const std::uint32_t m = raised > SMALLEST ? raised : SMALLEST;
        const float shifted = bit_cast<float>(magnitude) + bit_cast<float>(m);
        const float rounded = shifted - bit_cast<float>(m);
        wide[i] = bit_cast<std::uint32_t>(shifted) + (m >> 20) - BASE + (sign >> 24);  // m's own low byte is zero
        values[i] = w;
        decoded[i] = bit_cast<float>(bit_cast<std::uint32_t>(rounded) | sign) * scale;
    }
    for (std::size_t i = 0; i < BLOCK; ++i) codes[i] = std::uint8_t(wide[i]);
    accumulate(lanes, values, decoded);
}

// The stored scale of a block whose largest magnitude is `amax`.
template <class S, class Scale>
PAGESTONE_INLINE typename Scale::Bits block_scale(typename S::Bits amax) {
    if (amax == 0) return Scale::store(1.0f);
    const typename Scale::Bits stored = Scale::store(S::value(amax) / 448.0f);
    return Scale::load(stored) < SMALLEST_NORMAL ? Scale::store(SMALLEST_NORMAL) : stored;
}

template <class S, class Scale>
Encoded encode(const Encoding& e) {
    using Bits = typename S::Bits;
    const std::size_t rows = e.rows, columns = e.columns;
    const Bits* source = static_cast<const Bits*>(e.source);
    std::uint8_t* codes = static_cast<std::uint8_t*>(e.codes);
    typename Scale::Bits* scales = static_cast<typename Scale::Bits*>(e.scales);
    const std::size_t grid = (columns + BLOCK - 1) / BLOCK;
    Encoded total{0.0, 0.0, 0, 0};
    for (std::size_t top = 0; top < rows; top += BLOCK) {
        const std::size_t bottom = top + BLOCK < rows ? top + BLOCK : rows;
        typename Scale::Bits* strip = scales + top / BLOCK * grid;

        // Reading whole rows, not block after block: the prefetcher follows, and one element's maximum is one lane's.
        for (std::size_t left = 0; left < columns; left += AT_ONCE) {
            const std::size_t width = columns - left < AT_ONCE ? columns - left : AT_ONCE;
            Bits most[AT_ONCE] = {};
            for (std::size_t r = top; r < bottom; ++r) raise<S>(most, source + r * columns + left, width);
            for (std::size_t c = 0; c < width; c += BLOCK) {
                const Bits amax = largest<S>(most + c, BLOCK);
                if (amax >= S::INFINITE) return count_bad<S>(source, rows * columns);
                strip[(left + c) / BLOCK] = block_scale<S, Scale>(amax);
            }
        }

        // Row by row over the whole strip, so that a row's lanes stay in registers; the strip is still in the cache.
        for (std::size_t r = top; r < bottom; ++r) {
            const Bits* row = source + r * columns;
            std::uint8_t* out = codes + r * columns;
            Lanes lanes{};
            for (std::size_t b = 0; b < grid; ++b) {
                const float scale = Scale::load(strip[b]);
                const std::size_t left = b * BLOCK;
                if (left + BLOCK <= columns) {
                    quantise<S>(row + left, scale, out + left, lanes);
                } else {  // zeros beyond the end add +0 to lanes that are not negative: nothing
                    Bits padded[BLOCK] = {};
                    std::uint8_t padded_codes[BLOCK];
                    std::memcpy(padded, row + left, (columns - left) * sizeof(Bits));
                    quantise<S>(padded, scale, padded_codes, lanes);
                    std::memcpy(out + left, padded_codes, columns - left);
                }
            }
            total.squared_error += fold(lanes.error);
            total.squared_norm += fold(lanes.norm);
        }
    }
    return total;  // 448 * s never overflows: of the largest float32, s rounds down in BF16 as in F32
}

}  // namespace

Encoded encode_fp8(const Encoding& e) {
    return by_source(e, [&](auto source) {
        using S = decltype(source);
        return e.scale_type == BF16 ? encode<S, ScaleBF16>(e) : encode<S, ScaleF32>(e);
    });
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
