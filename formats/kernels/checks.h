// Checks of arguments, for the bindings: messages name both what was expected and what was found.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <string>

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
    if (bits != 3 && bits != 4)
        throw nb::value_error(("bits expected to be 3 or 4, found " + std::to_string(bits)).c_str());
    if (group != 32 && group != 64)
        throw nb::value_error(("group expected to be 32 or 64, found " + std::to_string(group)).c_str());
}
