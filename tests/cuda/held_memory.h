// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Streams of the execution model that are held, and memory that waits for them: LibTorch's CUDA allocator gives what
/// is freed only to work that comes later on the stream, but under the model memory is that of the host.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_model.h"

namespace kvkeep::cuda {

class HeldMemory final : public c10::Allocator {
 public:
  /// As model::hold_streams(); what is freed in between is gone once streams have caught up.
  static void hold_streams(bool hold, std::uint64_t seed = 0) {
    static HeldMemory& all = *new HeldMemory;  // tensors may outlive everything
    static c10::Allocator* const before = c10::GetCPUAllocator();
    c10::SetCPUAllocator(hold ? &all : before, 255);
    model::hold_streams(hold, seed);
    const std::scoped_lock lock(all.mutex_);
    all.held_ = hold;
    all.freed_.clear();
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const block = new Block{c10::GetDefaultCPUAllocator()->allocate(bytes), this};
    return {block->memory.get(), block, release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  struct Block {
    c10::DataPtr memory;
    HeldMemory* home;
  };
  static void release(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    HeldMemory& home = *block->home;
    const std::scoped_lock lock(home.mutex_);
    if (home.held_) home.freed_.push_back(std::move(block));
  }

  bool held_ = false;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> freed_;
};

}  // namespace kvkeep::cuda
