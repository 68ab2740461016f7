// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The queries of an EvidenceCase as the attention kernels read them, and the windows of its rows.

#include "evidence_case.h"
#include "prepare.h"

namespace kvkeep::cuda {

/// Windows and turned queries of a case on the device, its newest `window`.
class AskedQueries {
 public:
  AskedQueries(const EvidenceCase& c, const DeviceEvidence& there, std::int32_t window, bool official = false)
      : out_(c.table.groups.size() * static_cast<std::size_t>(c.spec.query_heads * window * c.shape.dim)),
        windows_(c.table.rows.size()) {
    launch_prepare({.evidence = there.arguments(),
                    .newest = nullptr,
                    .window = window,
                    .official = official,
                    .windows = windows_.data(),
                    .queries = out_.data(),
                    .turn = c.shape.pre_rope && !c.spec.rope.inv_freq.empty()},
                   nullptr);
  }
  [[nodiscard]] const DeviceArray<float>& floats() const { return out_; }
  [[nodiscard]] const DeviceArray<RowWindow>& windows() const { return windows_; }

 private:
  DeviceArray<float> out_;
  DeviceArray<RowWindow> windows_;
};

}  // namespace kvkeep::cuda
