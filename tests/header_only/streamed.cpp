// SPDX-License-Identifier: Apache-2.0
// A second file that includes everything: its bodies and those of the other file are the same to the linker.

#include <kvkeep/kvkeep.h>
#include <kvkeep/recipes.h>

#include "slots.h"

std::vector<std::int32_t> streamed(std::int32_t n) {
  kvkeep::ModelSpec model;
  model.query_heads = model.kv_heads = 1;
  model.key_dim = model.value_dim = 8;
  model.layers.resize(1);
  kvkeep::Keeper keeper(model, kvkeep::recipes::streaming(4, {{"prefill", "cut"}, {"sink", 1}, {"recent", 2}}));
  std::vector<float> keys(static_cast<std::size_t>(n) * 8), values = keys;
  const kvkeep::SequenceId id = 1;
  std::int32_t length = n;
  keeper.join(id, length);
  const kvkeep::DenseKv rows{{keys.data(), kvkeep::Dtype::f32, {1, 1, n, 8}},
                             {values.data(), kvkeep::Dtype::f32, {1, 1, n, 8}}};
  keeper.bind({rows});
  keeper.step({{&id, 1}, {{&length, 1}}});
  const auto kept = keeper.positions(id, 0, 0);
  return {kept.begin(), kept.end()};
}
