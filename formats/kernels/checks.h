// Checks of arguments, for the bindings: messages name both what was expected and what was found.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kernels.h"

namespace nb = nanobind;

inline void expect(const char* array, const char* axis, std::size_t found, std::size_t expected) {
    if (found != expected)
        throw nb::value_error((std::string(array) + ": " + axis + " expected to be " + std::to_string(expected) +
                               ", found " + std::to_string(found))
                                  .c_str());
}

// Kernels may load whole vectors from addresses they take to be aligned to the element.
template <class Array>
void expect_aligned(const char* name, const Array& array) {
    const std::size_t size = std::size_t(array.itemsize());
    if (reinterpret_cast<std::uintptr_t>(array.data()) % size != 0)
        throw nb::value_error((std::string(name) + ": address expected to be a multiple of " + std::to_string(size) +
                               ", found one that is not")
                                  .c_str());
}

inline void expect_bits_and_group(std::size_t bits, std::size_t group) {
    if (bits != 3 && bits != 4 && bits != 8)
        throw nb::value_error(("bits expected to be 3, 4 or 8, found " + std::to_string(bits)).c_str());
    if (group != 32 && group != 64)
        throw nb::value_error(("group expected to be 32 or 64, found " + std::to_string(group)).c_str());
}

inline void expect_groups(const char* name, std::size_t columns, std::size_t group) {
    if (columns % group != 0)
        throw nb::value_error((std::string(name) + ": columns expected to be a multiple of " + std::to_string(group) +
                               ", found " + std::to_string(columns))
                                  .c_str());
}

// Any element type: it is checked here, so that a wrong one is named.
using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Result = nb::ndarray<nb::c_contig, nb::device::cpu>;

constexpr nb::dlpack::dtype of(nb::dlpack::dtype_code code, int bits) {
    return {std::uint8_t(code), std::uint8_t(bits), 1};
}
constexpr nb::dlpack::dtype I8 = of(nb::dlpack::dtype_code::Int, 8), I32 = of(nb::dlpack::dtype_code::Int, 32);
constexpr nb::dlpack::dtype U8 = of(nb::dlpack::dtype_code::UInt, 8), U16 = of(nb::dlpack::dtype_code::UInt, 16);
constexpr nb::dlpack::dtype U32 = of(nb::dlpack::dtype_code::UInt, 32);
constexpr nb::dlpack::dtype HALF = of(nb::dlpack::dtype_code::Float, 16);
constexpr nb::dlpack::dtype FLOAT = of(nb::dlpack::dtype_code::Float, 32);

inline std::string text(nb::dlpack::dtype type) {
    const char* names[] = {"int", "uint", "float"};
    const std::string name = type.code < 3 ? names[type.code] : "type " + std::to_string(type.code) + " of bits ";
    return name + std::to_string(type.bits);
}

template <class Array>
void expect_type(const char* name, const Array& array, std::initializer_list<nb::dlpack::dtype> allowed) {
    std::string words;
    for (nb::dlpack::dtype type : allowed) {
        if (array.dtype() == type) return;
        words += (words.empty() ? "" : " or ") + text(type);
    }
    throw nb::type_error(
        (std::string(name) + ": dtype expected to be " + words + ", found " + text(array.dtype())).c_str());
}

template <class Array>
void expect_array(const char* name, const Array& array, std::initializer_list<nb::dlpack::dtype> allowed,
                  std::size_t dimensions) {
    expect_type(name, array, allowed);
    expect(name, "dimensions", array.ndim(), dimensions);
    expect_aligned(name, array);
}

template <class Array>
void expect_matrix(const char* name, const Array& array, std::initializer_list<nb::dlpack::dtype> allowed,
                   std::size_t rows, std::size_t columns) {
    expect_array(name, array, allowed, 2);
    expect(name, "rows", array.shape(0), rows);
    expect(name, "columns", array.shape(1), columns);
}

inline pagestone::Source source_of(nb::dlpack::dtype type) {
    return type == U16 ? pagestone::BF16 : type == HALF ? pagestone::F16 : pagestone::F32;
}

inline std::size_t blocks(std::size_t length) { return (length + 127) / 128; }
