#pragma once
/// A step whose tokens become fewer from layer to layer.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kvkeep/lm/decoder.h"

namespace kvkeep::lm::detail {

/// The tokens of a step that are present in the layer at hand: all of them, until `narrow`.
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
  /// Where the step begins for a sequence, whoever has gone since: its old slots lie before.
  [[nodiscard]] std::int32_t begin(std::int64_t sequence) const {
    return step_.positions[static_cast<std::size_t>(step_.indptr[static_cast<std::size_t>(sequence)])];
  }

  /// Only those that go on are present from now on. `onward` is what who_goes_on says of this.
  void narrow(Onward onward);

 private:
  const Step& step_;
  std::span<const std::int32_t> indptr_, positions_;
  std::vector<std::int32_t> own_indptr_, own_positions_;
};

/// What `options.on_attended` says to `sight`; nothing where all go on. Throws: InvalidArgument as StepOptions says.
std::optional<Onward> who_goes_on(const ModelSpec& spec, const StepOptions& options, const LayerSight& sight);

}  // namespace kvkeep::lm::detail
