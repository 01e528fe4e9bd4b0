// The table of one instruction set.
#include "encoders.h"
#include "products.h"

#define PAGESTONE_TEXT_(word) #word
#define PAGESTONE_TEXT(word) PAGESTONE_TEXT_(word)

namespace pagestone {
namespace PAGESTONE_ISA {

#define PAGESTONE_ENCODER(codec) encode_##codec,
#define PAGESTONE_PRODUCT(codec) {prepared_bytes_##codec, prepare_##codec, scratch_bytes_##codec, matmul_##codec},
extern const Table table;
const Table table = {
    PAGESTONE_TEXT(PAGESTONE_ISA),
    PAGESTONE_ENCODERS(PAGESTONE_ENCODER)
    PAGESTONE_PRODUCTS(PAGESTONE_PRODUCT)
    read_bytes,
};
#undef PAGESTONE_ENCODER
#undef PAGESTONE_PRODUCT

}  // namespace PAGESTONE_ISA
}  // namespace pagestone
