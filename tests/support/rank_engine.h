// SPDX-License-Identifier: Apache-2.0
#pragma once
/// One rank of a model whose heads are divided: an engine around a keeper that runs every kind of policy, with numbers
/// that follow from (sequence, layer, KV or query head of the model, position) alone.

#include <bit>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/parts/surprisal.h"
#include "kvkeep/policy/across_ranks.h"
#include "kvkeep/score/random.h"

namespace kvkeep::testing {

class RankEngine {
 public:
  using Work = std::vector<std::pair<SequenceId, std::int32_t>>;  ///< new tokens of sequences
  static constexpr std::int32_t kLayers = 3, kHeads = 4, kGroup = 2, kDim = 8, kCapacity = 128;

  /// A model of `heads` KV heads from `first` on, and what it supplies. Every query head has its own sink logit in the
  /// last layer.
  static ModelSpec model(std::int32_t heads, std::int32_t first = 0) {
    ModelSpec spec{.query_heads = heads * kGroup,
                   .kv_heads = heads,
                   .key_dim = kDim,
                   .value_dim = kDim,
                   .softmax_scale = 0,
                   .rope = {.inv_freq = {1.0, 0.3, 0.1, 0.01}},
                   .layers = std::vector<LayerSpec>(kLayers)};
    for (std::int32_t h = first * kGroup; h < (first + heads) * kGroup; ++h)
      spec.layers.back().sinks.push_back(3.0F - 0.8F * static_cast<float>(h));
    return spec;
  }

  /// `ranks`: null: all heads are here.
  RankEngine(const std::string& policy, std::shared_ptr<Collective> ranks = nullptr, bool ragged = true)
      : heads_(kHeads / (ranks == nullptr ? 1 : ranks->size())),
        first_(ranks == nullptr ? 0 : ranks->rank() * heads_),
        ragged_(ragged),
        keeper(model(heads_, first_), make_policy(policy), provided(std::move(ranks))) {
    for (std::int32_t l = 0; l < kLayers; ++l)
      layers.emplace_back(
          DenseKv{zeros({4, heads_, kCapacity, kDim}, Dtype::f32), zeros({4, heads_, kCapacity, kDim}, Dtype::f32)});
    keeper.bind(layers);
  }

  void join(SequenceId id, std::optional<std::int32_t> prompt = {}) {
    keeper.join(id, 0, prompt);
    lengths[id].assign(static_cast<std::size_t>(kLayers * heads_), 0);
    fed[id] = 0;
  }

  /// `tokens` new ones of each sequence, through all layers.
  Report step(const Work& work) {
    observe(work);
    return keeper.step(view());
  }

  /// Without the event.
  void observe(const Work& work) {
    ids.clear(), flat.clear(), places.clear();
    std::map<SequenceId, std::vector<std::int32_t>> present;
    for (const auto& [id, tokens] : work) {
      ids.push_back(id), places.push_back(static_cast<std::int32_t>(id));
      for (std::int32_t t = 0; t < tokens; ++t) present[id].push_back(fed[id] + t);
      fed[id] += tokens;
      const auto rows = static_cast<std::size_t>(ragged_ ? kLayers * heads_ : 1);
      for (std::size_t r = 0; r < rows; ++r) flat.push_back(lengths[id][r] + tokens);
    }
    for (std::int32_t l = 0; l < kLayers; ++l) run(l, present);
    if (keeper.policy().needs().surprisal)
      for (const auto& [id, tokens] : work) {
        std::vector<float> nats;
        for (std::int32_t t = fed[id] - tokens; t < fed[id]; ++t) nats.push_back(1 + noise(id, 9, 0, t, 0, 7));
        if (auto* surprisal = keeper.find<parts::Surprisal>()) surprisal->supply(id, nats);
      }
  }

  /// A run of two sequences, some of whose positions are pinned unless the policy refuses that with a `NoPins`.
  template <class NoPins>
  void begin_run() {
    join(1);
    join(2, 33);
    if (keeper.policy().narrows()) return;
    try {
      keeper.part<parts::Pins>().pin(1, 9, 12);
      keeper.part<parts::Pins>().pin(1, 20, 21);
    } catch (const NoPins&) {
    }
  }
  /// Of its n-th step.
  [[nodiscard]] static Work work_of_step(int n) {
    return n == 0 ? Work{{1, 45}, {2, 33}} : Work{{1, n % 5 == 0 ? 3 : 1}, {2, 1}};
  }
  /// After the first step, the tokens of prompts that begin afresh.
  void run_second_pass() {
    if (!keeper.policy().narrows() || !keeper.part<parts::Prompts>().report_of(1)->second_pass) return;
    step({{1, static_cast<std::int32_t>(keeper.part<parts::Prompts>().report_of(1)->going_on.size())},
          {2, static_cast<std::int32_t>(keeper.part<parts::Prompts>().report_of(2)->going_on.size())}});
    settle();
  }

  CacheView view() { return {.sequences = ids, .lengths = {flat, ragged_ ? kLayers * heads_ : 1}, .places = places}; }
  /// Takes the lengths that an event wrote.
  void settle() {
    for (std::size_t i = 0; i < ids.size(); ++i)
      for (std::size_t r = 0; r < lengths[ids[i]].size(); ++r)
        lengths[ids[i]][r] = ragged_ ? flat[i * lengths[ids[i]].size() + r] : flat[i];
  }

  /// Positions of a row, by the head of the model.
  [[nodiscard]] std::vector<std::int32_t> positions(SequenceId id, std::int32_t layer, std::int32_t head) const {
    const auto own = keeper.positions(id, layer, head - first_);
    return {own.begin(), own.end()};
  }
  [[nodiscard]] std::span<const float> credit(SequenceId id, std::int32_t layer, std::int32_t head) const {
    return keeper.credit(id, layer, head - first_);
  }
  /// KV heads of the model before those of this rank.
  [[nodiscard]] std::int32_t first() const { return first_; }
  [[nodiscard]] bool has(std::int32_t head) const { return head >= first_ && head < first_ + heads_; }
  /// Every slot holds the key of its position.
  [[nodiscard]] bool holds(SequenceId id, std::int32_t layer, std::int32_t head) const {
    const auto own = keeper.positions(id, layer, head - first_);
    for (std::size_t t = 0; t < own.size(); ++t)
      if (*key(id, layer, head - first_, static_cast<std::int32_t>(t)) != noise(id, layer, head, own[t], 0, 1))
        return false;
    return true;
  }

 private:
  std::int32_t heads_, first_;
  bool ragged_;

 public:
  Keeper keeper;
  std::vector<LayerKv> layers;
  std::map<SequenceId, std::vector<std::int32_t>> lengths;
  std::map<SequenceId, std::int32_t> fed;
  std::vector<SequenceId> ids;
  std::vector<std::int32_t> flat, places;
  /// Of every (sequence, layer, KV head of the model): what attention read of folded spans so far, mixed into one
  /// number.
  std::map<std::tuple<SequenceId, std::int32_t, std::int32_t>, std::uint64_t> read;

  static float noise(SequenceId id, std::int32_t layer, std::int32_t head, std::int32_t position, std::int32_t d,
                     std::int32_t side) {
    std::uint64_t x = static_cast<std::uint64_t>(id);
    for (const std::int32_t part : {layer, head, position, d, side})
      x = mixed_bits(x ^ static_cast<std::uint64_t>(part));
    return static_cast<float>(static_cast<double>(x >> 40) / 8388608.0 - 1.0) * 2;
  }

 private:
  Provided provided(std::shared_ptr<Collective> ranks) {
    Provided all{.layer_by_layer = true, .surprisal = true, .given_scores = true, .reads_folded = true};
    for (std::int32_t l = 0; l < kLayers; ++l) {
      Tensor w = zeros({12, heads_ * kGroup * kDim}, Dtype::f32);
      for (std::int64_t i = 0; i < w.size(0); ++i)
        for (std::int32_t c = 0; c < heads_ * kGroup * kDim; ++c)
          w.data<float>()[i * w.size(1) + c] =
              noise(0, l, first_ * kGroup * kDim + c, static_cast<std::int32_t>(i), 0, 5);
      all.output_projections.push_back(w);
    }
    if (ranks != nullptr) all.accelerator = across_ranks(std::move(ranks));
    return all;
  }

  [[nodiscard]] float* key(SequenceId id, std::int32_t layer, std::int32_t head, std::int32_t slot,
                           bool value = false) const {
    const auto& kv = std::get<DenseKv>(layers[static_cast<std::size_t>(layer)]);
    return (value ? kv.values : kv.keys).data<float>() + ((id * heads_ + head) * kCapacity + slot) * kDim;
  }

  void run(std::int32_t l, std::map<SequenceId, std::vector<std::int32_t>>& present) {
    std::vector<SequenceId> active;
    std::vector<std::int32_t> indptr{0};
    std::int32_t tokens = 0;
    for (const SequenceId id : ids) {
      if (!present.contains(id)) continue;
      active.push_back(id), indptr.push_back(tokens += static_cast<std::int32_t>(present[id].size()));
    }
    Tensor queries = zeros({tokens, heads_ * kGroup, kDim}, Dtype::f32), given = zeros({tokens, heads_}, Dtype::f32);
    float *q = queries.data<float>(), *g = given.data<float>();
    for (const SequenceId id : active)
      for (std::size_t i = 0; i < present[id].size(); ++i) {
        const std::int32_t position = present[id][i];
        for (std::int32_t h = first_ * kGroup; h < (first_ + heads_) * kGroup; ++h)
          for (std::int32_t d = 0; d < kDim; ++d) *q++ = noise(id, l, h, position, d, 3);
        for (std::int32_t h = 0; h < heads_; ++h) {
          *g++ = noise(id, l, first_ + h, position, 0, 4);
          const std::int32_t slot =
              lengths[id][static_cast<std::size_t>(l * heads_ + h)] + static_cast<std::int32_t>(i);
          for (std::int32_t d = 0; d < kDim; ++d) {
            key(id, l, h, slot)[d] = noise(id, l, first_ + h, position, d, 1);
            key(id, l, h, slot, true)[d] = noise(id, l, first_ + h, position, d, 2);
          }
        }
      }
    const Observation o{
        .layer = l, .sequences = active, .indptr = indptr, .queries = queries, .basis = QueryBasis::post_rope};
    keeper.observe(o);
    if (keeper.policy().needs().given_scores)
      keeper.part<parts::Given>().give({.layer = l, .sequences = active, .indptr = indptr, .scores = given});
    if (keeper.policy().memory() != nullptr) {
      const Tensor out = zeros({tokens, heads_ * kGroup, kDim}, Dtype::f32),
                   sums = zeros({tokens, heads_ * kGroup}, Dtype::f32);
      static_cast<void>(keeper.part<parts::Folds>().view(o, {.out = out, .log_sum_exp = sums}));
      const float* number = out.data<float>();
      for (std::size_t s = 0; s < active.size(); ++s)
        for (std::int32_t t = indptr[s]; t < indptr[s + 1]; ++t)
          for (std::int32_t h = 0; h < heads_; ++h) {
            std::uint64_t& all = read[{active[s], l, first_ + h}];
            for (std::int32_t i = 0; i < kGroup * kDim; ++i)
              all = mixed_bits(all ^ std::bit_cast<std::uint32_t>(*number++));
          }
    }
    if (!keeper.policy().narrows()) return;
    for (const Narrowing& n : keeper.part<parts::Prompts>().narrow(o, view()).prompts) {
      if (!n.tokens) continue;
      if (n.restart) fed[n.sequence] = 0;
      std::vector<std::int32_t> left;
      for (const std::int32_t at : *n.tokens) left.push_back(present[n.sequence][static_cast<std::size_t>(at)]);
      present[n.sequence] = std::move(left);
      if (n.restart) present.erase(n.sequence);
    }
  }
};

}  // namespace kvkeep::testing
