// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The kernel of row_body.h, for translation units that name a body.

#include "key_lanes.cuh"
#include "launch.cuh"
#include "row_body.h"
#include "select.cuh"
#include "team.cuh"

namespace kvkeep::cuda {

/// A row as a body reads it on a GPU.
template <class Key, class Value>
class DeviceRow : public ScoredRow<Key, Value> {
 public:
  __device__ DeviceRow(const ScoredRow<Key, Value>& row, Element keys, std::int32_t* histogram)
      : ScoredRow<Key, Value>(row), keys_(keys), histogram_(histogram) {}

  /// Eight lanes have a key, as those of every pass over keys alone.
  template <class Team, class Body>
  __device__ void each_key_norm(Team team, const Body& body) const {
    const bool aligned = is_aligned(this->row_.keys);
    for (std::int32_t tile = this->slots_.from; tile < this->slots_.to; tile += team.size() / kLanes) {
      const std::int32_t t = tile + team.thread() / kLanes;
      float square = 0;
      if (t < this->slots_.to)
        each_word<Key>(this->row_.keys, t, this->around_.key_dim, aligned, keys_, [&](std::int32_t, const float* x) {
#pragma unroll
          for (int i = 0; i < kPerWord<Key>; ++i) square = fmaf(x[i], x[i], square);
        });
      square = sum_of_lanes(square);
      if (t < this->slots_.to && team.thread() % kLanes == 0)
        body(t, sqrtf(square) * fabsf(key_scale<Key>(this->row_, t)));
    }
  }

  template <class Team, class KeyOf>
  [[nodiscard]] __device__ std::uint64_t least_of_largest(Team team, std::int64_t wanted, const KeyOf& key_of) const {
    std::uint64_t count = 0;
    this->each_slot(team, [&](std::int32_t t) { count += key_of(t) != 0 ? 1 : 0; });
    if (static_cast<std::uint64_t>(wanted) >= team.sum(count)) return 1;
    return least_kept(team, histogram_, 0, this->length(), static_cast<std::int32_t>(wanted), key_of);
  }

 private:
  Element keys_;
  std::int32_t* histogram_;  ///< [kDigits] of shared memory
};

template <class Body, class Key, class Value>
__global__ void __launch_bounds__(BodyTraits<Body>::kEachSlot ? tuning::kKeyThreads : tuning::kMostThreads)
    row_body_kernel(RowBodyArguments<Body> a, std::int32_t chunks) {
  wait_for_earlier_kernels();
  using Traits = BodyTraits<Body>;
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::int32_t, histogram, kDigits);
  const EvidenceArguments& e = a.rows.evidence;
  const BlockTeam team(scratch);
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} * chunks; work += gridDim.x) {
    const std::int64_t r = work / chunks;
    const Row& row = e.rows[r];
    SlotRange slots{0, row.length};
    if constexpr (Traits::kEachSlot) {
      slots.from = static_cast<std::int32_t>(work - r * chunks) * tuning::kKeyChunk;
      if (row.length - slots.from > tuning::kKeyChunk) slots.to = slots.from + tuning::kKeyChunk;
    }
    if ((!a.rows.sum && !a.rows.accumulates && !e.due(r)) || slots.from >= row.length) continue;
    const std::int32_t next = a.rows.next_positions == nullptr ? 0 : a.rows.next_positions[r / e.kv_heads];
    const DeviceRow<Key, Value> scored(ScoredRow<Key, Value>(row, e.limits == nullptr ? nullptr : e.limits + r,
                                                             {e.dim, a.rows.value_dim, e.first_head, next}, slots),
                                       e.keys, histogram);
    float* const g = a.rows.scores + row.first;
    if constexpr (Traits::kWindow)
      finish_row(a.body, a.rows.sum, a.rows.accumulates, scored, a.rows.windows[r], a.rows.attention + row.first, g,
                 team);
    else
      a.body.score(scored, g, team);
    if constexpr (!Traits::kEachSlot) __syncthreads();
  }
}

template <class Body>
void launch_row_body(const RowBodyArguments<Body>& a, Stream stream) {
  using Traits = BodyTraits<Body>;
  const EvidenceArguments& e = a.rows.evidence;
  const auto run = [&](auto key, auto value) {
    const std::int32_t chunks = Traits::kEachSlot ? key_chunks(e) : 1;
    launch("row_body", row_body_kernel<Body, decltype(key), decltype(value)>,
           {.blocks = blocks_for(std::int64_t{e.count} * chunks),
            .threads = Traits::kEachSlot ? tuning::kKeyThreads : tuning::threads_for(e.longest)},
           stream, a, chunks);
  };
  const auto with_value = [&](auto key) {
    if constexpr (Traits::kReadsValues) {
      check_wide("row_body", "values", a.rows.values);
      with_wide_element(a.rows.values, [&](auto value) { run(key, value); });
    } else {
      run(key, Unread{});
    }
  };
  if constexpr (Traits::kReads == BodyReads::key_norms) {
    check_dim("row_body", e.dim);
    with_element(e.keys, with_value);
  } else if constexpr (Traits::kReadsKeys) {
    check_wide("row_body", "keys", e.keys);
    with_wide_element(e.keys, with_value);
  } else {
    with_value(Unread{});
  }
}

}  // namespace kvkeep::cuda
