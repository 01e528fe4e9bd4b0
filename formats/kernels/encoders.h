// The encoders of one instruction set, for table.cpp.
#pragma once

#include "common.h"

namespace pagestone {
namespace PAGESTONE_ISA {

template <class S>
Encoded encode_int8(const void* source_bits, std::int8_t* codes, float* scales, std::int32_t* row_sums,
                    std::size_t rows, std::size_t columns);

// A stored type of fp8 scales; values are positive and finite.
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

template <class S, class Scale>
Encoded encode_fp8(const void* source_bits, std::uint8_t* codes, void* scale_bits, std::size_t rows,
                   std::size_t columns);

template <class S>
Encoded encode_bf16(const void* source_bits, std::uint16_t* codes, std::size_t rows, std::size_t columns);

template <class S, int BITS, std::size_t GROUP>
Encoded encode_affine(const void* source_bits, std::uint32_t* codes, std::uint16_t* scales, std::uint16_t* biases,
                      std::size_t rows, std::size_t columns);

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
