// SPDX-License-Identifier: Apache-2.0
#include "picture.h"

#include "kvkeep/core/error.h"

namespace kvkeep::cli {
namespace {

using Positions = std::vector<std::int32_t>;

// Maps positions of a second pass, which count from 0 over the tokens it runs on, to places in the prompt.
class Places {
 public:
  Places(const lm::Completion& done, std::int32_t prompt_length) {
    if (!done.prompt || !done.prompt->second_pass) return;
    chosen_ = done.prompt->going_on;
    shift_ = prompt_length - static_cast<std::int32_t>(chosen_.size());
  }
  [[nodiscard]] std::vector<Positions> of(std::vector<Positions> rows) const {
    for (Positions& row : rows)
      for (std::int32_t& p : row)
        p = static_cast<std::size_t>(p) < chosen_.size() ? chosen_[static_cast<std::size_t>(p)] : p + shift_;
    return rows;
  }

 private:
  Positions chosen_;
  std::int32_t shift_ = 0;
};

}  // namespace

io::KeptText kept_text(const ModelSpec& spec, const lm::Completion& done, std::int32_t prompt,
                       std::vector<std::string> pieces) {
  const Places places(done, prompt);
  const auto fed = static_cast<std::int32_t>(pieces.size());
  io::KeptText kept{.pieces = std::move(pieces),
                    .prompt = prompt,
                    .layers = spec.full_layers(),
                    .kv_heads = spec.kv_heads,
                    .folds = done.folded.has_value()};
  for (std::size_t i = 0; i < done.events.size(); ++i) {
    const lm::SequenceEvent& event = done.events[i];
    const std::int32_t seen = prompt + event.step;
    kept.stops.push_back({text("event ", i + 1, " of ", done.events.size(), ", after token ", seen), seen,
                          event.bytes_after, places.of(event.positions)});
  }
  kept.stops.push_back({"the end", fed, done.end_bytes, places.of(done.positions)});
  return kept;
}

}  // namespace kvkeep::cli
