// SPDX-License-Identifier: Apache-2.0
#include "device_pool.h"

#include <algorithm>

#include "kvkeep/core/error.h"
#include "memory.h"

namespace kvkeep::cuda {

/// What allocated memory needs to be given back, which may be after the pool.
struct DevicePool::Home {
  struct Piece {
    void* memory;
    std::int64_t bytes;
    Stream stream;  ///< that it was allocated for
  };
  Device device;
  std::shared_ptr<DeviceResources> resources;
  std::vector<Stream> streams;
  std::vector<Piece> left = {};  ///< goes back once no stream is being captured: a replay would repeat it
  std::unique_ptr<SideStream> side = nullptr;

  ~Home() {
    for (const Piece& piece : left) free(piece);
  }
  void give_back() noexcept {
    try {
      if (std::ranges::any_of(streams, [](Stream stream) { return is_capturing(stream); })) return;
    } catch (const std::exception&) {  // the device is gone, and whatever used the memory
    }
    for (const Piece& piece : std::exchange(left, {})) free(piece);
  }
  void free(const Piece& piece) const noexcept {
    try {
      const DeviceScope scope(device.index);
      for (const Stream stream : streams) order_after(piece.stream, stream);
    } catch (const std::exception&) {
    }
    resources->free(piece.memory, piece.bytes, piece.stream);
  }
};

DevicePool::DevicePool(Device device, std::shared_ptr<DeviceResources> resources)
    : home_(new Home{device, std::move(resources), {}}) {}

Device DevicePool::device() const { return home_->device; }

Stream DevicePool::current() const { return static_cast<Stream>(home_->resources->stream()); }

Stream DevicePool::stream() {
  const Stream now = current();
  if (std::ranges::find(home_->streams, now) == home_->streams.end()) home_->streams.push_back(now);
  captured_ = captured_ || is_capturing(now);
  return now;
}

Stream DevicePool::side() {
  if (home_->side == nullptr) {
    const DeviceScope scope(home_->device.index);
    home_->side = std::make_unique<SideStream>();
    home_->streams.push_back(home_->side->get());
  }
  return home_->side->get();
}

const std::vector<Stream>& DevicePool::used() const { return home_->streams; }

DeviceMemory DevicePool::allocate(std::int64_t bytes) const {
  constexpr std::int64_t kLeast = 64;
  home_->give_back();
  struct Held {
    std::shared_ptr<Home> home;
    Home::Piece piece;
  };
  auto held = std::make_unique<Held>(Held{home_, {nullptr, std::max(bytes, kLeast), current()}});
  Home::Piece& piece = held->piece;
  piece.memory = home_->resources->allocate(piece.bytes, piece.stream);
  KVKEEP_REQUIRE_AS(DeviceError, piece.memory != nullptr, "accelerator: its resources gave no memory for ", piece.bytes,
                    " bytes on ", device().str(), "; allowed an address, or an exception");
  void* const memory = piece.memory;
  return {memory, {held.release(), [](void* context) {
                     const std::unique_ptr<Held> freed(static_cast<Held*>(context));
                     freed->home->left.push_back(freed->piece);
                     freed->home->give_back();
                   }}};
}

}  // namespace kvkeep::cuda
