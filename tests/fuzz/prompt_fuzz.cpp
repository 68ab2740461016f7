// SPDX-License-Identifier: Apache-2.0
// A prompt on its way through the layers under every policy that narrows: the input chooses shapes, options and
// numbers; what goes on and what stays must be lawful.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"

namespace {

using kvkeep::text;

/// Bytes of the input, one after the other; zeros when they run out.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}
  std::uint8_t next() { return left_ == 0 ? 0 : (--left_, *data_++); }
  std::int32_t below(std::int32_t n) { return next() % n; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

void hold(bool law, const std::string& what) {
  if (law) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

bool ascends(std::span<const std::int32_t> places, std::int32_t end) {
  for (std::size_t i = 0; i < places.size(); ++i)
    if (places[i] < 0 || places[i] >= end || (i > 0 && places[i] <= places[i - 1])) return false;
  return true;
}

std::string policy_of(Bytes& bytes, std::int32_t layers) {
  const std::int32_t window = 1 + bytes.below(6), budget = window + 1 + bytes.below(20), pool = 1 + 2 * bytes.below(4);
  const std::string observed =
      text(",window=", window, ",pool=", pool, ",pooling=", bytes.below(2) == 0 ? "avg" : "max");
  const std::string stop = bytes.below(2) == 0 ? text(",threshold=", bytes.below(30) / 10.0)
                                               : text(",missed_mass=", (1 + bytes.below(98)) / 100.0);
  const std::string cache =
      std::vector<std::string>{"", text(",cache=", window + 1 + bytes.below(10)), ",cache_mass=0.7",
                               ",cache_mass=1"}[static_cast<std::size_t>(bytes.below(4))];
  const std::string fewer = bytes.below(2) == 0 ? "" : text(",select_mass=", (1 + bytes.below(99)) / 100.0);
  const std::string settle =
      text(",min_layer=", bytes.below(layers), ",observed_layers=", 1 + bytes.below(5), stop, fewer);
  switch (bytes.below(5)) {
    case 0:
      return text("asl,budget=", budget, observed, settle, cache);
    case 1:
      return text("asl-2pass,budget=", budget, observed, settle, bytes.below(2) == 0 ? "" : ",indices=last_query");
    case 2:
      return text("fastkv,budget=", budget, observed, ",layer=", bytes.below(layers), cache);
    case 3:
      return text("gemfilter,budget=", budget, ",layer=", bytes.below(layers), ",pool=", pool);
    default:
      return text("pyramidinfer,sink=", bytes.below(6), ",recent_ratio=0.", bytes.below(10), ",keep=0.",
                  1 + bytes.below(9), ",min_context=", 1 + bytes.below(8),
                  ",schedule=", bytes.below(2) == 0 ? "cosine" : "constant");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvkeep;
  Bytes bytes(data, size);
  const std::int32_t layers = 1 + bytes.below(10), heads = 1 + bytes.below(3), group = 1 + bytes.below(4),
                     dim = 1 + bytes.below(5), tokens = 1 + bytes.below(60);
  const ModelSpec spec{.query_heads = heads * group,
                       .kv_heads = heads,
                       .key_dim = dim,
                       .value_dim = dim,
                       .softmax_scale = 0,
                       .rope = {},
                       .layers = std::vector<LayerSpec>(static_cast<std::size_t>(layers))};
  const std::unique_ptr<KVPolicy> policy = make_policy(policy_of(bytes, layers));
  const std::string what = policy->to_json();
  const std::unique_ptr<PromptPass> pass = policy->begin_prompt(host(), spec, tokens);
  std::vector<std::int32_t> present(static_cast<std::size_t>(tokens));
  std::iota(present.begin(), present.end(), 0);
  for (std::int32_t l = 0; l < layers; ++l) {
    const auto n = static_cast<std::int32_t>(present.size()), wanted = pass->wants(l, n);
    hold(wanted >= 0 && wanted <= n, what + ": asks for more queries than there are");
    if (wanted == 0) continue;
    std::vector<float> keys(static_cast<std::size_t>(heads * n * dim)),
        queries(static_cast<std::size_t>(wanted * heads * group * dim));
    for (auto* numbers : {&keys, &queries})
      for (float& x : *numbers)
        x = static_cast<float>(static_cast<std::int8_t>(bytes.next())) / 16.0F;  // small integers make ties
    RowTable table;
    for (std::int32_t h = 0; h < heads; ++h) {
      Row row;
      row.layer = l, row.head = h, row.length = n, row.first = table.slots;
      row.keys = {reinterpret_cast<std::byte*>(keys.data() + h * n * dim), dim * 4, dim * 4};
      row.positions = present.data();
      table.slots += n;
      table.rows.push_back(row);
    }
    RowGroup rows;
    rows.layer = l;
    rows.queries = {.data = reinterpret_cast<const std::byte*>(queries.data()),
                    .dtype = Dtype::f32,
                    .token_stride = heads * group * dim * 4,
                    .head_stride = dim * 4,
                    .positions = present.data() + n - wanted,
                    .ring = wanted,
                    .begin = 0,
                    .count = wanted};
    table.groups.push_back(rows);
    const Decision decision = policy->decide(
        *pass, {.spec = spec, .table = table, .basis = QueryBasis::post_rope, .moment = Moment::prefill_layer});
    if (decision.keep)
      for (std::size_t h = 0; h < static_cast<std::size_t>(heads); ++h) {
        hold(ascends(decision.keep->row(h), n), what + ": slots that stay do not ascend");
        hold(!decision.keep->row(h).empty() && decision.keep->row(h).back() == n - 1,
             what + ": the newest slot was dropped");
      }
    if (!decision.narrow) continue;
    const std::span<const std::int32_t> places{decision.narrow->tokens.data<std::int32_t>(),
                                               static_cast<std::size_t>(decision.narrow->tokens.numel())};
    hold(ascends(places, n) && !places.empty(), what + ": tokens that go on do not ascend");
    if (decision.narrow->restart) break;
    hold(places.back() == n - 1, what + ": the last token does not go on");
    std::vector<std::int32_t> left;
    for (const std::int32_t place : places) left.push_back(present[static_cast<std::size_t>(place)]);
    present = std::move(left);
  }
  return 0;
}
