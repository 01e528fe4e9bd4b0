// The table of one instruction set.
#include "encoders.h"
#include "products.h"

#define PAGESTONE_TEXT_(word) #word
#define PAGESTONE_TEXT(word) PAGESTONE_TEXT_(word)

namespace pagestone {
namespace PAGESTONE_ISA {

#define PAGESTONE_AFFINE(source) \
    {{encode_affine<source, 3, 32>, encode_affine<source, 3, 64>}, \
     {encode_affine<source, 4, 32>, encode_affine<source, 4, 64>}}

extern const Table table;
const Table table = {
    PAGESTONE_TEXT(PAGESTONE_ISA),
    {encode_int8<SourceBF16>, encode_int8<SourceF16>, encode_int8<SourceF32>},
    {encode_fp8<SourceBF16, ScaleBF16>, encode_fp8<SourceF16, ScaleBF16>, encode_fp8<SourceF32, ScaleBF16>},
    {encode_fp8<SourceBF16, ScaleF32>, encode_fp8<SourceF16, ScaleF32>, encode_fp8<SourceF32, ScaleF32>},
    {encode_bf16<SourceBF16>, encode_bf16<SourceF16>, encode_bf16<SourceF32>},
    {PAGESTONE_AFFINE(SourceBF16), PAGESTONE_AFFINE(SourceF16), PAGESTONE_AFFINE(SourceF32)},
    {prepared_bytes_bf16, prepare_bf16, scratch_bytes_bf16, matmul_bf16},
    {prepared_bytes_fp8, prepare_fp8, scratch_bytes_fp8, matmul_fp8},
    {prepared_bytes_int8, prepare_int8, scratch_bytes_int8, matmul_int8},
    {prepared_bytes_affine, prepare_affine, scratch_bytes_affine, matmul_affine},
    read_bytes,
};
#undef PAGESTONE_AFFINE

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
