// SPDX-License-Identifier: Apache-2.0
#pragma once
/// LibTorch's tensors, devices and threads for kvkeep. With this header, at::Tensor converts to Tensor and back, and
/// both share their memory. Including it changes nothing else; use_torch() does, and torch_threads() lends its threads.
/// Link kvkeep::torch.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/tensor.h"

namespace kvkeep {

/// Throws InvalidArgument for a dtype that kvkeep does not know (quantised types, complex128).
[[nodiscard]] Dtype dtype_of(at::ScalarType dtype);
[[nodiscard]] at::ScalarType torch_dtype(Dtype dtype);
[[nodiscard]] Device device_of(at::Device device);
/// Throws InvalidArgument for a device that is neither a CPU nor a CUDA device.
[[nodiscard]] at::Device torch_device(const Device& device);

/// Both allocate only the handle of the result. Throws InvalidArgument for a tensor that is not strided, has the
/// negative or conjugate bit, or whose dtype kvkeep does not know.
template <>
struct TensorBackend<at::Tensor> {
  [[nodiscard]] static Tensor view(const at::Tensor& tensor);
  [[nodiscard]] static at::Tensor made_of(const Tensor& tensor);
};

/// The same conversion, spelled out: use it to call at::Tensor's functions on a Tensor.
[[nodiscard]] inline at::Tensor torch_tensor(const Tensor& tensor) {
  return TensorBackend<at::Tensor>::made_of(tensor);
}

/// LibTorch's intra-op threads, for Provided::threads and UsingThreads: at::get_num_threads() of them.
[[nodiscard]] Threads torch_threads();

/// LibTorch's memory and current stream (c10::cuda::CUDAStreamGuard) for cuda::accelerator(). Loads libtorch_cuda if
/// the program has not: call this before anything asks LibTorch for CUDA, or link libtorch_cuda. Throws DeviceError if
/// this LibTorch has no CUDA.
[[nodiscard]] std::shared_ptr<DeviceResources> torch_resources(const Device& device);

/// From now on kvkeep's copies between devices, bf16 products on a matrix unit (AMX), and memory and streams of
/// accelerators that are given none (torch_resources()) are LibTorch's, in the whole process. Without it copies off the
/// CPU are refused, and products are kvkeep's own. Call it once, at the start of the program.
void use_torch();

/// For use_device_copy(): copies between tensors of one shape and dtype.
void copy_by_torch(const Tensor& from, const Tensor& to);

}  // namespace kvkeep
