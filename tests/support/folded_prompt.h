// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Prompts for tests of span memories.

#include <cmath>
#include <cstdint>
#include <vector>

#include "arrays.h"
#include "kvkeep/memory/segmenter.h"
#include "oracle/random_case.h"

namespace kvkeep::testing {

struct FoldedPrompt {
  FoldedPrompt(std::uint64_t seed, int tokens, int kv_heads, int query_heads, int dim, int asked) {
    oracle::Random random(seed);
    keys = normals(random, {kv_heads, tokens, dim});
    values = normals(random, {kv_heads, tokens, dim});
    queries = normals(random, {asked, query_heads, dim});
    for (int t = 0; t < tokens; ++t) surprisal.push_back(static_cast<float>(t == 0 ? 0 : -std::log(1 - random.unit())));
    // Rows of a span resemble each other, as those of text do: what is factorised falls off.
    for (Array* side : {&keys, &values})
      for (int h = 0; h < kv_heads; ++h)
        for (int t = 1; t < tokens; ++t)
          for (int d = 0; d < dim; ++d) {
            float* row = side->data<float>() + (std::int64_t{h} * tokens + t) * dim;
            row[d] = 0.8F * row[d - dim] + 0.6F * row[d];
          }
  }

  Array keys, values, queries;
  std::vector<float> surprisal;
  SegmenterOptions segmenter{.alpha = 1.5, .sink = 2, .recent = 9, .min_span = 3, .max_span = 24};
};

}  // namespace kvkeep::testing
