// SPDX-License-Identifier: Apache-2.0
#include "llama.h"

#include <cmath>
#include <limits>
#include <string>

namespace train {
namespace {

using torch::Tensor;

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  return x * torch::rsqrt(x.square().mean(-1, /*keepdim=*/true) + epsilon) * weight;
}

/// x: [B, H, T, D], rotated by `positions` [T]; channel i turns with channel i + D/2.
Tensor rotated(const Tensor& x, const Tensor& positions, double theta) {
  const int64_t width = x.size(3);
  const Tensor frequency = torch::pow(theta, -torch::arange(0, width, 2, torch::kFloat64) / static_cast<double>(width));
  const Tensor angle = torch::outer(positions.to(torch::kFloat64), frequency);
  const Tensor cosine = angle.cos().to(torch::kFloat32), sine = angle.sin().to(torch::kFloat32);
  const auto halves = x.chunk(2, -1);
  return torch::cat({halves[0] * cosine - halves[1] * sine, halves[1] * cosine + halves[0] * sine}, -1);
}

}  // namespace

Llama::Llama(const LlamaShape& shape, uint64_t seed) : shape_(shape) {
  torch::manual_seed(seed);
  // Hugging Face names, with '.' as '/' because LibTorch forbids dots in parameter names.
  const auto normal = [&](const std::string& name, int64_t rows, int64_t columns, double deviation) {
    return register_parameter(name, torch::randn({rows, columns}) * deviation);
  };
  const auto ones = [&](const std::string& name) { return register_parameter(name, torch::ones({shape_.width})); };
  const int64_t width = shape_.width, q_width = shape_.query_heads * shape_.head_width,
                kv_width = shape_.kv_heads * shape_.head_width;
  const double residual =
      0.3 / std::sqrt(2.0 * static_cast<double>(shape_.layers));  // keeps the early residual stream near the embedding
  const auto fan_in = [](int64_t n) { return 1.0 / std::sqrt(static_cast<double>(n)); };

  embedding_ = normal("model/embed_tokens/weight", shape_.vocabulary, width, 0.1);
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    const std::string at = "model/layers/" + std::to_string(layer) + "/";
    BlockWeights block;
    block.input_norm = ones(at + "input_layernorm/weight");
    block.q = normal(at + "self_attn/q_proj/weight", q_width, width, fan_in(width));
    block.k = normal(at + "self_attn/k_proj/weight", kv_width, width, fan_in(width));
    block.v = normal(at + "self_attn/v_proj/weight", kv_width, width, fan_in(width));
    block.o = normal(at + "self_attn/o_proj/weight", width, q_width, fan_in(q_width) * residual);
    block.post_norm = ones(at + "post_attention_layernorm/weight");
    block.gate = normal(at + "mlp/gate_proj/weight", shape_.mlp_width, width, fan_in(width));
    block.up = normal(at + "mlp/up_proj/weight", shape_.mlp_width, width, fan_in(width));
    block.down = normal(at + "mlp/down_proj/weight", width, shape_.mlp_width, fan_in(shape_.mlp_width) * residual);
    blocks_.push_back(block);
  }
  final_norm_ = ones("model/norm/weight");
}

Tensor Llama::hidden(const Tensor& ids, const Tensor& positions, const Attention& attend) const {
  const int64_t batch = ids.size(0), tokens = ids.size(1);
  Tensor x = torch::embedding(embedding_, ids);
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    const BlockWeights& block = blocks_[layer];
    const Tensor seen = rms_norm(x, block.input_norm, shape_.norm_epsilon);
    const auto heads = [&](const Tensor& weight) {
      return torch::linear(seen, weight).view({batch, tokens, -1, shape_.head_width}).transpose(1, 2);
    };
    const Tensor q = rotated(heads(block.q), positions, shape_.rope_theta),
                 k = rotated(heads(block.k), positions, shape_.rope_theta);
    const Tensor mixed = attend(layer, q, k, heads(block.v));
    x = x + torch::linear(mixed.transpose(1, 2).reshape({batch, tokens, -1}), block.o);
    const Tensor normed = rms_norm(x, block.post_norm, shape_.norm_epsilon);
    x = x + torch::linear(torch::silu(torch::linear(normed, block.gate)) * torch::linear(normed, block.up), block.down);
  }
  return rms_norm(x, final_norm_, shape_.norm_epsilon);
}

Tensor Llama::hidden(const Tensor& ids, const Tensor& visible, const AttentionReader& reader) const {
  const int64_t tokens = ids.size(1), group = shape_.query_heads / shape_.kv_heads;
  return hidden(
      ids, torch::arange(tokens, torch::kInt64),
      [&](int64_t layer, const Tensor& q, const Tensor& keys, const Tensor& values) {
        const Tensor k = keys.repeat_interleave(group, 1), v = values.repeat_interleave(group, 1);
        if (reader) {
          const Tensor allowed = visible.defined() ? visible : torch::ones({tokens, tokens}, torch::kBool).tril();
          const Tensor scores = torch::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(shape_.head_width));
          reader(layer, torch::softmax(scores.masked_fill(~allowed, -std::numeric_limits<float>::infinity()), -1));
        }
        const std::optional<Tensor> mask = visible.defined() ? std::optional<Tensor>(visible) : std::nullopt;
        return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, /*is_causal=*/!visible.defined());
      });
}

Tensor Llama::logits(const Tensor& hidden) const { return torch::linear(hidden, embedding_); }

}  // namespace train
