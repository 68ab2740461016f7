// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <utility>

#include "kvkeep/torch.h"
#include "torch_matrix_unit.h"

namespace kvkeep {
namespace {

constexpr std::array<std::pair<at::ScalarType, Dtype>, 16> kDtypes{{{at::kFloat, Dtype::f32},
                                                                    {at::kHalf, Dtype::f16},
                                                                    {at::kBFloat16, Dtype::bf16},
                                                                    {at::kDouble, Dtype::f64},
                                                                    {at::kLong, Dtype::i64},
                                                                    {at::kInt, Dtype::i32},
                                                                    {at::kShort, Dtype::i16},
                                                                    {at::kChar, Dtype::i8},
                                                                    {at::ScalarType::UInt64, Dtype::u64},
                                                                    {at::ScalarType::UInt32, Dtype::u32},
                                                                    {at::ScalarType::UInt16, Dtype::u16},
                                                                    {at::kByte, Dtype::u8},
                                                                    {at::kBool, Dtype::boolean},
                                                                    {at::ScalarType::Float8_e4m3fn, Dtype::f8_e4m3},
                                                                    {at::ScalarType::Float8_e5m2, Dtype::f8_e5m2},
                                                                    {at::kComplexFloat, Dtype::complex64}}};

constexpr Owner::Counting kImpl{
    [](void* impl) { c10::raw::intrusive_ptr::incref(static_cast<c10::TensorImpl*>(impl)); },
    [](void* impl) { c10::raw::intrusive_ptr::decref(static_cast<c10::TensorImpl*>(impl)); }};

void run(void*, std::int64_t begin, std::int64_t end, std::int64_t grain,
         void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  at::parallel_for(begin, end, grain,
                   [body, context](std::int64_t first, std::int64_t last) { body(context, first, last); });
}

}  // namespace

Dtype dtype_of(at::ScalarType dtype) {
  for (const auto& [theirs, ours] : kDtypes)
    if (theirs == dtype) return ours;
  refuse("tensor: dtype ", c10::toString(dtype), "; allowed real numbers of 1 to 8 bytes, bool and complex64");
}

at::ScalarType torch_dtype(Dtype dtype) {
  for (const auto& [theirs, ours] : kDtypes)
    if (ours == dtype) return theirs;
  refuse("tensor: dtype ", dtype, "; allowed the dtypes that LibTorch has");
}

Device device_of(at::Device device) {
  return {device.is_cpu()    ? Device::Kind::cpu
          : device.is_cuda() ? Device::Kind::cuda
                             : Device::Kind::other,
          device.has_index() ? device.index() : std::int32_t{0}};
}

at::Device torch_device(const Device& device) {
  KVKEEP_REQUIRE(device.kind != Device::Kind::other, "tensor: on ", device.str(), "; allowed cpu and cuda");
  return device.is_cpu() ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device.index));
}

Tensor TensorBackend<at::Tensor>::view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  KVKEEP_REQUIRE(tensor.layout() == at::kStrided, "tensor: its layout is not strided; allowed strided tensors");
  KVKEEP_REQUIRE(!tensor.is_neg() && !tensor.is_conj(), "tensor: it is a view of numbers with the other sign (",
                 tensor.is_neg() ? "negative" : "conjugate",
                 " bit); allowed numbers as they are in memory: ", tensor.is_neg() ? "resolve_neg()" : "resolve_conj()",
                 " makes them");
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  kImpl.retain(impl);
  Owner owner(impl, kImpl);
  return {tensor.data_ptr(),
          dtype_of(tensor.scalar_type()),
          Shape(std::span(sizes.data(), sizes.size())),
          Shape(std::span(strides.data(), strides.size())),
          device_of(tensor.device()),
          std::move(owner)};
}

at::Tensor TensorBackend<at::Tensor>::made_of(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const Shape &sizes = tensor.sizes(), &strides = tensor.strides();
  const at::Device device =
      torch_device(tensor.device());  // named explicitly, otherwise LibTorch asks the driver where the memory is
  return at::from_blob(
      tensor.bytes(), at::IntArrayRef(sizes.data(), sizes.size()), at::IntArrayRef(strides.data(), strides.size()),
      [keep = tensor.owner()](void*) {}, at::TensorOptions().dtype(torch_dtype(tensor.dtype())).device(device), device);
}

void copy_by_torch(const Tensor& from, const Tensor& to) { torch_tensor(to).copy_(torch_tensor(from)); }

Threads torch_threads() { return {run, nullptr}; }

void use_torch() {
  use_device_copy(copy_by_torch);
  use_device_resources(torch_resources);
  cpu::use_matrix_unit(torch_matrix_unit());
}

}  // namespace kvkeep
