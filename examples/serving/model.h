// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A transformer of two layers with fixed random weights, one token after the other: small enough to serve thousands of
/// steps a second, and real in what counts here. What a token writes to the cache follows from the tokens before it,
/// and what it reads decides the next one.

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "kvkeep/kvkeep.h"

namespace serving {

using Token = std::int32_t;

/// Chain of hashes: one number for a token and all tokens before it.
[[nodiscard]] inline std::uint64_t chained(std::uint64_t before, Token token) {
  std::uint64_t x = (before ^ static_cast<std::uint64_t>(token + 1)) * 0x9e3779b97f4a7c15U;
  x ^= x >> 29;
  return x * 0xbf58476d1ce4e5b9U;
}

class Model {
 public:
  static constexpr std::int32_t kLayers = 2, kQueryHeads = 4, kHeads = 2, kDim = 8, kWidth = 16, kVocabulary = 64;
  /// The first numbers of a key and of a value name the text that they belong to; attention leaves them out.
  static constexpr std::int32_t kName = 2;

  Model() {
    std::mt19937 bits(20261129);
    const auto fill = [&bits](std::span<float> numbers, float scale) {
      for (float& x : numbers) x = scale * (static_cast<float>(bits()) / 2147483648.0F - 1.0F);
    };
    fill(embedding_, 1.0F);
    for (Layer& layer : layers_) fill(layer.q, 0.9F), fill(layer.k, 0.9F), fill(layer.v, 0.6F), fill(layer.o, 0.5F);
  }

  [[nodiscard]] static kvkeep::ModelSpec spec() {
    return {.query_heads = kQueryHeads,
            .kv_heads = kHeads,
            .key_dim = kDim,
            .value_dim = kDim,
            .rope = {.style = kvkeep::RopeStyle::none},
            .layers = std::vector<kvkeep::LayerSpec>(kLayers)};
  }

  /// One token on its way through the layers.
  struct State {
    std::array<float, kWidth> x;
  };

  [[nodiscard]] State embed(Token token, std::int64_t position) const {
    State state;
    for (std::int32_t i = 0; i < kWidth; ++i)
      state.x[at(i)] = embedding_[at(token * kWidth + i)] +
                       0.3F * std::sin(static_cast<float>(position) / (1.0F + static_cast<float>(i)));
    return state;
  }

  /// Queries [kQueryHeads, kDim], and keys and values [kHeads, kDim] of one token. chain: of the text up to it.
  void project(std::int32_t l, const State& state, std::uint64_t chain, float* queries, float* keys,
               float* values) const {
    const Layer& layer = layers_[at(l)];
    multiply(layer.q, state.x.data(), queries, kQueryHeads * kDim);
    multiply(layer.k, state.x.data(), keys, kHeads * kDim);
    multiply(layer.v, state.x.data(), values, kHeads * kDim);
    for (std::int32_t h = 0; h < kQueryHeads; ++h)
      for (std::int32_t i = 0; i < kName; ++i) queries[h * kDim + i] = 0;
    for (std::int32_t h = 0; h < kHeads; ++h)
      for (std::int32_t i = 0; i < kName; ++i) keys[h * kDim + i] = values[h * kDim + i] = name(chain, i);
  }

  /// What a key and a value of this text begin with: numbers that f32 holds exactly.
  [[nodiscard]] static float name(std::uint64_t chain, std::int32_t i) {
    return static_cast<float>((chain >> (24 * i)) & 0xffffffU);
  }

  /// Attention of one query head over `slots` keys and values, found by at(slot); adds to `out` [kDim].
  template <class Keys, class Values>
  static void attend(const float* query, std::int32_t slots, const Keys& keys, const Values& values, float* out,
                     std::vector<float>& scratch) {
    scratch.resize(at(slots));
    float top = -INFINITY, sum = 0;
    for (std::int32_t s = 0; s < slots; ++s) {
      const float* const key = keys(s);
      float dot = 0;
      for (std::int32_t i = kName; i < kDim; ++i) dot += query[i] * key[i];
      scratch[at(s)] = dot * 0.6F;
      top = std::max(top, scratch[at(s)]);
    }
    for (float& x : scratch) sum += x = std::exp(x - top);
    std::fill_n(out, kDim, 0.0F);
    for (std::int32_t s = 0; s < slots; ++s) {
      const float* const value = values(s);
      for (std::int32_t i = kName; i < kDim; ++i) out[i] += scratch[at(s)] / sum * value[i];
    }
  }

  /// attended: [kQueryHeads, kDim]
  void finish_layer(std::int32_t l, const float* attended, State& state) const {
    std::array<float, kWidth> added;
    const Layer& layer = layers_[at(l)];
    for (std::int32_t i = 0; i < kWidth; ++i) {
      added[at(i)] = 0;
      for (std::int32_t j = 0; j < kQueryHeads * kDim; ++j)
        added[at(i)] += layer.o[at(i * kQueryHeads * kDim + j)] * attended[j];
    }
    float norm = 0;
    for (std::int32_t i = 0; i < kWidth; ++i) {
      state.x[at(i)] += added[at(i)];
      norm += state.x[at(i)] * state.x[at(i)];
    }
    for (float& x : state.x) x *= 4.0F / std::sqrt(norm);
  }

  /// The next token of sample `sample`: the likeliest under logits that each sample disturbs in its own way.
  [[nodiscard]] Token sample(const State& state, std::int32_t sample, std::int64_t position) const {
    Token best = 0;
    float top = -INFINITY;
    for (Token t = 0; t < kVocabulary; ++t) {
      float logit = 0;
      for (std::int32_t i = 0; i < kWidth; ++i) logit += state.x[at(i)] * embedding_[at(t * kWidth + i)];
      const std::uint64_t noise =
          chained(chained(static_cast<std::uint64_t>(sample) * 977U, static_cast<Token>(position)), t);
      logit += sample == 0 ? 0 : 2.0F * static_cast<float>(noise >> 40U) / 16777216.0F;
      if (logit > top) top = logit, best = t;
    }
    return best;
  }

 private:
  struct Layer {
    std::array<float, static_cast<std::size_t>(kQueryHeads* kDim* kWidth)> q, o;
    std::array<float, static_cast<std::size_t>(kHeads* kDim* kWidth)> k, v;
  };
  static std::size_t at(std::int32_t i) { return static_cast<std::size_t>(i); }

  template <class Matrix>
  static void multiply(const Matrix& m, const float* x, float* out, std::int32_t rows) {
    for (std::int32_t r = 0; r < rows; ++r) {
      out[r] = 0;
      for (std::int32_t i = 0; i < kWidth; ++i) out[r] += m[at(r * kWidth + i)] * x[i];
    }
  }

  std::array<float, static_cast<std::size_t>(kVocabulary* kWidth)> embedding_;
  std::array<Layer, static_cast<std::size_t>(kLayers)> layers_;
};

}  // namespace serving
