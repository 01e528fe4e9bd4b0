// Python's side of the encoders: checks types, shapes and addresses, releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "checks.h"
#include "cpu.h"
#include "pool.h"

using namespace nb::literals;
using namespace pagestone;

namespace {

using Matrix = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// What all encoders share: the source, and codes of `code_columns` a row.
Encoding encoding(const Weights& source, const Matrix& codes, nb::dlpack::dtype code_type, std::size_t code_columns) {
    Encoding e{};
    expect_array("source", source, {U16, HALF, FLOAT}, 2);
    e.source = source.data(), e.source_type = source_of(source.dtype());
    e.rows = source.shape(0), e.columns = source.shape(1);
    expect_matrix("codes", codes, {code_type}, e.rows, code_columns);
    e.codes = codes.data();
    return e;
}

// (squared error, squared norm, count of bad elements, flat index of the first): what every encoder returns, called
// without the GIL and with the floats of the definition.
nb::tuple run(const Encoding& e, Encode Table::*kernel) {
    Encoded found;
    {
        const nb::gil_scoped_release released;
        const PlainFloats plain;
        found = (chosen().load()->*kernel)(e);
    }
    return nb::make_tuple(found.squared_error, found.squared_norm, found.bad, found.first_bad);
}

nb::tuple encode_bf16(Weights source, Matrix codes) {
    return run(encoding(source, codes, U16, source.shape(1)), &Table::encode_bf16);
}

nb::tuple encode_fp8(Weights source, Matrix codes, Matrix scales) {
    Encoding e = encoding(source, codes, U8, source.shape(1));
    expect_matrix("scales", scales, {U16, FLOAT}, blocks(e.rows), blocks(e.columns));
    e.scales = scales.data(), e.scale_type = source_of(scales.dtype());
    return run(e, &Table::encode_fp8);
}

nb::tuple encode_int8(Weights source, Matrix codes, Matrix scales, std::optional<Vector> row_sums) {
    Encoding e = encoding(source, codes, I8, source.shape(1));
    expect_matrix("scales", scales, {FLOAT}, e.rows, 1);
    e.scales = scales.data();
    if (row_sums) {
        expect_array("row_sums", *row_sums, {I32}, 1);
        expect("row_sums", "length", row_sums->shape(0), e.rows);
        e.row_sums = static_cast<std::int32_t*>(row_sums->data());
    }
    return run(e, &Table::encode_int8);
}

nb::tuple encode_affine(Weights source, Matrix codes, Matrix scales, Matrix biases, std::size_t bits,
                        std::size_t group) {
    expect_bits_and_group(bits, group);
    expect_groups("source", source.shape(1), group);
    Encoding e = encoding(source, codes, U32, source.shape(1) / 32 * bits);
    expect_matrix("scales", scales, {U16}, e.rows, e.columns / group);
    expect_matrix("biases", biases, {U16}, e.rows, e.columns / group);
    e.scales = scales.data(), e.biases = static_cast<std::uint16_t*>(biases.data());
    e.bits = bits, e.group = group;
    return run(e, &Table::encode_affine);
}

}  // namespace

void bind_encoders(nb::module_& m) {
    m.def("encode_bf16", &encode_bf16, "source"_a.noconvert(), "codes"_a.noconvert(),
          "BF16 bits uint16 [R, C] of source [R, C] (uint16 = BF16 bits, float16, float32), rounded once, half to "
          "even. Returns (squared error, squared norm, count of bad elements, flat index of the first).");
    m.def("encode_fp8", &encode_fp8, "source"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert(),
          "As encode_bf16: E4M3 codes uint8 [R, C] and scales uint16 (BF16 bits) or float32 "
          "[ceil(R/128), ceil(C/128)].");
    m.def("encode_int8", &encode_int8, "source"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert(),
          "row_sums"_a.noconvert() = nb::none(),
          "As encode_bf16: int8 codes [R, C], scales float32 [R, 1], and row sums int32 [R] if they are asked for.");
    m.def("encode_affine", &encode_affine, "source"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert(),
          "biases"_a.noconvert(), "bits"_a, "group"_a,
          "As encode_bf16: packed codes uint32 [R, C * bits / 32], scales and biases uint16 (BF16 bits) "
          "[R, C / group].");
}
