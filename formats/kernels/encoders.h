// Shared by the encoders of one instruction set. Definitions: encodings/*.py.
#pragma once

#include "common.h"

namespace pagestone {
namespace PAGESTONE_ISA {

#define PAGESTONE_DECLARE(codec) Encoded encode_##codec(const Encoding&);
PAGESTONE_ENCODERS(PAGESTONE_DECLARE)
#undef PAGESTONE_DECLARE

// `call` with the type of the matrix's source elements.
template <class Call>
PAGESTONE_INLINE Encoded by_source(const Encoding& e, const Call& call) {
    return e.source_type == BF16 ? call(SourceBF16{}) : e.source_type == F16 ? call(SourceF16{}) : call(SourceF32{});
}

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
