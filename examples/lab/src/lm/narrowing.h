// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A step whose tokens become fewer from layer to layer.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvlab/decoder.h"

namespace kvkeep::lm::detail {

/// The tokens of a step that are present in the current layer: all of them, until `narrow`.
class Present {
 public:
  explicit Present(const Step& step) : step_(step), indptr_(step.indptr), positions_(step.positions) {}
  Present(const Present&) = delete;
  Present& operator=(const Present&) = delete;

  [[nodiscard]] std::int64_t tokens() const { return static_cast<std::int64_t>(positions_.size()); }
  [[nodiscard]] std::int64_t sequences() const { return static_cast<std::int64_t>(indptr_.size()) - 1; }
  [[nodiscard]] std::int64_t first_token(std::int64_t sequence) const {
    return indptr_[static_cast<std::size_t>(sequence)];
  }
  /// 0 for a sequence that has left the step.
  [[nodiscard]] std::int64_t tokens_of(std::int64_t sequence) const {
    return first_token(sequence + 1) - first_token(sequence);
  }
  /// Sequences with tokens, ascending.
  [[nodiscard]] std::vector<std::int32_t> still() const;
  [[nodiscard]] std::span<const std::int32_t> indptr() const { return indptr_; }
  [[nodiscard]] std::span<const std::int32_t> positions() const { return positions_; }
  /// The position where the step begins for a sequence, whichever tokens have left since: its old slots are before it.
  [[nodiscard]] std::int32_t begin(std::int64_t sequence) const {
    return step_.positions[static_cast<std::size_t>(step_.indptr[static_cast<std::size_t>(sequence)])];
  }

  /// From now on only the tokens of `onward`, the answer of who_goes_on, are present.
  void narrow(Onward onward);

 private:
  const Step& step_;
  std::span<const std::int32_t> indptr_, positions_;
  std::vector<std::int32_t> own_indptr_, own_positions_;
};

/// The answer of `options.on_attended` to `sight`; nothing if all tokens continue. Throws: InvalidArgument as
/// StepOptions says.
std::optional<Onward> who_goes_on(const ModelSpec& spec, const StepOptions& options, const LayerSight& sight);

}  // namespace kvkeep::lm::detail
