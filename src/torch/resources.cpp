// SPDX-License-Identifier: Apache-2.0
// LibTorch's allocator and current streams for accelerators.

#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <mutex>
#include <unordered_map>

#include "kvkeep/core/error.h"
#include "kvkeep/torch.h"

namespace kvkeep {
namespace {

class TorchResources final : public DeviceResources {
 public:
  explicit TorchResources(at::Device device) : device_(device) {}

  [[nodiscard]] void* stream() override {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
  }

  [[nodiscard]] void* allocate(std::int64_t bytes, void* stream) override {
    // LibTorch assumes that memory is used on the stream that was current at allocation.
    const c10::StreamGuard guard(of(stream));
    c10::DataPtr memory = c10::GetAllocator(device_.type())->allocate(static_cast<std::size_t>(bytes));
    void* const data = memory.get();
    const std::scoped_lock lock(mutex_);
    held_.emplace(data, std::move(memory));
    return data;
  }

  void free(void* memory, std::int64_t, void*) noexcept override {
    const std::scoped_lock lock(mutex_);
    held_.erase(memory);
  }

 private:
  /// As c10::cuda::getStreamFromExternal() makes it, without libc10_cuda: the id of a stream that LibTorch did not make
  /// is its address. Ids of LibTorch's own are odd, as is cudaStreamLegacy, another name of the default stream.
  [[nodiscard]] c10::Stream of(void* stream) const {
    auto id = reinterpret_cast<c10::StreamId>(stream);
    constexpr c10::StreamId kLegacy = 1;
    if (id == kLegacy) id = 0;
    return c10::Stream(c10::Stream::UNSAFE, device_, id);
  }

  const at::Device device_;
  std::mutex mutex_;
  std::unordered_map<void*, c10::DataPtr> held_;
};

}  // namespace

std::shared_ptr<DeviceResources> torch_resources(const Device& device) {
  if (!device.is_cpu()) {
    // LibTorch's CUDA half takes half a second to load, and only programs that need it from the start link it. It must
    // be loaded before its first use.
    const bool loaded = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) != nullptr;
    KVKEEP_REQUIRE_AS(DeviceError, at::globalContext().hasCUDA(), "torch_resources: this LibTorch has no CUDA",
                      loaded ? "" : " (libtorch_cuda was not found)", "; allowed a LibTorch with CUDA");
    at::globalContext().lazyInitDevice(c10::kCUDA);
  }
  return std::make_shared<TorchResources>(torch_device(device));
}

}  // namespace kvkeep
