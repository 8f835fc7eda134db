#include "kernels/products/products.h"

namespace npu_ops::NPU_TIER {

bool products_pay() { return true; }

}  // namespace npu_ops::NPU_TIER
