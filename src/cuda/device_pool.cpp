#include "device_pool.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "kvkeep/torch.h"
#include "memory.h"

namespace kvkeep::cuda {
namespace {

c10::Stream current_stream(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

/// Memory from LibTorch's allocator, which assumes that it is used on the stream that was current at allocation.
struct Held {
  c10::DataPtr memory;
  c10::Stream home;
  std::shared_ptr<const std::vector<c10::Stream>> streams;
};

void release(void* context) {
  const std::unique_ptr<Held> held(static_cast<Held*>(context));
  const c10::impl::VirtualGuardImpl guard(held->home.device_type());
  for (const c10::Stream& stream : *held->streams)
    if (stream != held->home) guard.recordDataPtrOnStream(held->memory, stream);
}

}  // namespace

Stream DevicePool::stream() {
  const c10::Stream now = current_stream(torch_device(device_));
  if (std::ranges::find(*streams_, now) == streams_->end()) streams_->push_back(now);
  const auto stream = static_cast<Stream>(now.native_handle());
  captured_ = captured_ || is_capturing(stream);
  return stream;
}

Stream DevicePool::current() const {
  return static_cast<Stream>(current_stream(torch_device(device_)).native_handle());
}

std::vector<Stream> DevicePool::used() const {
  std::vector<Stream> all;
  for (const c10::Stream& stream : *streams_) all.push_back(static_cast<Stream>(stream.native_handle()));
  return all;
}

DeviceMemory DevicePool::allocate(std::int64_t bytes) const {
  constexpr std::int64_t kLeast = 64;
  const at::Device device = torch_device(device_);
  const c10::DeviceGuard guard(device);
  c10::DataPtr memory = c10::GetAllocator(device.type())->allocate(static_cast<std::size_t>(std::max(bytes, kLeast)));
  void* const data = memory.get();
  auto held = std::make_unique<Held>(Held{std::move(memory), current_stream(device), streams_});
  return {data, {held.release(), release}};
}

}  // namespace kvkeep::cuda
