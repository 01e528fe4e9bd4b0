// Python's side of the kernels: checks types and shapes, releases the GIL, calls the chosen instruction set's table.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "checks.h"
#include "cpu.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace pagestone;

void bind_products(nb::module_& m);  // bind_products.cpp

namespace {

struct half {};  // numpy.float16, for the type check only

template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class Array>
void expect_shape(const char* name, const Array& array, std::size_t rows, std::size_t columns) {
    expect_aligned(name, array);
    expect(name, "rows", array.shape(0), rows);
    expect(name, "columns", array.shape(1), columns);
}

nb::tuple result(const Encoded& encoded) {
    return nb::make_tuple(encoded.squared_error, encoded.squared_norm, encoded.bad, encoded.first_bad);
}

// What an encoder returns, called without the GIL and with the floats of the definition.
template <class Call>
Encoded encoded(const Call& call) {
    const nb::gil_scoped_release released;
    const PlainFloats plain;
    return call();
}

std::size_t blocks(std::size_t length) { return (length + 127) / 128; }

template <class T, Source source_type>
nb::tuple encode_int8(Matrix<const T> source, Matrix<std::int8_t> codes, Matrix<float> scales,
                      std::optional<Vector<std::int32_t>> row_sums) {
    const std::size_t rows = source.shape(0), columns = source.shape(1);
    expect_aligned("source", source);
    expect_shape("codes", codes, rows, columns);
    expect_shape("scales", scales, rows, 1);
    if (row_sums) {
        expect_aligned("row_sums", *row_sums);
        expect("row_sums", "length", row_sums->shape(0), rows);
    }
    std::int32_t* sums = row_sums ? row_sums->data() : nullptr;
    return result(encoded([&] {
        return chosen().load()->encode_int8[source_type](source.data(), codes.data(), scales.data(), sums, rows,
                                                         columns);
    }));
}

template <class T, Source source_type, class ScaleT, EncodeFp8 (Table::*kernels)[SOURCES]>
nb::tuple encode_fp8(Matrix<const T> source, Matrix<std::uint8_t> codes, Matrix<ScaleT> scales) {
    const std::size_t rows = source.shape(0), columns = source.shape(1);
    expect_aligned("source", source);
    expect_shape("codes", codes, rows, columns);
    expect_shape("scales", scales, blocks(rows), blocks(columns));
    return result(encoded([&] {
        return (chosen().load()->*kernels)[source_type](source.data(), codes.data(), scales.data(), rows, columns);
    }));
}

template <class T, Source source_type>
nb::tuple encode_bf16(Matrix<const T> source, Matrix<std::uint16_t> codes) {
    const std::size_t rows = source.shape(0), columns = source.shape(1);
    expect_aligned("source", source);
    expect_shape("codes", codes, rows, columns);
    return result(
        encoded([&] { return chosen().load()->encode_bf16[source_type](source.data(), codes.data(), rows, columns); }));
}

template <class T, Source source_type>
nb::tuple encode_affine(Matrix<const T> source, Matrix<std::uint32_t> codes, Matrix<std::uint16_t> scales,
                        Matrix<std::uint16_t> biases, std::size_t bits, std::size_t group) {
    const std::size_t rows = source.shape(0), columns = source.shape(1);
    expect_bits_and_group(bits, group);
    if (columns % group != 0)
        throw nb::value_error(("source: columns expected to be a multiple of " + std::to_string(group) + ", found " +
                               std::to_string(columns))
                                  .c_str());
    expect_aligned("source", source);
    expect_shape("codes", codes, rows, columns / 32 * bits);
    expect_shape("scales", scales, rows, columns / group);
    expect_shape("biases", biases, rows, columns / group);
    return result(encoded([&] {
        return chosen().load()->encode_affine[source_type][bits - 3][group == 64](
            source.data(), codes.data(), scales.data(), biases.data(), rows, columns);
    }));
}

template <class T, Source source_type>
void bind(nb::module_& m) {
    m.def("encode_int8", &encode_int8<T, source_type>, "source"_a.noconvert(), "codes"_a.noconvert(),
          "scales"_a.noconvert(), "row_sums"_a.noconvert() = nb::none(),
          "int8 codes [R, C], scales f32 [R, 1], row sums i32 [R] of source [R, C] (uint16 = BF16 bits, float16, "
          "float32). Returns (squared error, squared norm, count of bad elements, flat index of the first).");
    constexpr const char* doc =
        "E4M3 codes uint8 [R, C] and scales uint16 (BF16 bits) or float32 [ceil(R/128), ceil(C/128)] of source [R, C]. "
        "Returns (squared error, squared norm, count of bad elements, flat index of the first).";
    m.def("encode_fp8", &encode_fp8<T, source_type, std::uint16_t, &Table::encode_fp8_bf16_scales>,
          "source"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert(), doc);
    m.def("encode_fp8", &encode_fp8<T, source_type, float, &Table::encode_fp8_f32_scales>, "source"_a.noconvert(),
          "codes"_a.noconvert(), "scales"_a.noconvert(), doc);
    m.def("encode_bf16", &encode_bf16<T, source_type>, "source"_a.noconvert(), "codes"_a.noconvert(),
          "BF16 bits uint16 [R, C] of source [R, C], rounded once, half to even. "
          "Returns (squared error, squared norm, count of bad elements, flat index of the first).");
    m.def("encode_affine", &encode_affine<T, source_type>, "source"_a.noconvert(), "codes"_a.noconvert(),
          "scales"_a.noconvert(), "biases"_a.noconvert(), "bits"_a, "group"_a,
          "Packed codes uint32 [R, C * bits / 32], scales and biases uint16 (BF16 bits) [R, C / group] of source "
          "[R, C]. Returns (squared error, squared norm, count of bad elements, flat index of the first).");
}

}  // namespace

namespace nanobind::detail {
template <> struct dtype_traits<half> {
    static constexpr dlpack::dtype value{std::uint8_t(dlpack::dtype_code::Float), 16, 1};
    static constexpr auto name = const_name("float16");
};
}  // namespace nanobind::detail

NB_MODULE(_kernels, m) {
    m.doc() = "Native kernels of pagestone.formats; use them through pagestone.formats.native.";
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Table* table : runnable()) names.emplace_back(table->name);
        return names;
    }, "Instruction sets that were compiled and that this CPU can run, the best one last.");
    m.def("isa", [] { return std::string(chosen().load()->name); }, "The instruction set in use.");
    m.def("set_isa", [](const std::string& name) {
        if (!choose(name.c_str())) throw nb::value_error(("this CPU cannot run " + name).c_str());
    }, "isa"_a, "Choose one of isas() for all further calls of the process.");
    bind<std::uint16_t, BF16>(m);
    bind<half, F16>(m);
    bind<float, F32>(m);
    bind_products(m);
}
