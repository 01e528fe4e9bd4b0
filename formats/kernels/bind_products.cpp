// Python's side of the products y = x W^T: checks types, shapes and addresses, releases the GIL, splits the rows.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <string>

#include "checks.h"
#include "cpu.h"
#include "pool.h"

using namespace nb::literals;
using namespace pagestone;

namespace {

// What all products share: tokens, codes, result.
Product product(const Input& x, const Input& codes, nb::dlpack::dtype code_type, const Result& y) {
    Product p{};
    expect_array("x", x, {U16, HALF}, 2);
    expect_array("codes", codes, {code_type}, 2);
    p.x = x.data(), p.x_type = source_of(x.dtype());
    p.tokens = x.shape(0), p.columns = x.shape(1), p.rows = codes.shape(0);
    p.codes = codes.data();
    expect_matrix("out", y, {FLOAT, U16, HALF}, p.tokens, p.rows);
    p.y = y.data(), p.y_type = source_of(y.dtype());
    return p;
}

struct Call {
    const Product* product;
    const Multiply* kernel;
    const unsigned char* prepared;
    unsigned char* scratch;
    std::size_t scratch_bytes, rows;
};

void multiply_rows(void* context, std::size_t slot, std::size_t index) {
    const Call& call = *static_cast<const Call*>(context);
    const std::size_t first = index * call.rows, last = std::min(first + call.rows, call.product->rows);
    call.kernel->multiply(*call.product, call.prepared, call.scratch + slot * call.scratch_bytes, first, last);
}

constexpr std::size_t ROWS_TOGETHER = 32;  // rows are handed out in multiples of this
constexpr std::size_t TURNS = 4;           // as often a thread takes some, so that a slow one takes fewer

std::size_t share(std::size_t count, std::size_t threads, std::size_t step) {
    if (threads <= 1) return std::max<std::size_t>(count, 1);
    const std::size_t each = (count + threads * TURNS - 1) / (threads * TURNS);
    return std::max(step, (each + step - 1) / step * step);
}

// False if a token is NaN or Inf.
bool run(const Product& p, Multiply Table::*kernel, std::size_t threads) {
    if (threads < 1) throw nb::value_error("threads expected to be at least 1, found 0");
    const nb::gil_scoped_release released;
    const PlainFloats plain;
    Call call{};
    call.product = &p, call.kernel = &(chosen().load()->*kernel);
    unsigned char* prepared = buffer(PREPARED, call.kernel->prepared_bytes(p));
    if (!call.kernel->prepare(p, prepared)) return false;
    call.prepared = prepared;
    call.rows = share(p.rows, threads, ROWS_TOGETHER);
    call.scratch_bytes = (call.kernel->scratch_bytes(p) + 63) / 64 * 64;
    call.scratch = buffer(SCRATCH, call.scratch_bytes * threads);
    parallel(threads, (p.rows + call.rows - 1) / call.rows, multiply_rows, &call);
    return true;
}

bool matmul_bf16(Input x, Input codes, Result out, std::size_t threads) {
    const Product p = product(x, codes, U16, out);
    expect("codes", "columns", codes.shape(1), p.columns);
    return run(p, &Table::matmul_bf16, threads);
}

bool matmul_fp8(Input x, Input codes, Input scales, Result out, std::size_t threads) {
    Product p = product(x, codes, U8, out);
    expect("codes", "columns", codes.shape(1), p.columns);
    expect_matrix("scales", scales, {U16, FLOAT}, blocks(p.rows), blocks(p.columns));
    p.scales = scales.data(), p.scale_type = source_of(scales.dtype());
    return run(p, &Table::matmul_fp8, threads);
}

bool matmul_int8(Input x, Input codes, Input scales, Input row_sums, Result out, std::size_t threads) {
    constexpr std::size_t MOST_COLUMNS = 1 << 17;  // sums of 127 * 128 fit 32 bits
    Product p = product(x, codes, I8, out);
    expect("codes", "columns", codes.shape(1), p.columns);
    if (p.columns > MOST_COLUMNS)
        throw nb::value_error(("x: columns expected to be at most " + std::to_string(MOST_COLUMNS) + ", found " +
                               std::to_string(p.columns))
                                  .c_str());
    expect_matrix("scales", scales, {FLOAT}, p.rows, 1);
    expect_array("row_sums", row_sums, {I32}, 1);
    expect("row_sums", "length", row_sums.shape(0), p.rows);
    p.scales = scales.data(), p.row_sums = static_cast<const std::int32_t*>(row_sums.data());
    return run(p, &Table::matmul_int8, threads);
}

bool matmul_affine(Input x, Input codes, Input scales, Input biases, Result out, std::size_t bits,
                   std::size_t group, std::size_t threads) {
    Product p = product(x, codes, U32, out);
    expect_bits_and_group(bits, group);
    expect_groups("x", p.columns, group);
    expect("codes", "columns", codes.shape(1), p.columns / 32 * bits);
    expect_matrix("scales", scales, {U16}, p.rows, p.columns / group);
    expect_matrix("biases", biases, {U16}, p.rows, p.columns / group);
    p.scales = scales.data(), p.biases = static_cast<const std::uint16_t*>(biases.data());
    p.bits = bits, p.group = group;
    return run(p, &Table::matmul_affine, threads);
}

struct Reading {
    const unsigned char* bytes;
    std::size_t count, each;
    std::uint64_t* found;
};

std::uint64_t read_bytes(Input bytes, std::size_t threads) {
    expect_array("bytes", bytes, {U8}, 1);
    if (threads < 1) throw nb::value_error("threads expected to be at least 1, found 0");
    const nb::gil_scoped_release released;
    Reading reading{static_cast<const unsigned char*>(bytes.data()), bytes.shape(0), 0, nullptr};
    reading.each = share(reading.count, threads, 4096);
    const std::size_t parts = (reading.count + reading.each - 1) / reading.each;
    reading.found = reinterpret_cast<std::uint64_t*>(buffer(SCRATCH, parts * sizeof(std::uint64_t)));
    parallel(
        threads, parts,
        [](void* context, std::size_t, std::size_t i) {
            const Reading& r = *static_cast<const Reading*>(context);
            const std::size_t count = std::min(r.each, r.count - i * r.each);
            r.found[i] = chosen().load()->read_bytes(r.bytes + i * r.each, count);
        },
        &reading);
    std::uint64_t all = 0;
    for (std::size_t i = 0; i < parts; ++i) all ^= reading.found[i];
    return all;
}

}  // namespace

void bind_products(nb::module_& m) {
    m.def("matmul_bf16", &matmul_bf16, "x"_a.noconvert(), "codes"_a.noconvert(), "out"_a.noconvert(), "threads"_a = 1,
          "out [M, R] = x W^T of tokens x [M, C] (uint16 = BF16 bits, float16) and BF16 bits uint16 [R, C]; out is "
          "float32, uint16 (BF16 bits) or float16. Returns False, out unspecified, if a token is NaN or Inf.");
    m.def("matmul_fp8", &matmul_fp8, "x"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert(),
          "out"_a.noconvert(), "threads"_a = 1,
          "As matmul_bf16, of E4M3 codes uint8 [R, C] and scales uint16 (BF16 bits) or float32 "
          "[ceil(R/128), ceil(C/128)].");
    m.def("matmul_int8", &matmul_int8, "x"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert(),
          "row_sums"_a.noconvert(), "out"_a.noconvert(), "threads"_a = 1,
          "As matmul_bf16, of codes int8 [R, C], scales float32 [R, 1] and the codes' row sums int32 [R].");
    m.def("matmul_affine", &matmul_affine, "x"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert(),
          "biases"_a.noconvert(), "out"_a.noconvert(), "bits"_a, "group"_a, "threads"_a = 1,
          "As matmul_bf16, of packed codes uint32 [R, C * bits / 32], scales and biases uint16 (BF16 bits) "
          "[R, C / group].");
    m.def("read_bytes", &read_bytes, "bytes"_a.noconvert(), "threads"_a = 1,
          "Reads uint8 [N] once and returns the exclusive or of a sort of all of it: what products are measured "
          "against.");
}
