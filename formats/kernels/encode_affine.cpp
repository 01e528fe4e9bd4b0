// q3, q4, q8: groups of 64 (or 32) values, w = scale * code + bias, found by a search over 20 candidates a group.
// Definition: encodings/affine.py.
#include "encoders.h"

namespace pagestone {
namespace PAGESTONE_ISA {
namespace {

// One register of this set's width, a group in every element: the search runs on as many groups at once, so that the 16
// lanes of a group's sums are registers and folding them takes no shuffle.
// `smaller` and `larger` are x < y ? x : y and x > y ? x : y, so a NaN of x gives y; gcc 12 takes two instructions for
// that, where the processor has one.
#if defined(__AVX512F__)
typedef float Floats __attribute__((vector_size(64)));
PAGESTONE_INLINE Floats smaller(Floats x, Floats y) { return Floats(_mm512_min_ps(__m512(x), __m512(y))); }
PAGESTONE_INLINE Floats larger(Floats x, Floats y) { return Floats(_mm512_max_ps(__m512(x), __m512(y))); }
#elif defined(__AVX__)
typedef float Floats __attribute__((vector_size(32)));
PAGESTONE_INLINE Floats smaller(Floats x, Floats y) { return Floats(_mm256_min_ps(__m256(x), __m256(y))); }
PAGESTONE_INLINE Floats larger(Floats x, Floats y) { return Floats(_mm256_max_ps(__m256(x), __m256(y))); }
#elif defined(__SSE__)
typedef float Floats __attribute__((vector_size(16)));
PAGESTONE_INLINE Floats smaller(Floats x, Floats y) { return Floats(_mm_min_ps(__m128(x), __m128(y))); }
PAGESTONE_INLINE Floats larger(Floats x, Floats y) { return Floats(_mm_max_ps(__m128(x), __m128(y))); }
#else
typedef float Floats __attribute__((vector_size(16)));
PAGESTONE_INLINE Floats smaller(Floats x, Floats y) { return x < y ? x : y; }
PAGESTONE_INLINE Floats larger(Floats x, Floats y) { return x > y ? x : y; }
#endif
typedef std::uint32_t Words __attribute__((vector_size(sizeof(Floats))));
typedef std::int32_t Ints __attribute__((vector_size(sizeof(Floats))));
constexpr std::size_t AT_ONCE = sizeof(Floats) / sizeof(float);

constexpr int STARTS = 5, REFITS = 3;                            // the first start is MLX's rule
constexpr float SHRINK[STARTS] = {0, 1.0f, 0.9f, 0.8f, 0.7f};    // of the others: what is left of the range
constexpr float MARGIN[STARTS] = {0, 0.0f, 0.05f, 0.1f, 0.15f};  // and what is cut off at either end
constexpr float SMALLEST_STEP = 1e-7f;                           // of MLX's rule
constexpr float MAGIC = 12582912.0f;                             // 1.5 * 2^23: adding it rounds |x| < 2^22 half to even
constexpr std::uint32_t SIGN = 0x80000000u, LEAST_NORMAL = 0x00800000u;

PAGESTONE_INLINE Floats all(float value) { return value - Floats{}; }
PAGESTONE_INLINE Floats magnitude(Floats x) { return Floats(Words(x) & ~SIGN); }

// Half to even, of any x.
PAGESTONE_INLINE Floats round_even(Floats x) {
    constexpr float ONE_STEP = 8388608.0f;  // 2^23: numbers from here on are integers
    const Floats size = magnitude(x);
    const Floats rounded = Floats(Words((size + ONE_STEP) - ONE_STEP) | (Words(x) & SIGN));
    return size < ONE_STEP ? rounded : x;
}

// What the groups of a register have in common: `unit` and `inverse`, powers of two, and the values of the sums.
struct Groups {
    Floats unit, inverse, sum;
};

// `x` units rounded to BF16, half to even: bits of a float32. The NaN of a failed fit stays one.
PAGESTONE_INLINE Words stored(Floats x, const Groups& groups) {
    const Words bits = Words(x * groups.unit);
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
}

PAGESTONE_INLINE Floats stored_bias(Floats x, const Groups& groups) {
    return Floats(stored(x, groups)) * groups.inverse;
}

// A scale is never zero or subnormal: its magnitude is raised to the smallest normal one.
PAGESTONE_INLINE Floats stored_scale(Floats x, const Groups& groups) {
    const Words bits = stored(x, groups);
    const Words raised = (bits & SIGN) | LEAST_NORMAL;
    return Floats(Ints(bits & ~SIGN) < std::int32_t(LEAST_NORMAL) ? raised : bits) * groups.inverse;
}

struct Fit {
    Floats scale, bias;
};

struct Sums {
    Floats error, code, code_code, code_value;
};

// Lanes folded in halves: a[l] + a[l + h], h = 8, 4, 2, 1.
PAGESTONE_INLINE Floats fold_floats(Floats* lanes) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
    return lanes[0];
}

// Codes of every group with its scale and bias, the error of what they stand for, and the sums for a refit. Sums of
// codes and of their squares are integers below 2^24, exact in any order (the products of a refit are not, of q8).
template <std::size_t GROUP, bool REFIT>
PAGESTONE_INLINE Sums assess(const Floats* values, Fit fit, float levels) {
    const Floats zero{}, top = all(levels);
    Floats errors[LANES], products[LANES];
    Sums sums{};
    for (std::size_t l = 0; l < LANES; ++l) {
        Floats error{}, product{};
        for (std::size_t i = l; i < GROUP; i += LANES) {
            const Floats v = values[i];
            const Floats x = smaller(larger((v - fit.bias) / fit.scale, zero), top);
            const Floats q = (x + MAGIC) - MAGIC;
            const Floats d = v - (fit.scale * q + fit.bias);
            error += d * d;
            if (REFIT) {
                product += q * v;
                sums.code += q;
                sums.code_code += q * q;
            }
        }
        errors[l] = error;
        products[l] = product;
    }
    sums.error = fold_floats(errors);
    if (REFIT) sums.code_value = fold_floats(products);
    return sums;
}

// Scale and bias of least squared error for these codes, the bias for the scale as stored; unchanged if all are equal.
template <std::size_t GROUP>
PAGESTONE_INLINE Fit refit(Fit fit, const Sums& sums, const Groups& groups) {
    constexpr float COUNT = float(GROUP);
    const Floats below = COUNT * sums.code_code - sums.code * sums.code;
    const Floats above = COUNT * sums.code_value - sums.code * groups.sum;
    const Floats scale = stored_scale(above / below, groups);
    const Floats bias = stored_bias((groups.sum - scale * sums.code) / COUNT, groups);
    return {below == 0.0f ? fit.scale : scale, below == 0.0f ? fit.bias : bias};
}

// The rule of mlx.core.quantize on a CPU: the end of larger magnitude is hit exactly, and so is zero, nearly.
PAGESTONE_INLINE Fit mlx_rule(Floats low, Floats high, float levels, const Groups& groups) {
    const Floats step = larger((high - low) / levels, SMALLEST_STEP * groups.inverse);
    const Ints lower = magnitude(low) > magnitude(high);
    const Floats scale = lower ? step : -step;
    const Floats edge = lower ? low : high;
    const Floats steps = round_even(edge / scale);
    const Ints none = steps == 0.0f;
    return {stored_scale(none ? scale : edge / steps, groups), stored_bias(none ? Floats{} : edge, groups)};
}

// Takes a fit whose error is smaller; of equals the first one stays, and so it does if errors are not numbers.
PAGESTONE_INLINE void keep(Fit& best, Floats& least, Fit fit, Floats error) {
    const Ints better = error < least;
    least = better ? error : least;
    best.scale = better ? fit.scale : best.scale;
    best.bias = better ? fit.bias : best.bias;
}

// The best fit of each of AT_ONCE groups: rows of `flat`, GROUP values each. Writes BF16 bits, and the units.
template <std::size_t GROUP>
PAGESTONE_INLINE void search(const float* flat, float levels, std::uint16_t* scales, std::uint16_t* biases,
                             float* inverses) {
    Floats values[GROUP];
    float* const across = reinterpret_cast<float*>(values);
    for (std::size_t g = 0; g < AT_ONCE; ++g)
        for (std::size_t i = 0; i < GROUP; ++i) across[i * AT_ONCE + g] = flat[g * GROUP + i];

    Floats low = values[0], high = values[0];
    for (std::size_t i = 1; i < GROUP; ++i) {
        low = smaller(values[i], low);
        high = larger(values[i], high);
    }
    const Floats most = larger(magnitude(low), magnitude(high));
    const Ints zeros = most == 0.0f;

    // The unit is 2^k, k the exponent of the largest magnitude but within -126..0: dividing by it is exact.
    Ints exponent = Ints(Words(most) >> 23);
    exponent = exponent > 1 ? exponent : exponent - exponent + 1;
    exponent = exponent < 127 ? exponent : exponent - exponent + 127;
    Groups groups;
    groups.unit = Floats(Words(exponent) << 23);
    groups.inverse = Floats(Words(254 - exponent) << 23);
    for (std::size_t i = 0; i < GROUP; ++i) values[i] *= groups.inverse;
    low *= groups.inverse;
    high *= groups.inverse;
    Floats totals[LANES] = {};
    for (std::size_t i = 0; i < GROUP; ++i) totals[i % LANES] += values[i];
    groups.sum = fold_floats(totals);

    // Round by round and not start by start: while one start folds and refits, the next one has its registers full.
    Fit fits[STARTS], bests[STARTS];
    Floats errors[STARTS];
    fits[0] = mlx_rule(low, high, levels, groups);
    const Floats range = high - low;
    for (int start = 1; start < STARTS; ++start)
        fits[start] = {stored_scale(range * SHRINK[start] / levels, groups),
                       stored_bias(low + MARGIN[start] * range, groups)};
    for (int start = 0; start < STARTS; ++start) {
        bests[start] = fits[start];
        errors[start] = all(bit_cast<float>(0x7F800000u));
    }
    for (int round = 0; round < REFITS; ++round)
        for (int start = 0; start < STARTS; ++start) {
            const Sums sums = assess<GROUP, true>(values, fits[start], levels);
            keep(bests[start], errors[start], fits[start], sums.error);
            fits[start] = refit<GROUP>(fits[start], sums, groups);
        }
    for (int start = 0; start < STARTS; ++start) {
        keep(bests[start], errors[start], fits[start], assess<GROUP, false>(values, fits[start], levels).error);
        if (start > 0) keep(bests[0], errors[0], bests[start], errors[start]);
    }
    const Fit best = bests[0];

    const Floats scale = zeros ? all(1.0f) : best.scale * groups.unit;
    const Floats bias = zeros ? Floats{} : best.bias * groups.unit;
    for (std::size_t g = 0; g < AT_ONCE; ++g) {
        scales[g] = std::uint16_t(bit_cast<std::uint32_t>(float(scale[g])) >> 16);
        biases[g] = std::uint16_t(bit_cast<std::uint32_t>(float(bias[g])) >> 16);
        inverses[g] = groups.inverse[g];
    }
}

// Eight codes of BITS bits, which fill BITS bytes.
template <int BITS>
struct EightCodes {
    typedef std::uint32_t Word;
};
template <>
struct EightCodes<8> {
    typedef std::uint64_t Word;
};
template <int BITS>
using Eight = typename EightCodes<BITS>::Word;

// The codes of one group, packed, and its statistics into `lanes`.
template <int BITS, std::size_t GROUP>
PAGESTONE_INLINE void quantise(const float* values, float scale, float bias, float inverse, std::uint8_t* packed,
                               Lanes& lanes) {
    constexpr float LEVELS = float((1 << BITS) - 1);
    const float s = scale * inverse, b = bias * inverse;
    float decoded[GROUP];
    std::uint32_t codes[GROUP];
    for (std::size_t i = 0; i < GROUP; ++i) {
        float x = (values[i] * inverse - b) / s;
        x = x > 0.0f ? x : 0.0f;
        x = x < LEVELS ? x : LEVELS;
        const float shifted = x + MAGIC;
        codes[i] = bit_cast<std::uint32_t>(shifted) & ((1u << BITS) - 1u);  // MAGIC's own low bits are zero
        decoded[i] = scale * (shifted - MAGIC) + bias;
    }
    for (std::size_t i = 0; i < GROUP; i += 8) {
        Eight<BITS> word = 0;
        for (std::size_t n = 0; n < 8; ++n) word |= Eight<BITS>(codes[i + n]) << (BITS * n);
        std::memcpy(packed + i / 8 * BITS, &word, BITS);
    }
    accumulate<GROUP>(lanes, values, decoded);
}

// Elements whose decoded value overflows although the source is finite (only near the largest float).
template <int BITS, std::size_t GROUP>
Encoded count_overflow(const std::uint8_t* packed, const std::uint16_t* scales, const std::uint16_t* biases,
                       std::size_t count) {
    Encoded result{0.0, 0.0, 0, 0};
    for (std::size_t i = 0; i < count; ++i) {
        Eight<BITS> word = 0;
        std::memcpy(&word, packed + i / 8 * BITS, BITS);
        const float code = float((word >> (BITS * (i % 8))) & ((1u << BITS) - 1u));
        const float product = SourceBF16::value(scales[i / GROUP]) * code;
        if (!finite(product + SourceBF16::value(biases[i / GROUP])) && result.bad++ == 0)
            result.first_bad = std::int64_t(i);
    }
    return result;
}

// Groups follow one another through the whole matrix, and so do the packed rows: both are flat. Only the statistics
// know rows.
template <class S, int BITS, std::size_t GROUP>
Encoded encode(const Encoding& e) {
    using Bits = typename S::Bits;
    constexpr float LEVELS = float((1 << BITS) - 1);
    const std::size_t rows = e.rows, columns = e.columns;
    const Bits* source = static_cast<const Bits*>(e.source);
    std::uint8_t* packed = static_cast<std::uint8_t*>(e.codes);
    std::uint16_t *scales = static_cast<std::uint16_t*>(e.scales), *biases = e.biases;
    const std::size_t count = rows * columns / GROUP, in_row = columns / GROUP;
    Encoded total{0.0, 0.0, 0, 0};
    Lanes lanes{};
    for (std::size_t first = 0; first < count; first += AT_ONCE) {
        const std::size_t these = count - first < AT_ONCE ? count - first : AT_ONCE;
        const Bits* block = source + first * GROUP;
        if (largest<S>(block, these * GROUP) >= S::INFINITE) return count_bad<S>(source, rows * columns);
        float values[AT_ONCE * GROUP] = {};  // zeros beyond the end
        for (std::size_t i = 0; i < these * GROUP; ++i) values[i] = S::value(block[i]);
        std::uint16_t found_scales[AT_ONCE], found_biases[AT_ONCE];
        float inverses[AT_ONCE];
        search<GROUP>(values, LEVELS, found_scales, found_biases, inverses);
        for (std::size_t g = 0; g < these; ++g) {
            const std::size_t group = first + g;
            scales[group] = found_scales[g];
            biases[group] = found_biases[g];
            quantise<BITS, GROUP>(values + g * GROUP, SourceBF16::value(found_scales[g]),
                                  SourceBF16::value(found_biases[g]), inverses[g], packed + group * (GROUP / 8) * BITS,
                                  lanes);
            if ((group + 1) % in_row == 0) {
                total.squared_error += fold(lanes.error);
                total.squared_norm += fold(lanes.norm);
                lanes = Lanes{};
            }
        }
    }
    return finite(total.squared_error) ? total
                                       : count_overflow<BITS, GROUP>(packed, scales, biases, rows * columns);
}

}  // namespace

Encoded encode_affine(const Encoding& e) {
    return by_source(e, [&](auto source) {
        using S = decltype(source);
        if (e.bits == 3) return e.group == 32 ? encode<S, 3, 32>(e) : encode<S, 3, 64>(e);
        if (e.bits == 8) return e.group == 32 ? encode<S, 8, 32>(e) : encode<S, 8, 64>(e);
        return e.group == 32 ? encode<S, 4, 32>(e) : encode<S, 4, 64>(e);
    });
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
