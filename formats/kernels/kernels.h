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

// source [rows, columns]; codes [rows, columns], BF16 bits.
using EncodeBf16 = Encoded (*)(const void* source, std::uint16_t* codes, std::size_t rows, std::size_t columns);

// source [rows, columns], columns a multiple of the group; codes [rows, columns * bits / 32]; scales and biases
// [rows, columns / group], BF16 bits.
using EncodeAffine = Encoded (*)(const void* source, std::uint32_t* codes, std::uint16_t* scales,
                                 std::uint16_t* biases, std::size_t rows, std::size_t columns);

// What an affine kernel is compiled for: [bits - 3][group == 64].
constexpr int AFFINE_BITS = 2, AFFINE_GROUPS = 2;

// One product y = x W^T: x [tokens, columns] BF16 or F16, y [tokens, rows] of any type. What a codec does not have is null
// or zero. Shapes and alignment to the element are the caller's to check.
struct Product {
    const void* x;
    Source x_type;
    std::size_t tokens, columns, rows;
    const void* codes;
    const void* scales;
    Source scale_type;             // of fp8: BF16 or F32
    const std::uint16_t* biases;   // of q3 and q4
    const std::int32_t* row_sums;  // of int8
    std::size_t bits, group;       // of q3 and q4
    void* y;
    Source y_type;
};

// How a codec is multiplied. `prepare` turns the tokens into what all rows need, once a product, into `prepared`, which
// holds `prepared_bytes`; false, and nothing else, if one is NaN or Inf. `multiply` computes the rows [first, last) of
// every token, with `scratch_bytes` of scratch of its own. Both buffers are aligned to 64. Any split of the rows gives
// the same bits.
struct Multiply {
    std::size_t (*prepared_bytes)(const Product&);
    bool (*prepare)(const Product&, unsigned char* prepared);
    std::size_t (*scratch_bytes)(const Product&);
    void (*multiply)(const Product&, const unsigned char* prepared, unsigned char* scratch, std::size_t first,
                     std::size_t last);
};

// Reads `count` bytes once and returns something that depends on all of them: what a product is measured against.
using ReadBytes = std::uint64_t (*)(const unsigned char* bytes, std::size_t count);

// Every kernel of one instruction set.
struct Table {
    const char* name;
    EncodeInt8 encode_int8[SOURCES];
    EncodeFp8 encode_fp8_bf16_scales[SOURCES];
    EncodeFp8 encode_fp8_f32_scales[SOURCES];
    EncodeBf16 encode_bf16[SOURCES];
    EncodeAffine encode_affine[SOURCES][AFFINE_BITS][AFFINE_GROUPS];
    Multiply matmul_bf16, matmul_fp8, matmul_int8, matmul_affine;
    ReadBytes read_bytes;
};

namespace scalar { extern const Table table; }
#if defined(__x86_64__)
namespace avx2 { extern const Table table; }
namespace avx512 { extern const Table table; }
#endif

}  // namespace pagestone
