// SPDX-License-Identifier: Apache-2.0
#include <kvkeep/kvkeep.h>
#include <kvkeep/recipes.h>

int main() {  // 0 when a prompt of twelve cached tokens fell to six
  kvkeep::ModelSpec model;
  model.query_heads = model.kv_heads = 1;
  model.key_dim = model.value_dim = 8;
  model.layers.resize(1);
  kvkeep::Keeper keeper(model, kvkeep::recipes::streaming(6, {{"interval", 6}, {"sink", 2}, {"prefill", "cut"}}));
  const kvkeep::SequenceId id = 1;
  std::int32_t length = 12;
  keeper.join(id, length);
  const kvkeep::DenseKv rows{kvkeep::zeros({1, 1, 12, 8}, kvkeep::Dtype::f32),
                             kvkeep::zeros({1, 1, 12, 8}, kvkeep::Dtype::f32)};
  keeper.bind({rows});
  return keeper.step({{&id, 1}, {{&length, 1}}}).wait().slots_dropped == 6 && length == 6 ? 0 : 1;
}
