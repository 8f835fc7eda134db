// Batch-invariant mode: a row's result has the same bits whatever shares its batch, at the price of the kernels for many rows.
#pragma once

namespace npu_ops {

bool batch_invariant();
void set_batch_invariant(bool on);

}  // namespace npu_ops
