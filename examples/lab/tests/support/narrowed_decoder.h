// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A plain second decoder whose tokens stay behind layer by layer: one sequence from position 0, no cache, in double,
/// and in the published order: rows leave after the whole layer.

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <vector>

#include "kvlab/decoder.h"

namespace kvkeep::lm {

using Ints = std::vector<std::int32_t>;
inline constexpr at::ScalarType kDouble = at::ScalarType::Double;

inline Ints counted(std::int32_t first, std::int32_t n) {
  Ints numbers(static_cast<std::size_t>(n));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

/// Of one sequence, by layer: the positions below `end` that go on behind it, ascending. Whatever is not below `end`
/// goes on everywhere.
struct Plan {
  std::map<std::int32_t, Ints> behind;
  std::int32_t end = 0;

  [[nodiscard]] Ints among(const Ints& positions, std::int32_t layer) const {
    const auto found = behind.find(layer);
    if (found == behind.end()) return positions;
    Ints kept;
    for (const std::int32_t p : positions)
      if (p >= end || std::binary_search(found->second.begin(), found->second.end(), p)) kept.push_back(p);
    return kept;
  }
  [[nodiscard]] Ints present(Ints positions, std::int32_t layer) const {
    for (std::int32_t l = 0; l < layer; ++l) positions = among(positions, l);
    return positions;
  }
};

class Plain {
 public:
  explicit Plain(const Decoder& decoder)
      : config_(decoder.config()), spec_(decoder.spec()), weights_(decoder.weights()) {}

  struct Result {
    Ints positions;                   // of the tokens that are there at the end
    at::Tensor logits;                // f64 [n, vocab]
    std::vector<at::Tensor> queries;  // by layer, f64 [n, Hq, D] after RoPE
  };

  [[nodiscard]] Result run(const Ints& ids, const Plan& plan) const {
    Result result{counted(0, static_cast<std::int32_t>(ids.size())), {}, {}};
    at::Tensor x = weights_.embedding.index_select(0, index(ids)).to(kDouble) * config_.embedding_scale;
    for (std::int32_t l = 0; l < config_.num_layers(); ++l) {
      const LayerWeights& w = weights_.layers[static_cast<std::size_t>(l)];
      const auto after = [&](const at::Tensor& added, const at::Tensor& weight) {
        return weight.defined() ? norm(added, weight) : added;
      };
      x = x + after(linear(w.o, attention(w, l, norm(x, w.input_norm), result.positions, result.queries)),
                    w.attention_after);
      const at::Tensor h = norm(x, w.mlp_norm), gate = linear(w.gate, h);
      const bool gelu = config_.activation == io::Activation::gelu_tanh;
      x = x + after(linear(w.down, (gelu ? at::gelu(gate, "tanh") : at::silu(gate)) * linear(w.up, h)), w.mlp_after);
      const Ints kept = plan.among(result.positions, l);
      Ints rows;
      for (std::int32_t i = 0; i < static_cast<std::int32_t>(result.positions.size()); ++i)
        if (std::binary_search(kept.begin(), kept.end(), result.positions[static_cast<std::size_t>(i)]))
          rows.push_back(i);
      x = x.index_select(0, index(rows));
      result.positions = kept;
    }
    result.logits = linear({weights_.output, {}}, norm(x, weights_.final_norm));
    return result;
  }

 private:
  static at::Tensor index(const Ints& numbers) {
    return at::from_blob(const_cast<std::int32_t*>(numbers.data()), {static_cast<std::int64_t>(numbers.size())},
                         at::TensorOptions(at::kInt))
        .to(at::ScalarType::Long);
  }
  [[nodiscard]] static at::Tensor linear(const Linear& map, const at::Tensor& x) {
    return at::linear(x, map.weight.to(kDouble),
                      map.bias.defined() ? std::optional<at::Tensor>(map.bias.to(kDouble)) : std::nullopt);
  }
  [[nodiscard]] at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) const {
    return x / (x * x).mean(-1, true).add(config_.rms_eps).sqrt() * weight.to(kDouble);
  }

  // x [n, heads, D]
  [[nodiscard]] at::Tensor rotated(std::int32_t layer, const at::Tensor& x, const Ints& positions) const {
    const RopeSpec& rope = spec_.rope_of(layer);
    const auto pairs = static_cast<std::int64_t>(rope.inv_freq.size());
    const at::Tensor speed =
        at::from_blob(const_cast<double*>(rope.inv_freq.data()), {pairs}, at::TensorOptions(kDouble));
    const at::Tensor angle = at::outer(index(positions).to(kDouble), speed).unsqueeze(1);
    const at::Tensor c = at::cos(angle) * rope.attention_scaling, s = at::sin(angle) * rope.attention_scaling;
    const bool half = rope.style == RopeStyle::half;
    const at::Tensor a = half ? x.narrow(2, 0, pairs) : x.slice(2, 0, 2 * pairs, 2),
                     b = half ? x.narrow(2, pairs, pairs) : x.slice(2, 1, 2 * pairs, 2);
    const at::Tensor first = a * c - b * s, second = b * c + a * s;
    return half ? at::cat({first, second}, 2) : at::stack({first, second}, 3).flatten(2);
  }

  [[nodiscard]] at::Tensor attention(const LayerWeights& w, std::int32_t layer, const at::Tensor& x,
                                     const Ints& positions, std::vector<at::Tensor>& seen) const {
    const std::int64_t n = x.size(0), dim = spec_.key_dim;
    at::Tensor q = linear(w.q, x).view({n, spec_.query_heads, dim}), k = linear(w.k, x).view({n, spec_.kv_heads, dim});
    const at::Tensor v = linear(w.v, x).view({n, spec_.kv_heads, spec_.value_dim}).repeat_interleave(spec_.group(), 1);
    if (config_.qk_norm) q = norm(q, w.q_norm), k = norm(k, w.k_norm);
    q = rotated(layer, q, positions);
    seen.push_back(q);
    k = rotated(layer, k, positions).repeat_interleave(spec_.group(), 1);
    const at::Tensor at = index(positions), distance = at.unsqueeze(1) - at.unsqueeze(0);
    at::Tensor hidden = distance.lt(0);
    const LayerSpec& kind = spec_.layers[static_cast<std::size_t>(layer)];
    if (kind.kind == LayerKind::sliding) hidden = hidden.logical_or(distance.ge(kind.window));
    const at::Tensor logits = (at::einsum("ihd,jhd->hij", {q, k}) * spec_.scale()).masked_fill(hidden, -INFINITY);
    return at::einsum("hij,jhd->ihd", {at::softmax(logits, 2), v}).reshape({n, -1});
  }

  const io::ModelConfig& config_;
  const ModelSpec& spec_;
  const Weights& weights_;
};

}  // namespace kvkeep::lm
