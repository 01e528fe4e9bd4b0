// q3, q4, q8: activations in 8 bits; of each group the exact sums d (code * a) and A (a); y = s_x * (P + Q), P the sum of
// f32(d) * scale and Q of f32(A) * bias over the groups in 16 lanes. Definition: encodings/affine.py.
#include "products.h"

namespace pagestone {
namespace PAGESTONE_ISA {
namespace {

// Eight codes are four bytes of each of two registers, the first and the second half of a unit; that is the order in
// which shifts and masks leave them. A unit of packed codes fills both.
template <int BITS>
constexpr std::size_t WITHIN[8] = {0, 2, 4, 6, 1, 3, 5, 7};
template <>
constexpr std::size_t WITHIN<3>[8] = {0, 3, 4, 7, 1, 2, 5, 6};
template <>
constexpr std::size_t WITHIN<8>[8] = {0, 1, 2, 3, 4, 5, 6, 7};

#if defined(__AVX512F__)
typedef __m512i Ints;
#define PAGESTONE_OP(name) _mm512_##name
#elif defined(__AVX2__)
typedef __m256i Ints;
#define PAGESTONE_OP(name) _mm256_##name
#endif

#if defined(__AVX512F__) || defined(__AVX2__)
constexpr std::size_t HALF = sizeof(Ints), UNIT = 2 * HALF;

struct Unit {
    Ints first, second;
};

PAGESTONE_INLINE Ints load_ints(const void* from) {
#if defined(__AVX512F__)
    return _mm512_loadu_si512(from);
#else
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
#endif
}

// A unit of packed codes of less than 8 bits, whole.
template <int BITS>
PAGESTONE_INLINE Ints packed_unit(const std::uint8_t* packed) {
    if constexpr (BITS == 4) return load_ints(packed);
#if defined(__AVX512F__)
    const __m512i words = _mm512_maskz_loadu_epi32(0x0FFF, packed);
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11, 12), words);
#else
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + 8));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_srli_si128(high, 4), 1);
#endif
}

// The codes of a unit, a byte each.
template <int BITS>
PAGESTONE_INLINE Unit unpack(Ints packed) {
    if constexpr (BITS == 4) {
        const Ints nibble = PAGESTONE_OP(set1_epi8)(15);
#if defined(__AVX512F__)
        return {_mm512_and_si512(packed, nibble), _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble)};
#else
        return {_mm256_and_si256(packed, nibble), _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble)};
#endif
    }
    // Three bytes of eight codes become two 16-bit halves with codes at bits 0, 3, 6 and 9; what stands above is
    // garbage that the last mask takes away.
#if defined(__AVX512F__)
    const __m512i spread = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
    const __m512i low_half = _mm512_set1_epi32(0x0000FFFF), low_byte = _mm512_set1_epi32(0x00FF00FF);
    const __m512i three = _mm512_shuffle_epi8(packed, spread);
    constexpr int CHOOSE = 0xCA;  // of ternary logic: a ? b : c
    const __m512i four = _mm512_ternarylogic_epi32(low_half, three, _mm512_slli_epi32(three, 4), CHOOSE);
    const __m512i mask = _mm512_set1_epi32(0x07070707);
    const __m512i first = _mm512_ternarylogic_epi32(low_byte, four, _mm512_srli_epi16(four, 1), CHOOSE);
    const __m512i second =
        _mm512_ternarylogic_epi32(low_byte, _mm512_srli_epi16(four, 3), _mm512_slli_epi16(four, 2), CHOOSE);
    return {_mm512_and_si512(first, mask), _mm512_and_si512(second, mask)};
#else
    const __m256i spread = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1));
    const __m256i low = _mm256_set1_epi16(0x0007), high = _mm256_set1_epi16(0x0700);
    const __m256i three = _mm256_shuffle_epi8(packed, spread);
    const __m256i four = _mm256_blend_epi16(three, _mm256_slli_epi32(three, 4), 0xAA);
    return {_mm256_or_si256(_mm256_and_si256(four, low), _mm256_and_si256(_mm256_srli_epi16(four, 1), high)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(four, 3), low),
                            _mm256_and_si256(_mm256_slli_epi16(four, 2), high))};
#endif
}

// A unit that lies at `packed`. Codes of 8 bits are bytes already: of every eight the first four go to the first half.
template <int BITS>
PAGESTONE_INLINE Unit load_unit(const std::uint8_t* packed) {
    if constexpr (BITS == 8) {
        const Ints low = load_ints(packed), high = load_ints(packed + HALF);
#if defined(__AVX512F__)
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
        return {_mm512_permutex2var_epi32(low, even, high), _mm512_permutex2var_epi32(low, odd, high)};
#else
        const __m256 a = _mm256_castsi256_ps(low), b = _mm256_castsi256_ps(high);
        const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
        const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD));
        return {_mm256_permute4x64_epi64(even, 0xD8), _mm256_permute4x64_epi64(odd, 0xD8)};
#endif
    } else {
        return unpack<BITS>(packed_unit<BITS>(packed));
    }
}

#if !defined(__AVX512F__)
// Sums over every four of both halves: codes of at most 15 times activations of at most 127, so that four fit 16 bits.
PAGESTONE_INLINE __m256i small_dots(Unit codes, __m256i first, __m256i second, int weight) {
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(codes.first, first),
                                           _mm256_maddubs_epi16(codes.second, second));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(short(weight)));
}
#endif

// Sums over every eight codes of code * activation.
template <int BITS>
PAGESTONE_INLINE Ints unit_dots(Unit codes, const std::int8_t* token) {
    const Ints first = load_ints(token), second = load_ints(token + HALF);
#if defined(__AVX512F__)
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), codes.first, first), codes.second, second);
#else
    if constexpr (BITS < 8) return small_dots(codes, first, second, 1);
    const __m256i nibble = _mm256_set1_epi8(15);  // 255 * 127 does not fit: 16 times the upper half, and the lower
    const Unit low{_mm256_and_si256(codes.first, nibble), _mm256_and_si256(codes.second, nibble)};
    const Unit high{_mm256_and_si256(_mm256_srli_epi16(codes.first, 4), nibble),
                    _mm256_and_si256(_mm256_srli_epi16(codes.second, 4), nibble)};
    return _mm256_add_epi32(small_dots(low, first, second, 1), small_dots(high, first, second, 16));
#endif
}

// A block is WIDE groups: one register of their sums in order, as floats. `found` are the sums of its units.
template <std::size_t GROUP>
constexpr std::size_t UNITS = WIDE * GROUP / UNIT;

template <std::size_t GROUP>
PAGESTONE_INLINE Floats block_sums(const Ints* found) {
#if defined(__AVX512F__)
    __m512i four[4];  // a group in every 128 bits
    for (int i = 0; i < 4; ++i)
        if constexpr (GROUP == 64)
            four[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(found[2 * i], found[2 * i + 1], 0x88),
                                       _mm512_shuffle_i32x4(found[2 * i], found[2 * i + 1], 0xDD));
        else
            four[i] = found[i];
    __m512i two[2];
    for (int i = 0; i < 2; ++i)
        two[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(four[2 * i], four[2 * i + 1]),
                                  _mm512_unpackhi_epi32(four[2 * i], four[2 * i + 1]));
    const __m512i one =
        _mm512_add_epi32(_mm512_unpacklo_epi64(two[0], two[1]), _mm512_unpackhi_epi64(two[0], two[1]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return Floats(_mm512_cvtepi32_ps(_mm512_permutexvar_epi32(order, one)));
#else
    if constexpr (GROUP == 64) {
        const __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(found[0], found[1]),
                                              _mm256_hadd_epi32(found[2], found[3]));
        const __m256i high = _mm256_hadd_epi32(_mm256_hadd_epi32(found[4], found[5]),
                                               _mm256_hadd_epi32(found[6], found[7]));
        return Floats(_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                                                          _mm256_permute2x128_si256(low, high, 0x31))));
    }
    const __m256i both = _mm256_hadd_epi32(_mm256_hadd_epi32(found[0], found[1]),
                                           _mm256_hadd_epi32(found[2], found[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return Floats(_mm256_cvtepi32_ps(_mm256_permutevar8x32_epi32(both, order)));
#endif
}

PAGESTONE_INLINE Floats load_bf16(const std::uint16_t* from) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return Floats(_mm512_slli_epi32(wide, 16));
#else
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return Floats(_mm256_slli_epi32(wide, 16));
#endif
}

// The first `count`, and zeros.
PAGESTONE_INLINE Floats load_bf16(const std::uint16_t* from, std::size_t count) {
#if defined(__AVX512F__)
    const __m256i some = _mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1u), from);
    return Floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16));
#else
    std::uint16_t some[WIDE] = {};
    std::memcpy(some, from, count * sizeof *from);
    return load_bf16(some);
#endif
}

template <std::size_t GROUP, class Units>
PAGESTONE_INLINE Floats block_of_units(const Units& units, std::size_t block, const std::int8_t* token) {
    Ints found[UNITS<GROUP>];
    for (std::size_t u = 0; u < UNITS<GROUP>; ++u) {
        const std::size_t unit = block * UNITS<GROUP> + u;
        found[u] = unit_dots<Units::WIDTH>(units.whole(unit), token + unit * UNIT);
    }
    return block_sums<GROUP>(found);
}

constexpr std::size_t SUM_REGISTERS = GROUP_LANES / WIDE;

// One row and one token. `units` says where the codes come from: unit u of the row, a byte a code.
template <std::size_t GROUP, class Units>
PAGESTONE_INLINE float dot(const Units& units, std::size_t groups, const std::uint16_t* scales,
                           const std::uint16_t* biases, const std::int8_t* token, const float* sums) {
    Floats scaled[SUM_REGISTERS] = {}, raised[SUM_REGISTERS] = {};
    constexpr std::size_t COUNT = UNITS<GROUP>;
    const std::size_t whole = groups / WIDE, rest = groups % WIDE;
    for (std::size_t block = 0; block < whole; block += SUM_REGISTERS)
        for (std::size_t v = 0; v < SUM_REGISTERS && block + v < whole; ++v) {
            const std::size_t at = (block + v) * WIDE;
            scaled[v] += block_of_units<GROUP>(units, block + v, token) * load_bf16(scales + at);
            raised[v] += load(sums + at) * load_bf16(biases + at);
        }
    if (rest) {  // groups beyond the end have sums, scales and biases of 0 and add +0 to lanes never -0: nothing
        const std::size_t v = whole % SUM_REGISTERS, at = whole * WIDE, columns = groups * GROUP;
        Ints found[COUNT];
        for (std::size_t u = 0; u < COUNT; ++u) {
            const std::size_t unit = whole * COUNT + u, first = unit * UNIT;
            if (first + UNIT <= columns)
                found[u] = unit_dots<Units::WIDTH>(units.whole(unit), token + first);
            else if (first < columns)
                found[u] = unit_dots<Units::WIDTH>(units.partial(unit, columns - first), token + first);
            else
                found[u] = Ints{};
        }
        scaled[v] += block_sums<GROUP>(found) * load_bf16(scales + at, rest);
        raised[v] += load(sums + at) * load_bf16(biases + at, rest);
    }
    for (std::size_t half = SUM_REGISTERS / 2; half > 0; half /= 2)
        for (std::size_t v = 0; v < half; ++v) {
            scaled[v] = scaled[v] + scaled[v + half];
            raised[v] = raised[v] + raised[v + half];
        }
    return fold(scaled[0]) + fold(raised[0]);
}

#if defined(__AVX512F__)
// Two rows of 8 groups each lie in memory as one of 16 does, and fill a register between them. Lanes 8 to 15 of either
// would be +0, and adding that to lanes never -0 is nothing: each row's fold begins with h = 4. `token` and `sums` are
// there twice.
template <std::size_t GROUP, class Units>
PAGESTONE_INLINE void dot_two(const Units& units, const std::uint16_t* scales, const std::uint16_t* biases,
                              const std::int8_t* token, const float* sums, float* results) {
    const Floats none{};
    __m512 scaled = __m512(none + block_of_units<GROUP>(units, 0, token) * load_bf16(scales));
    __m512 raised = __m512(none + load(sums) * load_bf16(biases));
    scaled = _mm512_add_ps(scaled, _mm512_shuffle_f32x4(scaled, scaled, 0xB1));
    raised = _mm512_add_ps(raised, _mm512_shuffle_f32x4(raised, raised, 0xB1));
    scaled = _mm512_add_ps(scaled, _mm512_permute_ps(scaled, 0x4E));
    raised = _mm512_add_ps(raised, _mm512_permute_ps(raised, 0x4E));
    scaled = _mm512_add_ps(scaled, _mm512_permute_ps(scaled, 0xB1));
    raised = _mm512_add_ps(raised, _mm512_permute_ps(raised, 0xB1));
    const __m512 both = _mm512_add_ps(scaled, raised);
    results[0] = _mm512_cvtss_f32(both);
    results[1] = _mm256_cvtss_f32(_mm512_extractf32x8_ps(both, 1));
}
#endif

// Units straight from the packed codes, or from a row unpacked before.
template <int BITS>
struct Packed {
    const std::uint8_t* codes;
    static constexpr int WIDTH = BITS;
    static constexpr std::size_t BYTES = UNIT * BITS / 8;
    __attribute__((always_inline)) Unit whole(std::size_t unit) const {
        fetch(codes + unit * BYTES, AHEAD);
        return load_unit<BITS>(codes + unit * BYTES);
    }
    __attribute__((always_inline)) Unit partial(std::size_t unit, std::size_t count) const {
        std::uint8_t padded[UNIT * BITS / 8] = {};
        std::memcpy(padded, codes + unit * BYTES, count * BITS / 8);
        return load_unit<BITS>(padded);
    }
};

template <int BITS>
struct Unpacked {
    const std::uint8_t* codes;
    static constexpr int WIDTH = BITS;
    __attribute__((always_inline)) Unit whole(std::size_t unit) const {
        return {load_ints(codes + unit * UNIT), load_ints(codes + unit * UNIT + HALF)};
    }
    __attribute__((always_inline)) Unit partial(std::size_t unit, std::size_t) const { return whole(unit); }
};

template <int BITS>
void unpack_row(const std::uint8_t* packed, std::size_t columns, std::uint8_t* codes) {
    const Packed<BITS> units{packed};
    for (std::size_t c = 0; c < columns; c += UNIT) {
        const Unit unit = columns - c < UNIT ? units.partial(c / UNIT, columns - c) : units.whole(c / UNIT);
        std::memcpy(codes + c, &unit.first, HALF);
        std::memcpy(codes + c + HALF, &unit.second, HALF);
    }
}

// A token's codes in the order of the units.
template <int BITS>
void arrange(const std::int8_t* natural, std::size_t padded, std::int8_t* token) {
    for (std::size_t c = 0; c < padded; c += UNIT)
        for (std::size_t eight = 0; eight < UNIT / 8; ++eight)
            for (std::size_t i = 0; i < 4; ++i) {
                token[c + 4 * eight + i] = natural[c + 8 * eight + WITHIN<BITS>[i]];
                token[c + HALF + 4 * eight + i] = natural[c + 8 * eight + WITHIN<BITS>[4 + i]];
            }
}
#else
constexpr std::size_t UNIT = 64;

template <std::size_t GROUP, class Units>
PAGESTONE_INLINE float dot(const Units& units, std::size_t groups, const std::uint16_t* scales,
                           const std::uint16_t* biases, const std::int8_t* token, const float* sums) {
    float scaled[GROUP_LANES] = {}, raised[GROUP_LANES] = {};
    for (std::size_t g = 0; g < groups; ++g) {
        std::int32_t sum = 0;
        for (std::size_t i = 0; i < GROUP; ++i)
            sum += std::int16_t(units.codes[g * GROUP + i]) * std::int16_t(token[g * GROUP + i]);
        scaled[g % GROUP_LANES] += float(sum) * SourceBF16::value(scales[g]);
        raised[g % GROUP_LANES] += sums[g] * SourceBF16::value(biases[g]);
    }
    for (std::size_t half = GROUP_LANES / 2; half > 0; half /= 2)
        for (std::size_t l = 0; l < half; ++l) {
            scaled[l] = scaled[l] + scaled[l + half];
            raised[l] = raised[l] + raised[l + half];
        }
    return scaled[0] + raised[0];
}

template <int BITS>
struct Unpacked {
    const std::uint8_t* codes;
};

template <int BITS>
void unpack_row(const std::uint8_t* packed, std::size_t columns, std::uint8_t* codes) {
    if constexpr (BITS == 8) {
        std::memcpy(codes, packed, columns);
        return;
    }
    for (std::size_t c = 0; c < columns; c += 8) {
        std::uint32_t word = 0;
        for (int b = 0; b < BITS; ++b) word |= std::uint32_t(packed[c / 8 * BITS + b]) << (8 * b);
        for (std::size_t i = 0; i < 8; ++i) codes[c + i] = (word >> (BITS * i)) & ((1u << BITS) - 1u);
    }
}

template <int BITS>
void arrange(const std::int8_t* natural, std::size_t padded, std::int8_t* token) {
    std::memcpy(token, natural, padded);
}
#endif

// prepared: scales of the tokens; of each token the sums A and its codes, both twice if rows go by twos; room for the
// values and codes of one.
struct Layout {
    std::size_t padded, groups, scales, sums, token, bytes;
    bool twos;
};

PAGESTONE_INLINE Layout layout(const Product& p) {
    Layout l;
    l.padded = up(p.columns, UNIT);
    l.groups = p.columns / p.group;
    l.scales = up(p.tokens * sizeof(float), 64);
    l.sums = up(l.groups, GROUP_LANES) * sizeof(float);
#if defined(__AVX512F__)
    l.twos = 2 * l.groups == GROUP_LANES;
#else
    l.twos = false;
#endif
    l.token = l.sums + (l.twos ? 2 : 1) * l.padded;
    l.bytes = l.scales + p.tokens * l.token + l.padded * (sizeof(float) + 1);
    return l;
}

template <int BITS, std::size_t GROUP>
void multiply(const Product& p, const unsigned char* prepared, unsigned char* scratch, std::size_t first,
              std::size_t last) {
    const Layout l = layout(p);
    const std::uint8_t* packed = static_cast<const std::uint8_t*>(p.codes);
    const std::uint16_t* scales = static_cast<const std::uint16_t*>(p.scales);
    const std::size_t row_bytes = p.columns / 8 * BITS;
    const float* of_tokens = reinterpret_cast<const float*>(prepared);
#if defined(__AVX512F__) || defined(__AVX2__)
    const bool direct = p.tokens <= (BITS == 3 ? 1 : 2);  // else each row is unpacked once, for all tokens
#else
    const bool direct = false;
#endif
    for (; first < last; first += TILE_ROWS) {
        const std::size_t count = last - first < TILE_ROWS ? last - first : TILE_ROWS;
        if (!direct)
            for (std::size_t r = 0; r < count; ++r)
                unpack_row<BITS>(packed + (first + r) * row_bytes, p.columns, scratch + r * l.padded);
        for (std::size_t t = 0; t < p.tokens; ++t) {
            const unsigned char* token = prepared + l.scales + t * l.token;
            const float* sums = reinterpret_cast<const float*>(token);
            const std::int8_t* codes = reinterpret_cast<const std::int8_t*>(token + l.sums);
            float results[TILE_ROWS];
            std::size_t r = 0;
#if defined(__AVX512F__)
            if (l.twos)
                for (; r + 2 <= count; r += 2) {
                    const std::size_t at = (first + r) * l.groups;
                    if (direct)
                        dot_two<GROUP>(Packed<BITS>{packed + (first + r) * row_bytes}, scales + at, p.biases + at,
                                       codes, sums, results + r);
                    else
                        dot_two<GROUP>(Unpacked<BITS>{scratch + r * l.padded}, scales + at, p.biases + at, codes, sums,
                                       results + r);
                }
#endif
            for (; r < count; ++r) {
                const std::size_t at = (first + r) * l.groups;
                float& sum = results[r];
#if defined(__AVX512F__) || defined(__AVX2__)
                if (direct)
                    sum = dot<GROUP>(Packed<BITS>{packed + (first + r) * row_bytes}, l.groups, scales + at,
                                     p.biases + at, codes, sums);
                else
#endif
                    sum = dot<GROUP>(Unpacked<BITS>{scratch + r * l.padded}, l.groups, scales + at, p.biases + at, codes,
                                     sums);
            }
            for (r = 0; r < count; ++r) results[r] = of_tokens[t] * results[r];
            put(p, t, first, count, results);
        }
    }
}

}  // namespace

std::size_t prepared_bytes_affine(const Product& p) { return layout(p).bytes; }

bool prepare_affine(const Product& p, unsigned char* prepared) {
    const Layout l = layout(p);
    float* scales = reinterpret_cast<float*>(prepared);
    float* values = reinterpret_cast<float*>(prepared + l.scales + p.tokens * l.token);
    std::int8_t* natural = reinterpret_cast<std::int8_t*>(values + l.padded);
    for (std::size_t t = 0; t < p.tokens; ++t) {
        if (!token_values(p, t, l.padded, values)) return false;
        scales[t] = quantise_token(values, l.padded, natural);
        unsigned char* token = prepared + l.scales + t * l.token;
        float* sums = reinterpret_cast<float*>(token);
        for (std::size_t g = 0; g < l.sums / sizeof(float); ++g) {
            std::int32_t sum = 0;
            if (g < l.groups)
                for (std::size_t i = 0; i < p.group; ++i) sum += natural[g * p.group + i];
            sums[g] = float(sum);
        }
        if (l.twos) std::memcpy(sums + l.groups, sums, l.groups * sizeof(float));
        std::int8_t* codes = reinterpret_cast<std::int8_t*>(token + l.sums);
        if (p.bits == 3)
            arrange<3>(natural, l.padded, codes);
        else if (p.bits == 8)
            arrange<8>(natural, l.padded, codes);
        else
            arrange<4>(natural, l.padded, codes);
        if (l.twos) std::memcpy(codes + l.padded, codes, l.padded);
    }
    return true;
}

std::size_t scratch_bytes_affine(const Product& p) { return TILE_ROWS * up(p.columns, UNIT); }

void matmul_affine(const Product& p, const unsigned char* prepared, unsigned char* scratch, std::size_t first,
                   std::size_t last) {
    const auto chosen = p.bits == 3   ? (p.group == 64 ? multiply<3, 64> : multiply<3, 32>)
                        : p.bits == 8 ? (p.group == 64 ? multiply<8, 64> : multiply<8, 32>)
                                      : (p.group == 64 ? multiply<4, 64> : multiply<4, 32>);
    chosen(p, prepared, scratch, first, last);
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
