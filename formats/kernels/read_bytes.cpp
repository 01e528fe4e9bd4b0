// Reads memory once: the time a product is measured against.
#include "products.h"

namespace pagestone {
namespace PAGESTONE_ISA {

std::uint64_t read_bytes(const unsigned char* bytes, std::size_t count) {
    constexpr std::size_t REGISTERS_AT_ONCE = 8, STEP = REGISTERS_AT_ONCE * sizeof(Words);
    Words found[REGISTERS_AT_ONCE] = {};
    std::size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        for (std::size_t line = 0; line < STEP; line += 64) fetch(bytes + i + line, AHEAD);
        for (std::size_t v = 0; v < REGISTERS_AT_ONCE; ++v) found[v] ^= load_words(bytes + i + v * sizeof(Words));
    }
    std::uint64_t all = 0;
    for (; i < count; ++i) all ^= bytes[i];
    std::uint32_t words[STEP / sizeof(std::uint32_t)];
    std::memcpy(words, found, sizeof words);
    for (std::uint32_t word : words) all ^= word;
    return all;
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
