// SPDX-License-Identifier: Apache-2.0
#include "library_event.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

namespace kvkeep::testing {

std::string policy_json(const oracle::Options& o) {
  nlohmann::json policy = {{"policy", o.policy}, {"budget", o.budget}, {"sink", o.sink}, {"variant", o.variant}};
  if (o.recent >= 0) policy["recent"] = o.recent;
  if (o.policy != "streaming") policy["scorer"] = {{"heads", o.tova_heads_all ? "all" : "group"}};
  if (o.policy.starts_with("ams-"))
    policy["allocator"] = {{"window", o.window},
                           {"segment_mass", o.segment_mass},
                           {"min_segment", o.min_segment},
                           {"max_segment", o.max_segment},
                           {"min_quota", o.min_quota},
                           {"credit_decay", o.credit_decay},
                           {"credit_mix", o.credit_mix},
                           {"credit", o.credit},
                           {"pool", o.pool},
                           {"suffix_fill", o.suffix_fill},
                           {"segments", o.segments},
                           {"quotas", o.quotas},
                           {"protected_mass", o.protected_mass},
                           {"coverage", o.coverage}};
  if (o.coverage_auto) policy["allocator"]["coverage"] = "auto";
  return policy.dump();
}

OracleCache::OracleCache(std::vector<oracle::Sequence> sequences, Dtype dtype, std::int32_t padding)
    : sequences_(std::move(sequences)) {
  const oracle::Sequence& first = sequences_.front();
  spec_ = {.query_heads = first.Hq,
           .kv_heads = first.Hkv,
           .key_dim = first.D,
           .value_dim = first.D,
           .softmax_scale = first.scale,
           .rope = {},
           .layers = {LayerSpec{.sinks = {first.sinks.begin(), first.sinks.end()}}},
           .logit_cap = first.cap};
  std::int32_t longest = 0;
  for (const auto& s : sequences_) longest = std::max(longest, s.T);
  const auto batch = static_cast<std::int64_t>(sequences_.size());
  const Array keys = Array::full({batch, first.Hkv, longest + padding + 1, first.D},
                                 std::numeric_limits<float>::quiet_NaN(), Dtype::f32);
  for (std::int64_t b = 0; b < batch; ++b) {
    auto& s = sequences_[static_cast<std::size_t>(b)];
    keys[b].narrow(1, padding, s.T).copy_(Array(s.keys.data(), Dtype::f32, {s.Hkv, s.T, s.D}));
    ids_.push_back(b);
    lengths_.push_back(s.T);
    starts_.push_back(padding);
    queries_.push_back(Array(s.queries.data(), Dtype::f32, {s.Hq, s.queries_seen(), s.D}));
  }
  cache_.emplace_back(DenseKv{keys.to(dtype), keys.clone().mul_(-1).to(dtype)});
  std::vector<std::int32_t> due(sequences_.size());
  std::iota(due.begin(), due.end(), 0);
  const std::int32_t layer = 0;
  table_ = make_rows(spec_, cache_, {.sequences = ids_, .lengths = {lengths_}, .starts = starts_}, {&layer, 1}, due);
  credit_.reserve(table_.rows.size());
  for (Row& row : table_.rows) {
    auto& s = sequences_[static_cast<std::size_t>(row.sequence)];
    row.positions = s.positions.data() + row.head * s.T;
    if (s.credit.empty()) continue;
    const auto& given = s.credit[static_cast<std::size_t>(row.head)];
    credit_.emplace_back(given.begin(), given.end());
    row.credit = credit_.back().data();
    row.credit_length = static_cast<std::int32_t>(given.size());
  }
  for (const oracle::Sequence& s : sequences_) {
    PositionSpans& pins = pins_.emplace_back();
    for (const int position : s.pinned) pins.add({position, position + 1});
  }
  for (RowGroup& group : table_.groups) {
    group.pinned = pins_[static_cast<std::size_t>(group.sequence)].spans();
    const auto& s = sequences_[static_cast<std::size_t>(group.sequence)];
    const Array& q = queries_[static_cast<std::size_t>(group.sequence)];
    if (s.queries_seen() == 0) continue;
    group.queries = {.data = static_cast<const std::byte*>(q.bytes()),
                     .token_stride = q.stride(1) * 4,
                     .head_stride = q.stride(0) * 4,
                     .positions = s.query_positions.data(),
                     .ring = s.queries_seen(),
                     .begin = 0,
                     .count = s.queries_seen()};
  }
}

std::vector<std::vector<oracle::Row>> in_oracle_words(const OracleCache& cache, const Decision& decision) {
  const RowTable& table = cache.table();
  std::vector<std::vector<oracle::Row>> out;
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const Row& row = table.rows[r];
    if (row.head == 0) out.emplace_back();
    oracle::Row& said = out.back().emplace_back();
    const auto flat = [&](const Tensor& t) {
      const float* data = t.data<float>() + row.first;
      return std::vector<double>(data, data + row.length);
    };
    const auto kept = decision.keep->row(r);
    said.slots.assign(kept.begin(), kept.end());
    if (decision.scores.data.defined()) said.scores = flat(decision.scores.data);
    if (decision.credit) {
      said.credit = flat(*decision.credit);
      for (const std::int32_t slot : kept) said.credit_kept.push_back(said.credit[static_cast<std::size_t>(slot)]);
    }
    if (!decision.allotment) continue;
    said.mass = flat(decision.allotment->mass.data);
    said.mass_used = flat(decision.allotment->mass_used.data);
    said.segment_ends.assign(decision.allotment->ends[r].begin(), decision.allotment->ends[r].end());
    said.quotas.assign(decision.allotment->quotas[r].begin(), decision.allotment->quotas[r].end());
  }
  return out;
}

std::vector<std::vector<oracle::Row>> library_event(const oracle::Options& options,
                                                    const std::vector<oracle::Sequence>& sequences, Dtype dtype,
                                                    std::int32_t padding) {
  const OracleCache cache(sequences, dtype, padding);
  return in_oracle_words(cache, make_policy_from_json(policy_json(options))->decide(cache.evidence()));
}

}  // namespace kvkeep::testing
