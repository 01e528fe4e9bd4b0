// The table of one instruction set.
#include "encoders.h"

#define PAGESTONE_TEXT_(word) #word
#define PAGESTONE_TEXT(word) PAGESTONE_TEXT_(word)

namespace pagestone {
namespace PAGESTONE_ISA {

extern const Table table;
const Table table = {
    PAGESTONE_TEXT(PAGESTONE_ISA),
    {encode_int8<SourceBF16>, encode_int8<SourceF16>, encode_int8<SourceF32>},
    {encode_fp8<SourceBF16, ScaleBF16>, encode_fp8<SourceF16, ScaleBF16>, encode_fp8<SourceF32, ScaleBF16>},
    {encode_fp8<SourceBF16, ScaleF32>, encode_fp8<SourceF16, ScaleF32>, encode_fp8<SourceF32, ScaleF32>},
};

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
