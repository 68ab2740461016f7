// SPDX-License-Identifier: Apache-2.0
// Memory of arrays on a GPU, and their numbers of f8: LibTorch's.

#include <ATen/ops/empty.h>

#include "arrays.h"
#include "kvkeep/torch.h"

namespace kvkeep {
namespace {

const bool kSaid = [] {
  use_torch();
  testing::empty_on_device = [](const Shape& sizes, Dtype dtype, Device device) -> Tensor {
    return at::empty({sizes.data(), sizes.size()},
                     at::TensorOptions().dtype(torch_dtype(dtype)).device(torch_device(device)));
  };
  testing::convert_f8 = [](const Tensor& from, Dtype dtype) -> Tensor {
    return torch_tensor(from).to(torch_dtype(dtype));
  };
  return true;
}();

}  // namespace
}  // namespace kvkeep
