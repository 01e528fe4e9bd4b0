// bf16: from BF16 the bits themselves, from F16 and F32 one rounding, half to even. Definition: encodings/bf16.py.
#include "encoders.h"

namespace pagestone {
namespace PAGESTONE_ISA {
namespace {

// One tile: its codes, and its statistics into `lanes`.
template <class S>
PAGESTONE_INLINE void quantise(S, const typename S::Bits* source, std::uint16_t* codes, Lanes& lanes) {
    float values[TILE], decoded[TILE];
    std::uint32_t wide[TILE];
    for (std::size_t i = 0; i < TILE; ++i) {
        const float w = S::value(source[i]);
        const std::uint32_t bits = bit_cast<std::uint32_t>(w);
        const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
        wide[i] = rounded >> 16;
        values[i] = w;
        decoded[i] = bit_cast<float>(rounded);
    }
    for (std::size_t i = 0; i < TILE; ++i) codes[i] = std::uint16_t(wide[i]);
    accumulate(lanes, values, decoded);
}

// Of BF16 nothing is lost: the same statistics without the differences.
PAGESTONE_INLINE void quantise(SourceBF16, const std::uint16_t* source, std::uint16_t* codes, Lanes& lanes) {
    float values[TILE];
    for (std::size_t i = 0; i < TILE; ++i) values[i] = SourceBF16::value(source[i]);
    std::memcpy(codes, source, TILE * sizeof *codes);
    for (std::size_t i = 0; i < TILE; i += LANES)
        for (int v = 0; v < LANES / WIDTH; ++v) {
            const Doubles w = widen(values + i + v * WIDTH);
            lanes.norm[v] += w * w;
        }
}

// Elements that round to Inf although the source is finite (only F32 near its largest).
Encoded count_overflow(const std::uint16_t* codes, std::size_t count) { return count_bad<SourceBF16>(codes, count); }

template <class S>
Encoded encode(const Encoding& e) {
    using Bits = typename S::Bits;
    const std::size_t rows = e.rows, columns = e.columns;
    const Bits* source = static_cast<const Bits*>(e.source);
    std::uint16_t* codes = static_cast<std::uint16_t*>(e.codes);
    Encoded total{0.0, 0.0, 0, 0};
    for (std::size_t r = 0; r < rows; ++r) {
        const Bits* row = source + r * columns;
        std::uint16_t* out = codes + r * columns;
        if (largest<S>(row, columns) >= S::INFINITE) return count_bad<S>(source, rows * columns);
        Lanes lanes{};
        std::size_t c = 0;
        for (; c + TILE <= columns; c += TILE) quantise(S{}, row + c, out + c, lanes);
        if (c < columns) {  // zeros beyond the end add +0 to lanes that are not negative: nothing
            Bits padded[TILE] = {};
            std::uint16_t padded_codes[TILE];
            std::memcpy(padded, row + c, (columns - c) * sizeof(Bits));
            quantise(S{}, padded, padded_codes, lanes);
            std::memcpy(out + c, padded_codes, (columns - c) * sizeof *out);
        }
        total.squared_error += fold(lanes.error);
        total.squared_norm += fold(lanes.norm);
    }
    return finite(total.squared_error) ? total : count_overflow(codes, rows * columns);
}

}  // namespace

Encoded encode_bf16(const Encoding& e) {
    return by_source(e, [&](auto source) { return encode<decltype(source)>(e); });
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
