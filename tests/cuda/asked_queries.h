#pragma once
/// The queries of an EvidenceCase as the attention kernels read them.

#include "evidence_case.h"
#include "turn_queries.h"

namespace kvkeep::cuda {

/// Turned queries of a case on the device, its newest `window`.
class AskedQueries {
 public:
  AskedQueries(const EvidenceCase& c, const DeviceEvidence& there, std::int32_t window)
      : out_(c.table.groups.size() * static_cast<std::size_t>(c.spec.query_heads * window * c.shape.dim)) {
    launch_turn_queries({.evidence = there.arguments(),
                         .window = window,
                         .inv_freq = there.inv_freq(),
                         .pairs = c.shape.pre_rope ? static_cast<std::int32_t>(c.spec.rope.inv_freq.size()) : 0,
                         .style = c.shape.style,
                         .attention_scaling = c.spec.rope.attention_scaling,
                         .out = out_.data()},
                        nullptr);
  }
  [[nodiscard]] const DeviceArray<float>& floats() const { return out_; }

 private:
  DeviceArray<float> out_;
};

}  // namespace kvkeep::cuda
