// What crosses the border between the bindings (compiled once) and the kernels (compiled once per instruction set).
// Plain data only: an inline function here would be merged by the linker across instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagestone {

// Result of an encoder over one matrix. If `bad` is not zero, `first_bad` is the flat index of the first element that
// is NaN or Inf (or whose decoded value would be Inf), and everything else, the output arrays too, is unspecified.
struct Encoded {
    double squared_error;
    double squared_norm;
    std::int64_t bad;
    std::int64_t first_bad;
};

// Bits of a BF16, F16 and F32 source element. BF16 and F16 share a C type, so kernels are told apart by name.
enum Source { BF16 = 0, F16 = 1, F32 = 2 };
constexpr int SOURCES = 3;

// source [rows, columns]; codes [rows, columns]; scales [rows]; row_sums [rows] or null.
using EncodeInt8 = Encoded (*)(const void* source, std::int8_t* codes, float* scales, std::int32_t* row_sums,
                               std::size_t rows, std::size_t columns);

// source [rows, columns]; codes [rows, columns]; scales [ceil(rows/128), ceil(columns/128)], BF16 bits or F32.
using EncodeFp8 = Encoded (*)(const void* source, std::uint8_t* codes, void* scales, std::size_t rows,
                              std::size_t columns);

// Every kernel of one instruction set.
struct Table {
    const char* name;
    EncodeInt8 encode_int8[SOURCES];
    EncodeFp8 encode_fp8_bf16_scales[SOURCES];
    EncodeFp8 encode_fp8_f32_scales[SOURCES];
};

namespace scalar { extern const Table table; }
#if defined(__x86_64__)
namespace avx2 { extern const Table table; }
namespace avx512 { extern const Table table; }
#endif

}  // namespace pagestone
