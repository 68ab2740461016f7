// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Ranks that are a process group of LibTorch. Link kvkeep::torch and LibTorch's torch_cpu.

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/policy/across_ranks.h"

namespace kvkeep {

/// All ranks of a process group, for across_ranks(). Bytes go through tensors on the host: Gloo, or any other backend
/// that gathers CPU tensors. In a program that computes over NCCL it is the group's backend for CPU tensors, which
/// torch.distributed makes for "cpu:gloo,cuda:nccl".
class TorchRanks final : public Collective {
 public:
  /// `timeout`: how long a gather waits for the others.
  explicit TorchRanks(c10::intrusive_ptr<c10d::Backend> group,
                      std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : group_(std::move(group)), timeout_(timeout) {
    KVKEEP_REQUIRE(group_, "ranks: process group must not be null; allowed a backend of torch.distributed");
  }

  [[nodiscard]] std::int32_t rank() const override { return group_->getRank(); }
  [[nodiscard]] std::int32_t size() const override { return group_->getSize(); }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    const auto bytes = static_cast<std::int64_t>(mine.size());
    const auto options = at::TensorOptions().dtype(at::kByte);
    std::vector<at::Tensor> own{at::empty({bytes}, options)};
    std::memcpy(own[0].data_ptr(), mine.data(), mine.size());
    std::vector<std::vector<at::Tensor>> every(1);
    for (std::int32_t r = 0; r < size(); ++r)
      every[0].push_back(at::from_blob(all.data() + r * bytes, {bytes}, options));
    try {
      c10d::AllgatherOptions how;
      how.timeout = timeout_;
      group_->allgather(every, own, how)->wait(timeout_);
    } catch (const std::exception& error) {
      const std::string words = error.what();  // a backtrace follows the first line
      refuse<RankError>("ranks: rank ", rank(), " of ", size(),
                        " gathered nothing: ", words.substr(0, words.find('\n')));
    }
  }

 private:
  c10::intrusive_ptr<c10d::Backend> group_;
  std::chrono::milliseconds timeout_;
};

}  // namespace kvkeep
