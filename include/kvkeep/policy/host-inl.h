#pragma once
// Bodies of machine.h: compiled by src/policy, or where they are included under KVKEEP_HEADER_ONLY.
// The CPU as a machine: the line's stages are the library's own functions.

#include <algorithm>

#include "kvkeep/core/header_only.h"
#include "kvkeep/core/require_host.h"
#include "kvkeep/keep/compact.h"
#include "kvkeep/policy/machine.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/score/window_attention.h"

namespace kvkeep {
namespace host_detail {

/// Gives rows that share one selection the same scores, in place. Rows are in the order layer, sequence, head; all rows
/// of a sequence have one length.
inline void share_scores(const Evidence& evidence, const Limits& limits, Sharing share, float* g) {
  const RowTable& table = evidence.table;
  const auto heads = static_cast<std::size_t>(evidence.spec.kv_heads);
  const std::size_t sequences = [&] {
    std::size_t n = 0;
    while (n < table.groups.size() && table.groups[n].layer == table.groups.front().layer) ++n;
    return n;
  }();
  const bool all = share == Sharing::all || share == Sharing::all_mean;
  const std::size_t stride = sequences * heads, layers = table.rows.size() / std::max<std::size_t>(stride, 1);
  const auto each_sharing_row = [&](std::size_t sequence, std::size_t head, auto&& body) {
    for (std::size_t l = 0; l < layers; ++l)
      for (std::size_t h = all ? 0 : head; h < (all ? heads : head + 1); ++h) body(l * stride + sequence * heads + h);
  };
  for (std::size_t s = 0; s < sequences; ++s)
    for (std::size_t head = 0; head < (all ? 1 : heads); ++head) {
      const std::size_t first = s * heads + head;
      const Row& row = table.rows[first];
      if (!limits.rows[first].due) continue;
      float* shared = g + row.first;
      each_sharing_row(s, head, [&](std::size_t r) {
        const Row& other = table.rows[r];
        KVKEEP_REQUIRE_AS(Unsupported, other.length == row.length, "share: rows that share one selection hold ",
                          row.length, " and ", other.length, " slots (layer ", other.layer, ", head ", other.head,
                          "); allowed rows of one length");
        if (r == first) return;
        const float* from = g + other.first;
        if (share == Sharing::all)
          std::transform(from, from + row.length, shared, shared,
                         [](float a, float b) { return a > b || b != b ? a : b; });
        else
          std::transform(from, from + row.length, shared, shared, [](float a, float b) { return a + b; });
      });
      const auto rows = static_cast<float>(all ? layers * heads : layers);
      if (share != Sharing::all)
        std::transform(shared, shared + row.length, shared, [rows](float x) { return x / rows; });
      each_sharing_row(s, head, [&](std::size_t r) {
        if (r != first) std::copy_n(shared, row.length, g + table.rows[r].first);
      });
    }
}

class HostEvent final : public Event {
 public:
  HostEvent(const Evidence& evidence, const Limits& limits) : evidence_(evidence), limits_(limits) {}

  [[nodiscard]] WindowAttention attend(std::int32_t window, bool official, WindowNeeds needs) override {
    return window_attention(evidence_, row_windows(evidence_, limits_, window, official), needs);
  }

  [[nodiscard]] Scores score(const Scorer& scorer, const WindowAttention& seen) override {
    return scorer.score(evidence_, limits_, seen);
  }

  [[nodiscard]] Scores share(const Scores& scores, Sharing share) override {
    Scores shared{clone(scores.data)};
    share_scores(evidence_, limits_, share, shared.data.data<float>());
    return shared;
  }

  void allot(const Allocator& allocator, const Scores& scores, WindowAttention seen, Decision& decision) override {
    allocator.allot(evidence_, limits_, scores, std::move(seen), decision);
  }

 private:
  const Evidence& evidence_;
  const Limits& limits_;
};

class Host final : public Machine {
 public:
  void claim() override {}
  [[nodiscard]] MachineMemory& memory() const override { return host_memory(); }
  [[nodiscard]] std::vector<std::string> problems(const Demand&, const ModelSpec&) const override { return {}; }
  [[nodiscard]] std::unique_ptr<Columns> columns(std::int32_t rows) override {
    return std::make_unique<HostColumns>(rows);
  }
  [[nodiscard]] std::unique_ptr<Event> begin(const Evidence& evidence, const Limits& limits, const Demand&) override {
    require_host("decide", evidence.table.device);
    return std::make_unique<HostEvent>(evidence, limits);
  }
  [[nodiscard]] Decision decide(const KVPolicy& policy, const Evidence& evidence) override {
    return policy.decide(*this, evidence);
  }
  void move(const RowTable& table, const Decision& decision, std::span<const PageMove> pages,
            std::span<const ColumnTarget>) override {
    compact(table, *decision.keep, pages);
  }
  [[nodiscard]] std::int64_t workspace_bytes(const KVPolicy&, const Evidence&) override { return 0; }
  void use_workspace(Tensor) override { refuse<Unsupported>("workspace: the CPU takes none; allowed on a device"); }
};

}  // namespace host_detail

KVKEEP_INLINE Machine& host() {
  static host_detail::Host host;
  return host;
}

KVKEEP_INLINE std::vector<std::string> KVPolicy::problems_on(const Machine& machine, const ModelSpec&) const {
  if (machine.is_host() || trigger().never) return {};
  return {text("device: ", name(), " has no kernels; given ", machine.device().str(), "; allowed only on the CPU")};
}

}  // namespace kvkeep
