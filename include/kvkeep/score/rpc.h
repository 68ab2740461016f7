#pragma once
/// RPC: attention of the newest queries to the reasoning before them. Source: "Reasoning Path Compression: Compressing
/// Generation Trajectories for Efficient LLM Reasoning" (Song et al.). Style `official` scores as its code does, for a
/// budget that grows (docs/policies.md); style `fixed` is the form for a fixed budget. Differs: the window is protected
/// as a set; ties keep the newer slot; slots stay in time order; fp32; `fixed`: each query at its own logical position.

#include "kvkeep/score/scorer.h"

namespace kvkeep {

struct RpcOptions {
  enum class Style : std::uint8_t {
    fixed,     ///< every window query, softmax over the history from slot 0 on
    official,  ///< one query fewer, the newest counted twice; softmax over the history after the protected oldest slots
               ///< (the prompt)
  };
  enum class Heads : std::uint8_t {
    all,    ///< mean over every query head of the layer: all KV heads rank alike
    group,  ///< mean over the query heads of the KV head
  };
  std::int32_t window = 32;  ///< newest queries (R)
  std::int32_t pool = 7;     ///< slots to average over, odd; 1: no pooling
  Style style = Style::fixed;
  Heads heads = Heads::group;
};

class Rpc final : public Scorer {
 public:
  explicit Rpc(RpcOptions options = {}) : options_(options) {}

  [[nodiscard]] std::string_view name() const override { return "rpc"; }
  [[nodiscard]] Needs needs() const override { return {.queries = options_.window, .keys = true}; }
  [[nodiscard]] std::int32_t keeps_newest() const override { return options_.window; }

  /// g[t] = average-pooled sum over the window's queries of softmax(scale * q.k) over the history alone, mean over
  /// heads; 0 outside that history; g[t] = t if no query was seen. W = min(window, seen, length - 1, budget); history:
  /// the slots older than all W queries, with `official` without the guarded oldest ones. Pooling stays inside the
  /// history. `Heads::all` needs rows of one length and averages by slot, even if the heads hold different tokens.
  /// Cost: window attention with `window` queries. Workspace: 4 bytes per slot, and per thread
  /// history_attention_workspace().
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  [[nodiscard]] const RpcOptions& options() const { return options_; }

 private:
  RpcOptions options_;
};

}  // namespace kvkeep
