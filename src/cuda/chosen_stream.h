// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Resources whose stream a C program may choose.

#include <memory>
#include <optional>

#include "kvkeep/core/tensor.h"

namespace kvkeep::cuda {

class ChosenStream final : public DeviceResources {
 public:
  explicit ChosenStream(std::shared_ptr<DeviceResources> of) : of_(std::move(of)) {}

  /// From now on, whatever the resources say.
  void use(void* stream) { chosen_ = stream; }

  [[nodiscard]] void* stream() override { return chosen_ ? *chosen_ : of_->stream(); }
  [[nodiscard]] void* allocate(std::int64_t bytes, void* stream) override { return of_->allocate(bytes, stream); }
  void free(void* memory, std::int64_t bytes, void* stream) noexcept override { of_->free(memory, bytes, stream); }

 private:
  const std::shared_ptr<DeviceResources> of_;
  std::optional<void*> chosen_;
};

}  // namespace kvkeep::cuda
