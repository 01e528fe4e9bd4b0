// Shared by the kernels of one instruction set. Everything here lives in that set's namespace, and nothing from the
// standard library with inline code is included: the linker would keep one copy and run AVX-512 on a CPU without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

#define PAGESTONE_INLINE static inline __attribute__((always_inline))
#define PAGESTONE_MEMBER static __attribute__((always_inline))

namespace pagestone {
namespace PAGESTONE_ISA {

constexpr int LANES = 16;          // of the statistics: element i of a row goes to lane i mod 16
constexpr std::size_t TILE = 128;  // elements a kernel works on at a time; short rows are padded up to it
static_assert(TILE % LANES == 0, "a tile begins at lane 0");
constexpr float SMALLEST_NORMAL = 1.17549435082228750797e-38f;  // of F32 and of BF16

template <class To, class From>
PAGESTONE_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A source type: `Bits` holds one element; bits & MAGNITUDE is monotone in |value|, and >= INFINITE means NaN or Inf.
struct SourceBF16 {
    using Bits = std::uint16_t;
    static constexpr Bits MAGNITUDE = 0x7FFF, INFINITE = 0x7F80;
    PAGESTONE_MEMBER float value(Bits bits) { return bit_cast<float>(std::uint32_t(bits) << 16); }
};

struct SourceF16 {
    using Bits = std::uint16_t;
    static constexpr Bits MAGNITUDE = 0x7FFF, INFINITE = 0x7C00;
    // Exact for every finite half. Integer steps and one exact subtraction, because gcc 12 vectorises them and not the
    // conversion instruction.
    PAGESTONE_MEMBER float value(Bits bits) {
        const std::uint32_t shifted = std::uint32_t(bits & 0x7FFF) << 13;
        const float subnormal = bit_cast<float>(shifted + (113u << 23)) - 6.103515625e-05f;  // 2^-14
        const std::uint32_t normal = shifted + (112u << 23);
        const std::uint32_t magnitude = shifted < (1u << 23) ? bit_cast<std::uint32_t>(subnormal) : normal;
        return bit_cast<float>(magnitude | (std::uint32_t(bits & 0x8000) << 16));
    }
};

struct SourceF32 {
    using Bits = std::uint32_t;
    static constexpr Bits MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000;
    PAGESTONE_MEMBER float value(Bits bits) { return bit_cast<float>(bits); }
};

// Largest bits & MAGNITUDE of `count` elements.
template <class S>
PAGESTONE_INLINE typename S::Bits largest(const typename S::Bits* source, std::size_t count) {
    typename S::Bits most = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const typename S::Bits magnitude = source[i] & S::MAGNITUDE;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

// most[i] = max(most[i], source[i] & MAGNITUDE) for `count` elements.
template <class S>
PAGESTONE_INLINE void raise(typename S::Bits* most, const typename S::Bits* source, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        const typename S::Bits magnitude = source[i] & S::MAGNITUDE;
        most[i] = magnitude > most[i] ? magnitude : most[i];
    }
}

// The statistics of one row, kept in 16 lanes in registers of this set's own width. Vector types and not a plain loop:
// gcc 12 unrolls a loop over 16 lanes and shuffles it into something five times slower; and its own conversion of a
// whole register goes through two halves.
#if defined(__AVX512F__)
typedef double Doubles __attribute__((vector_size(64)));
PAGESTONE_INLINE Doubles widen(const float* values) { return Doubles(_mm512_cvtps_pd(_mm256_loadu_ps(values))); }
#elif defined(__AVX__)
typedef double Doubles __attribute__((vector_size(32)));
PAGESTONE_INLINE Doubles widen(const float* values) { return Doubles(_mm256_cvtps_pd(_mm_loadu_ps(values))); }
#else
typedef double Doubles __attribute__((vector_size(16)));
PAGESTONE_INLINE Doubles widen(const float* values) { return Doubles{double(values[0]), double(values[1])}; }
#endif
constexpr int WIDTH = sizeof(Doubles) / sizeof(double);

struct Lanes {
    Doubles error[LANES / WIDTH];
    Doubles norm[LANES / WIDTH];
};

// Adds (w - decoded)^2 and w^2 of `COUNT` elements, in increasing order within each lane.
template <std::size_t COUNT = TILE>
PAGESTONE_INLINE void accumulate(Lanes& lanes, const float* values, const float* decoded) {
    static_assert(COUNT % LANES == 0, "every lane gets as many");
    for (std::size_t i = 0; i < COUNT; i += LANES)
        for (int v = 0; v < LANES / WIDTH; ++v) {
            const Doubles w = widen(values + i + v * WIDTH);
            const Doubles d = w - widen(decoded + i + v * WIDTH);
            lanes.error[v] += d * d;
            lanes.norm[v] += w * w;
        }
}

// Lanes folded in halves: a[l] + a[l + h], h = 8, 4, 2, 1.
PAGESTONE_INLINE double fold(const Doubles* vectors) {
    double lanes[LANES];
    std::memcpy(lanes, vectors, sizeof lanes);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
    return lanes[0];
}

// How many elements of the whole matrix are NaN or Inf, and where the first one is.
template <class S>
Encoded count_bad(const typename S::Bits* source, std::size_t count) {
    Encoded result{0.0, 0.0, 0, 0};
    for (std::size_t i = 0; i < count; ++i)
        if ((source[i] & S::MAGNITUDE) >= S::INFINITE && result.bad++ == 0) result.first_bad = std::int64_t(i);
    return result;
}

PAGESTONE_INLINE bool finite(double value) {
    return (bit_cast<std::uint64_t>(value) & 0x7FF0000000000000u) != 0x7FF0000000000000u;
}

PAGESTONE_INLINE bool finite(float value) { return (bit_cast<std::uint32_t>(value) & 0x7F800000u) != 0x7F800000u; }

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
