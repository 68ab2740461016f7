// SPDX-License-Identifier: Apache-2.0
// LibTorch's side of the execution model: its streams are those of the CPU, whose tensors are device memory, and an
// accelerator's memory is what LibTorch's allocator of the CPU gives, or under Settings::guard the model's own.

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <set>

#include "cuda_model.h"
#include "device_memory.h"
#include "kvkeep/torch.h"
#include "torch_streams.h"

namespace kvkeep::cuda::model {
namespace {

struct HostStreams final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CPU> {
  const c10::impl::DeviceGuardImplInterface* before =
      c10::impl::getDeviceGuardImpl(c10::DeviceType::CPU);  // what this takes the place of, held for the leak sanitizer

  static c10::Stream as_torch(cudaStream_t stream) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCPU), reinterpret_cast<c10::StreamId>(stream));
  }
  static cudaStream_t as_cuda(const c10::Stream& stream) { return reinterpret_cast<cudaStream_t>(stream.id()); }

  c10::Stream getStream(c10::Device) const noexcept override { return as_torch(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_torch(nullptr); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    cudaStream_t made = nullptr;
    static_cast<void>(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return as_torch(made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return as_torch(std::exchange(current, as_cuda(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return as_cuda(stream); }

  inline static cudaStream_t current = nullptr;
};
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CPU, new HostStreams);

class Counted final : public DeviceResources {
 public:
  [[nodiscard]] void* stream() override { return torch_->stream(); }
  [[nodiscard]] void* allocate(std::int64_t bytes, void* stream) override {
    allocated();
    if (!settings().guard) return torch_->allocate(bytes, stream);
    return *guarded_.insert(take_device_memory(static_cast<std::size_t>(bytes))).first;
  }
  void free(void* memory, std::int64_t bytes, void* stream) noexcept override {
    auto* const taken = static_cast<std::byte*>(memory);
    if (guarded_.erase(taken) == 0) return torch_->free(memory, bytes, stream);
    give_device_memory(taken);
  }

 private:
  std::shared_ptr<DeviceResources> torch_ = torch_resources(Device{});
  std::set<std::byte*> guarded_;
};

}  // namespace

std::shared_ptr<DeviceResources> resources() { return std::make_shared<Counted>(); }

}  // namespace kvkeep::cuda::model
