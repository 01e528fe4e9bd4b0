// int8: one scale per row, s = f32(amax / 127), code = clamp(rne(f32(w / s)), -127, 127). Definition: encodings/int8.py.
#include "encoders.h"

namespace pagestone {
namespace PAGESTONE_ISA {
namespace {

// One tile: its codes, its statistics into `lanes`. Returns the sum of its codes.
// The clamp of the definition is left out: |w| <= amax and s >= (amax / 127) * (1 - 2^-24), so |rne(w / s)| <= 127.
template <class S>
PAGESTONE_INLINE std::int32_t quantise(const typename S::Bits* source, float scale, std::int8_t* codes, Lanes& lanes) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds |x| < 2^22 half to even
    float values[TILE], decoded[TILE];
    std::uint32_t sum = 0;
    for (std::size_t i = 0; i < TILE; ++i) {
        const float w = S::value(source[i]);
        const float shifted = w / scale + MAGIC;
        const std::uint32_t bits = bit_cast<std::uint32_t>(shifted);  // MAGIC's own bits plus the code
        codes[i] = std::int8_t(bits);
        sum += bits;
        values[i] = w;
        decoded[i] = (shifted - MAGIC) * scale;
    }
    accumulate(lanes, values, decoded);
    return std::int32_t(sum - std::uint32_t(TILE) * bit_cast<std::uint32_t>(MAGIC));
}

// Elements whose decoded value overflows although the source is finite (only near the largest float).
Encoded count_overflow(const std::int8_t* codes, const float* scales, std::size_t rows, std::size_t columns) {
    Encoded result{0.0, 0.0, 0, 0};
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < columns; ++c)
            if (!finite(float(codes[r * columns + c]) * scales[r]) && result.bad++ == 0)
                result.first_bad = std::int64_t(r * columns + c);
    return result;
}

template <class S>
Encoded encode(const Encoding& e) {
    using Bits = typename S::Bits;
    const std::size_t rows = e.rows, columns = e.columns;
    const Bits* source = static_cast<const Bits*>(e.source);
    std::int8_t* codes = static_cast<std::int8_t*>(e.codes);
    float* scales = static_cast<float*>(e.scales);
    std::int32_t* row_sums = e.row_sums;
    Encoded total{0.0, 0.0, 0, 0};
    for (std::size_t r = 0; r < rows; ++r) {
        const Bits* row = source + r * columns;
        std::int8_t* out = codes + r * columns;
        const Bits most = largest<S>(row, columns);
        if (most >= S::INFINITE) return count_bad<S>(source, rows * columns);
        float scale = S::value(most) / 127.0f;
        scale = scale < SMALLEST_NORMAL ? SMALLEST_NORMAL : scale;
        scale = most == 0 ? 1.0f : scale;
        scales[r] = scale;

        Lanes lanes{};
        std::int32_t sum = 0;
        std::size_t c = 0;
        for (; c + TILE <= columns; c += TILE) sum += quantise<S>(row + c, scale, out + c, lanes);
        if (c < columns) {  // zeros beyond the end add +0 to lanes that are not negative: nothing
            Bits padded[TILE] = {};
            std::int8_t padded_codes[TILE];
            std::memcpy(padded, row + c, (columns - c) * sizeof(Bits));
            sum += quantise<S>(padded, scale, padded_codes, lanes);
            std::memcpy(out + c, padded_codes, columns - c);
        }
        if (row_sums) row_sums[r] = sum;
        total.squared_error += fold(lanes.error);
        total.squared_norm += fold(lanes.norm);
    }
    return finite(total.squared_error) ? total : count_overflow(codes, scales, rows, columns);
}

}  // namespace

Encoded encode_int8(const Encoding& e) {
    return by_source(e, [&](auto source) { return encode<decltype(source)>(e); });
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
