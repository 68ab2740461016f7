#pragma once
/// Prompts for tests of span memories.

#include <ATen/ops/empty.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "kvkeep/memory/segmenter.h"
#include "kvkeep/torch.h"
#include "oracle/random_case.h"

namespace kvkeep::testing {

inline at::Tensor normals(oracle::Random& random, std::vector<std::int64_t> shape, double scale = 1) {
  at::Tensor t = at::empty(shape, at::TensorOptions().dtype(at::kFloat));
  for (std::int64_t i = 0; i < t.numel(); ++i) t.data_ptr<float>()[i] = static_cast<float>(scale * random.normal());
  return t;
}

struct FoldedPrompt {
  FoldedPrompt(std::uint64_t seed, int tokens, int kv_heads, int query_heads, int dim, int asked) {
    oracle::Random random(seed);
    keys = normals(random, {kv_heads, tokens, dim});
    values = normals(random, {kv_heads, tokens, dim});
    queries = normals(random, {asked, query_heads, dim});
    for (int t = 0; t < tokens; ++t) surprisal.push_back(static_cast<float>(t == 0 ? 0 : -std::log(1 - random.unit())));
    // Rows of a span resemble each other, as those of text do: what is factorised falls off.
    for (at::Tensor* side : {&keys, &values})
      for (int h = 0; h < kv_heads; ++h)
        for (int t = 1; t < tokens; ++t)
          for (int d = 0; d < dim; ++d) {
            float* row = side->data_ptr<float>() + (std::int64_t{h} * tokens + t) * dim;
            row[d] = 0.8F * row[d - dim] + 0.6F * row[d];
          }
  }

  at::Tensor keys, values, queries;
  std::vector<float> surprisal;
  SegmenterOptions segmenter{.alpha = 1.5, .sink = 2, .recent = 9, .min_span = 3, .max_span = 24};
};

/// Largest difference of two tensors.
inline double apart(const at::Tensor& a, const at::Tensor& b) {
  double most = 0;
  const at::Tensor x = a.to(c10::ScalarType::Double).contiguous(), y = b.to(c10::ScalarType::Double).contiguous();
  for (std::int64_t i = 0; i < x.numel(); ++i)
    most = std::max(most, std::abs(x.const_data_ptr<double>()[i] - y.const_data_ptr<double>()[i]));
  return x.sizes() == y.sizes() ? most : HUGE_VAL;
}

}  // namespace kvkeep::testing
