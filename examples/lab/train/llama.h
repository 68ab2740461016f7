// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A small Llama with autograd: RMSNorm, RoPE (half layout), grouped-query attention, SwiGLU, tied embeddings.
///
/// Written plainly and independently of kvkeep::lm, so that the decoder can be checked against it.

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace train {

struct LlamaShape {
  int64_t vocabulary = 256;
  int64_t layers = 3;
  int64_t width = 128;
  int64_t query_heads = 4;
  int64_t kv_heads = 2;
  int64_t head_width = 32;
  int64_t mlp_width = 256;
  double norm_epsilon = 1e-5;
  double rope_theta = 500000.0;
};

struct BlockWeights {
  torch::Tensor input_norm, q, k, v, o, post_norm, gate, up, down;
};

/// Sees the attention of one layer: f32 [B, query_heads, T, T].
using AttentionReader = std::function<void(int64_t layer, const torch::Tensor& attention)>;

/// Attention of one layer: q [B, query_heads, T, D], k and v [B, kv_heads, T, D], q and k rotated. Returns [B,
/// query_heads, T, D].
using Attention =
    std::function<torch::Tensor(int64_t layer, const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v)>;

class Llama : public torch::nn::Module {
 public:
  Llama(const LlamaShape& shape, uint64_t seed);

  /// Final hidden states, f32 [B, T, width].
  /// `visible`: bool [B, 1, T, T], true where a query may look; undefined means causal. With a reader, attention is
  /// computed explicitly, which is slow.
  torch::Tensor hidden(const torch::Tensor& ids, const torch::Tensor& visible = {},
                       const AttentionReader& reader = nullptr) const;

  /// The same for tokens at `positions`, i64 [T], that need not be neighbours: `attend` says what they see.
  torch::Tensor hidden(const torch::Tensor& ids, const torch::Tensor& positions, const Attention& attend) const;

  /// f32 [..., vocabulary]
  torch::Tensor logits(const torch::Tensor& hidden) const;

  const LlamaShape& shape() const { return shape_; }

 private:
  LlamaShape shape_;
  torch::Tensor embedding_, final_norm_;
  std::vector<BlockWeights> blocks_;
};

}  // namespace train
