// SPDX-License-Identifier: Apache-2.0
// kvkeep inside an engine: join, observe, step. The engine is a toy: one dense cache in memory of its own, two
// sequences, random keys, values and queries.

#include <kvkeep/kvkeep.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace {

kvkeep::ModelSpec small_model() {
  kvkeep::ModelSpec model;
  model.query_heads = 8;
  model.kv_heads = 2;
  model.key_dim = model.value_dim = 64;
  for (int f = 0; f < 32; ++f) model.rope.inv_freq.push_back(std::pow(10000.0, -f / 32.0));
  model.layers.resize(4);
  return model;
}

/// The first step adds both prompts, every later one adds a token to each.
class ToyEngine {
 public:
  ToyEngine(kvkeep::ModelSpec model, std::int64_t capacity)
      : model_(std::move(model)),
        capacity_(capacity),
        side_(2 * model_.kv_heads * capacity * model_.key_dim),
        memory_(2 * model_.layers.size() * static_cast<std::size_t>(side_)) {}

  std::vector<kvkeep::SequenceId> sequences{7, 8};
  std::vector<std::int32_t> indptr{0, 40, 52};  ///< tokens of sequence i in this step: indptr[i] to indptr[i + 1] - 1
  std::vector<std::int32_t> lengths{40, 12};    ///< slots in use, this step's tokens included

  // ---- The lines of docs/start/integration.md
  /// Where the keys and values of each layer are: your pointer, its dtype, sizes [B, Hkv, capacity, D], and strides if
  /// it is not contiguous.
  std::vector<kvkeep::LayerKv> cache() {
    const kvkeep::Shape sizes{2, model_.kv_heads, capacity_, model_.key_dim};
    std::vector<kvkeep::LayerKv> layers;
    for (std::int32_t l = 0; l < model_.num_layers(); ++l)
      layers.push_back(kvkeep::DenseKv{.keys = {keys(l), kvkeep::Dtype::f32, sizes},
                                       .values = {values(l), kvkeep::Dtype::f32, sizes}});
    return layers;
  }
  // ----

  /// Writes K and V of the step's tokens after the slots in use and returns their queries, [n_tokens, Hq, D] before
  /// RoPE. An engine rotates by each token's position here, and its attention reads the first lengths[i] slots of
  /// sequence i.
  kvkeep::Tensor run(std::int32_t layer) {
    const std::int64_t dim = model_.key_dim;
    for (std::int64_t i = 0; i < 2; ++i) {
      const auto s = static_cast<std::size_t>(i);
      const std::int64_t tokens = indptr[s + 1] - indptr[s], first = lengths[s] - tokens;
      for (float* const side : {keys(layer), values(layer)})
        for (std::int64_t h = 0; h < model_.kv_heads; ++h) {
          float* const slots = side + ((i * model_.kv_heads + h) * capacity_ + first) * dim;
          for (std::int64_t n = 0; n < tokens * dim; ++n) slots[n] = normal_(bits_);
        }
    }
    queries_.resize(static_cast<std::size_t>(indptr.back() * model_.query_heads * dim));
    for (float& number : queries_) number = normal_(bits_);
    return {queries_.data(), kvkeep::Dtype::f32, {indptr.back(), model_.query_heads, dim}};
  }

  void begin_next_step() {
    std::iota(indptr.begin(), indptr.end(), 0);
    for (std::int32_t& length : lengths) ++length;
  }

 private:
  float* keys(std::int32_t layer) { return memory_.data() + 2 * layer * side_; }
  float* values(std::int32_t layer) { return keys(layer) + side_; }

  kvkeep::ModelSpec model_;
  std::int64_t capacity_, side_;  ///< slots; numbers of the keys of a layer
  std::vector<float> memory_, queries_;
  std::mt19937 bits_;
  std::normal_distribution<float> normal_;
};

void print(const kvkeep::Cut& cut) {
  std::cout << "sequence " << cut.sequence << ", " << cut.logical_length << " tokens: " << cut.length_before << " -> "
            << cut.length_after << " slots per row\n";
}

}  // namespace

int main() {
  const kvkeep::ModelSpec model = small_model();
  ToyEngine engine(model, /*capacity=*/96);

  // ---- The lines of README.md
  kvkeep::Keeper keeper(model, kvkeep::make_policy("ams-tova,budget=64,interval=32,recent=8"));
  keeper.bind(engine.cache());  // once: where the keys and values of each layer are
  const std::vector<kvkeep::SequenceId>& ids = engine.sequences;
  const std::vector<std::int32_t>& indptr = engine.indptr;  // which tokens are whose
  for (const kvkeep::SequenceId id : ids) keeper.join(id);
  for (int step = 0; step < 200; ++step, engine.begin_next_step()) {
    for (std::int32_t l = 0; l < model.num_layers(); ++l)
      keeper.observe({.layer = l, .sequences = ids, .indptr = indptr, .queries = engine.run(l)});
    const kvkeep::Report report = keeper.step({ids, {engine.lengths}});  // cuts what is due
    for (const kvkeep::Cut& cut : report.cuts) print(cut);
  }
  // ----

  const kvkeep::Totals& totals = keeper.totals();
  std::cout << totals.events << " events, " << totals.slots_dropped << " slots dropped, " << totals.bytes_moved
            << " bytes moved; the next token of sequence 7 is at position " << keeper.logical_length(7) << "\n";
}
