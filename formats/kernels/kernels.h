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

// Bits of a BF16, F16 and F32 element. BF16 and F16 share a C type, so they are told apart by name.
enum Source { BF16 = 0, F16 = 1, F32 = 2 };

// One matrix to encode: source [rows, columns] of any type, into arrays of the codec's types and shapes. What a codec
// does not have is null or zero. Types, shapes and alignment to the element are the caller's to check.
struct Encoding {
    const void* source;
    Source source_type;
    std::size_t rows, columns;
    void* codes;
    void* scales;
    Source scale_type;        // of fp8: BF16 or F32
    std::uint16_t* biases;    // of q3, q4 and q8: BF16 bits
    std::int32_t* row_sums;   // of int8, if they are asked for
    std::size_t bits, group;  // of q3, q4 and q8
};

using Encode = Encoded (*)(const Encoding&);

// One product y = x W^T: x [tokens, columns] BF16 or F16, y [tokens, rows] of any type. What a codec does not have is null
// or zero. Shapes and alignment to the element are the caller's to check.
struct Product {
    const void* x;
    Source x_type;
    std::size_t tokens, columns, rows;
    const void* codes;
    const void* scales;
    Source scale_type;             // of fp8: BF16 or F32
    const std::uint16_t* biases;   // of q3, q4 and q8
    const std::int32_t* row_sums;  // of int8
    std::size_t bits, group;       // of q3, q4 and q8
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

// The kernels, each named once: encode_X of encode_X.cpp, matmul_X of matmul_X.cpp (with what `Multiply` holds beside it).
#define PAGESTONE_ENCODERS(EACH) EACH(affine) EACH(bf16) EACH(fp8) EACH(int8)
#define PAGESTONE_PRODUCTS(EACH) EACH(affine) EACH(bf16) EACH(fp8) EACH(int8)

// Every kernel of one instruction set.
struct Table {
    const char* name;
#define PAGESTONE_FIELD(codec) Encode encode_##codec;
    PAGESTONE_ENCODERS(PAGESTONE_FIELD)
#undef PAGESTONE_FIELD
#define PAGESTONE_FIELD(codec) Multiply matmul_##codec;
    PAGESTONE_PRODUCTS(PAGESTONE_FIELD)
#undef PAGESTONE_FIELD
    ReadBytes read_bytes;
};

namespace scalar { extern const Table table; }
#if defined(__x86_64__)
namespace avx2 { extern const Table table; }
namespace avx512 { extern const Table table; }
#endif

}  // namespace pagestone
