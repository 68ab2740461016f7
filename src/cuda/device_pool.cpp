// SPDX-License-Identifier: Apache-2.0
#include "device_pool.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "kvkeep/torch.h"
#include "memory.h"
#include "torch_memory.h"

namespace kvkeep::cuda {
namespace {

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

c10::Stream DevicePool::now() const {
  const at::Device device = torch_device(device_);
  return own_ ? *own_ : c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

Stream DevicePool::stream() {
  const c10::Stream now = this->now();
  if (std::ranges::find(*streams_, now) == streams_->end()) streams_->push_back(now);
  const auto stream = static_cast<Stream>(now.native_handle());
  captured_ = captured_ || is_capturing(stream);
  return stream;
}

void DevicePool::use_stream(Stream stream) {
  // As c10::cuda::getStreamFromExternal() makes it, without libc10_cuda: the id of a stream that LibTorch did not make
  // is its address. Ids of LibTorch's own are odd, as is cudaStreamLegacy, another name of the default stream.
  auto id = reinterpret_cast<c10::StreamId>(stream);
  constexpr c10::StreamId kLegacy = 1;
  if (id == kLegacy) id = 0;
  own_.emplace(c10::Stream::UNSAFE, torch_device(device_), id);
}

std::vector<Stream> DevicePool::used() const {
  std::vector<Stream> all;
  for (const c10::Stream& stream : *streams_) all.push_back(static_cast<Stream>(stream.native_handle()));
  return all;
}

DeviceMemory DevicePool::allocate(std::int64_t bytes) const {
  constexpr std::int64_t kLeast = 64;
  const c10::StreamGuard guard(now());
  c10::DataPtr memory = memory_of_torch(device_, static_cast<std::size_t>(std::max(bytes, kLeast)));
  void* const data = memory.get();
  auto held = std::make_unique<Held>(Held{std::move(memory), guard.current_stream(), streams_});
  return {data, {held.release(), release}};
}

}  // namespace kvkeep::cuda
