// SPDX-License-Identifier: Apache-2.0
// The adapter over llama.cpp: RoPE that a model file does not describe, and keys that are turned by it.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "evictor_engine.h"
#include "kvkeep/keep/compact.h"

namespace kvkeep::llama {
namespace {

/// RoPE of a kind of model (of_kind), written down from the papers.
RopeSpec rope_by_hand(const std::string& kind, const Model& model) {
  RopeSpec rope{.style = RopeStyle::interleaved, .inv_freq = {}};
#ifdef KVKEEP_TEST_FAKE_LLAMA
  const int rotary = 32;
#else
  const int rotary = 64;
#endif
  static_cast<void>(model);
  for (int f = 0; f < rotary / 2; ++f) {
    double own = std::pow(10000.0, -2.0 * f / rotary);
    if (kind.ends_with("factors")) {
#ifdef KVKEEP_TEST_FAKE_LLAMA
      own /= fake_rope_factor(model.get(), f);
#else
      own /= 1 + 0.25 * f;
#endif
    }
    if (kind == "yarn") {  // of 64 tokens by 4: pairs that turn 32 times or more in them keep their frequency
      const auto pair = [&](double turns) {
        return rotary * std::log(64 / (turns * 2 * std::numbers::pi)) / (2 * std::log(10000.0));
      };
      const double low = std::max(0.0, std::floor(pair(32))), high = std::ceil(pair(1));
      const double slow = std::clamp((f - low) / (high - low), 0.0, 1.0);
      own = own / 4 * slow + own * (1 - slow);
    }
    rope.inv_freq.push_back(own);
  }
  if (kind == "yarn") rope.attention_scaling = 1 + 0.1 * std::log(4.0);
  return rope;
}

void expect_near(const RopeSpec& got, const RopeSpec& want, const std::string& what) {
  EXPECT_EQ(got.style, want.style) << what;
  EXPECT_NEAR(got.attention_scaling, want.attention_scaling, 1e-6) << what;
  ASSERT_EQ(got.inv_freq.size(), want.inv_freq.size()) << what;
  for (std::size_t f = 0; f < want.inv_freq.size(); ++f)
    EXPECT_NEAR(got.inv_freq[f], want.inv_freq[f], 1e-5 * want.inv_freq[f]) << what << ' ' << f;
}

std::int32_t last_layer(const Engine& run) {
  return static_cast<std::int32_t>(run.evictor->keeper().spec().layers.size()) - 1;
}

TEST_P(LlamaEvictor, ReadsRoPEFromTheGraph) {
  if (!exact()) return;
  std::vector<std::string> kinds{"factors", "yarn", "nope"};
#ifndef KVKEEP_TEST_FAKE_LLAMA
  kinds.emplace_back("long factors");
#endif
  for (const std::string& kind : kinds) {
    const Model model = of_kind(kind);
    ASSERT_NE(model, nullptr) << kind;
    const RopeSpec want = rope_by_hand(kind, model);
    for (const Positions positions : {Positions::text, Positions::cache}) {
      const Engine run(positions == Positions::text ? "expected,budget=32" : "tova,budget=32", {.positions = positions},
                       model.get());
      for (const std::int32_t l : run.evictor->keeper().spec().full_layers())
        expect_near(run.evictor->keeper().spec().rope_of(l),
                    kind == "nope" && l == last_layer(run) ? RopeSpec::absent() : want, kind);
      EXPECT_EQ(run.decode({{0, some_tokens(20)}}), 0) << kind;
    }
  }
}

/// Queries and keys of each layer as its attention reads them, of one micro-batch.
struct Attended {
  std::vector<std::vector<float>> queries, keys, values;  ///< [layers] [tokens, heads, dim]
};
Attended attended;
bool watch_attention(ggml_tensor* node, bool ask, void* data) {
  watch_cache(node, ask, data);
  if (node->op != GGML_OP_FLASH_ATTN_EXT) return false;
  if (ask) return true;
  const ggml_tensor* keys = node->src[1]->op == GGML_OP_CPY ? node->src[1]->src[0] : node->src[1];
  if (layer_of(keys, "cache_k_l") == 0) attended = {};
  const std::size_t layer = attended.queries.size();
  const ggml_tensor* q = node->src[0];  // [dim, tokens, heads]
  std::vector<float>& queries = attended.queries.emplace_back();
  for (std::int64_t t = 0; t < q->ne[1]; ++t)
    for (std::int64_t h = 0; h < q->ne[2]; ++h) {
      const auto* row = reinterpret_cast<const float*>(static_cast<const std::byte*>(q->data) +
                                                       static_cast<std::size_t>(t) * q->nb[1] +
                                                       static_cast<std::size_t>(h) * q->nb[2]);
      queries.insert(queries.end(), row, row + q->ne[0]);
    }
  for (const auto& [cache, rows] : {std::pair(seen_cache.keys[layer], &attended.keys.emplace_back()),
                                    {seen_cache.values[layer], &attended.values.emplace_back()}}) {
    rows->resize(static_cast<std::size_t>(q->ne[1] * cache->ne[0]));
    ggml_backend_tensor_get(cache, rows->data(), 0, rows->size() * sizeof(float));
  }
  return true;
}

/// What `expected` keeps of a prompt under a spec, given what attention read.
std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::int32_t>> kept_under(const ModelSpec& spec,
                                                                                      const std::string& policy,
                                                                                      std::int32_t tokens) {
  Keeper keeper(spec, make_policy(policy));
  const SequenceId id = 0;
  const std::vector<std::int32_t> indptr{0, tokens};
  keeper.join(id, 0, tokens);
  std::vector<LayerKv> layers;
  std::vector<std::vector<float>> copies;
  for (std::size_t l = 0; l < spec.layers.size(); ++l) {
    keeper.observe({.layer = static_cast<std::int32_t>(l),
                    .sequences = {&id, 1},
                    .indptr = indptr,
                    .queries = Tensor(attended.queries[l].data(), Dtype::f32, {tokens, spec.query_heads, spec.key_dim}),
                    .basis = QueryBasis::post_rope});
    const auto dense = [&](const std::vector<float>& rows) {  // [1, heads, tokens, dim]
      std::vector<float>& to = copies.emplace_back();
      for (std::int32_t h = 0; h < spec.kv_heads; ++h)
        for (std::int32_t t = 0; t < tokens; ++t) {
          const float* from = rows.data() + (t * spec.kv_heads + h) * spec.key_dim;
          to.insert(to.end(), from, from + spec.key_dim);
        }
      return Tensor(to.data(), Dtype::f32, {1, spec.kv_heads, tokens, spec.key_dim});
    };
    copies.reserve(2 * spec.layers.size());
    layers.push_back(DenseKv{.keys = dense(attended.keys[l]), .values = dense(attended.values[l])});
  }
  std::int32_t length = tokens;
  keeper.bind(std::move(layers));
  static_cast<void>(keeper.step({{&id, 1}, {{&length, 1}}}));
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::int32_t>> kept;
  for (const std::int32_t l : spec.full_layers())
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
      const auto held = keeper.positions(id, l, h);
      kept[{l, h}] = {held.begin(), held.end()};
    }
  return kept;
}

TEST_P(LlamaEvictor, ExpectedKeepsWhatItKeepsUnderASpecWrittenByHand) {
  if (!exact()) return;
  const std::string policy = "expected,budget=40,interval=8,recent=4,prefill=cut";
  for (const std::string kind : {"factors", "yarn", "nope"}) {
    const Model model = of_kind(kind);
    const Engine run(policy, {.type = GGML_TYPE_F32, .micro_batch = 128, .watch = watch_attention}, model.get());
    ASSERT_EQ(run.decode({{0, some_tokens(120)}}), 0);
    ASSERT_EQ(run.evictor->spent().cut, 1);
    ModelSpec by_hand = run.evictor->keeper().spec(), plain = by_hand;
    by_hand.rope = rope_by_hand(kind, model);
    for (LayerSpec& layer : by_hand.layers) layer.rope.reset();
    plain = by_hand;
    if (kind == "nope") by_hand.layers.back().rope = RopeSpec::absent();
    if (kind != "nope") plain.rope = rope_by_hand("", model);
    const auto want = kept_under(by_hand, policy, 120), otherwise = kept_under(plain, policy, 120);
    EXPECT_NE(want, otherwise) << kind << ": the test would not notice";
    for (const auto& [row, held] : want) EXPECT_EQ(run.positions(0, row.first, row.second), held) << kind;
  }
}

/// Keys of the first layer depend on token and position alone: what an event rewrote is what llama.cpp computes for
/// the same tokens at these positions.
TEST_P(LlamaEvictor, RewrittenKeysAreThoseOfATextOfTheirOwn) {
  if (!exact()) return;
  const std::vector<llama_token> text = some_tokens(100, 8);
  for (const std::string kind : {"factors", "yarn", "nope"}) {
    const Model model = of_kind(kind);
    const Setting setting{.type = GGML_TYPE_F32, .positions = Positions::cache, .watch = watch_cache};
    const Engine run("knorm,budget=24,interval=8,recent=4,prefill=cut", setting, model.get());
    ASSERT_EQ(run.decode({{0, {text.begin(), text.begin() + 60}}}), 0);
    for (std::size_t i = 60; i < text.size(); ++i) ASSERT_EQ(run.decode({{0, {text[i]}}}), 0);
    ASSERT_GE(run.evictor->spent().cut, 5);
    const ModelSpec& spec = run.evictor->keeper().spec();
    const std::vector<std::int32_t> cells(run.evictor->cells(0).begin(), run.evictor->cells(0).end());
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
      std::vector<std::vector<float>> got;
      for (const std::int32_t cell : cells) got.push_back(row_of(seen_cache.keys[0], cell, h, spec.key_dim));
      std::vector<llama_token> kept;
      for (const std::int32_t position : run.positions(0, 0, h))
        kept.push_back(text[static_cast<std::size_t>(position)]);
      const ggml_tensor* own = seen_cache.keys[0];
      const Engine afresh("", setting, model.get());
      ASSERT_EQ(afresh.decode({{0, kept}}), 0);
      for (std::size_t i = 0; i < kept.size(); ++i) {
        const std::vector<float> want = row_of(seen_cache.keys[0], static_cast<std::int32_t>(i), h, spec.key_dim);
        for (std::size_t d = 0; d < want.size(); ++d)
          ASSERT_NEAR(got[i][d], want[d], 2e-4 * (1 + std::abs(want[d]))) << kind << " head " << h << " slot " << i;
      }
      seen_cache.keys[0] = own;
    }
  }
}

/// Rows of every layer before and after an event: turned by the RoPE of the layer, or moved as they are.
TEST_P(LlamaEvictor, LayersWithoutRoPEAreNotTurned) {
  if (!exact()) return;
  const Model model = of_kind("nope");
  for (const Positions positions : {Positions::text, Positions::cache}) {
    const Engine run("knorm,budget=24,interval=8,prefill=cut,sink=2,recent=4",
                     {.type = GGML_TYPE_F32, .positions = positions, .watch = watch_cache}, model.get());
    run.evictor->prompt(0, 61);
    ASSERT_EQ(run.decode({{0, some_tokens(60)}}), 0);
    const ModelSpec& spec = run.evictor->keeper().spec();
    const std::vector<std::int32_t> cells(run.evictor->cells(0).begin(), run.evictor->cells(0).end());
    std::vector<std::vector<float>> before;
    for (const std::int32_t l : spec.full_layers())
      for (std::int32_t h = 0; h < spec.kv_heads; ++h)
        for (const std::int32_t cell : cells)
          before.push_back(row_of(seen_cache.keys[static_cast<std::size_t>(l)], cell, h, spec.key_dim));
    ASSERT_EQ(run.decode({{0, {5}}}), 0);
    ASSERT_EQ(run.evictor->spent().cut, 1);
    std::size_t row = 0;
    for (const std::int32_t l : spec.full_layers())
      for (std::int32_t h = 0; h < spec.kv_heads; ++h, row += cells.size()) {
        const std::vector<std::int32_t> held = run.positions(0, l, h);
        int turned = 0;
        for (std::size_t i = 0; i + 1 < held.size(); ++i) {
          const std::vector<float> got =
              row_of(seen_cache.keys[static_cast<std::size_t>(l)], run.evictor->cells(0)[i], h, spec.key_dim);
          std::vector<float> want = before[row + static_cast<std::size_t>(held[i])];
          if (got != want) ++turned;
          const auto slot = static_cast<std::int32_t>(i);
          if (positions == Positions::cache)
            rerotate({.base = reinterpret_cast<std::byte*>(want.data())}, Dtype::f32, spec.key_dim,
                     l == last_layer(run) ? RopeSpec::absent() : spec.rope, std::span(&held[i], 1),
                     std::span(&slot, 1));
          ASSERT_EQ(got, want) << "layer " << l << " head " << h << " slot " << i;
        }
        EXPECT_EQ(turned > 0, positions == Positions::cache && l != last_layer(run)) << l;
      }
  }
}

TEST_P(LlamaEvictor, RefusesWhatTurnsOtherwiseThanWhenItWasMade) {
  if (!exact()) return;
  for (const Positions positions : {Positions::text, Positions::cache}) {
    llama_context_params params = params_of({});
    Evictor evictor(the_model(), params,
                    make_policy(positions == Positions::text ? "expected,budget=32" : "tova,budget=32"), positions);
    params.rope_freq_base = 20000;
    const Context context(llama_init_from_model(the_model(), params));
    evictor.attach(context.get());
    std::vector<llama_token> ids = some_tokens(20);
    try {
      evictor.decode(llama_batch_get_one(ids.data(), 20));
      ADD_FAILURE();
    } catch (const Unsupported& error) {
      EXPECT_NE(std::string(error.what()).find("when the evictor was made"), std::string::npos) << error.what();
    }
  }
}

/// Where llama.cpp turns keys itself, it turns all layers, and multiplies them by YaRN's magnitude.
TEST_P(LlamaEvictor, RefusesToLeaveUnusualRoPEToLlamaCpp) {
  if (!exact()) return;
  for (const std::string kind : {"nope", "yarn", "factors"}) {
    const Model model = of_kind(kind);
    const Engine run("tova,budget=32,interval=8,prefill=cut,share=union",
                     {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED, .positions = Positions::cache}, model.get());
    if (kind == "factors")
      EXPECT_EQ(run.decode({{0, some_tokens(60)}}), 0);
    else
      EXPECT_THROW(static_cast<void>(run.decode({{0, some_tokens(60)}})), Unsupported) << kind;
  }
}

#ifdef KVKEEP_TEST_FAKE_LLAMA
TEST_P(LlamaEvictor, RefusesToTurnKeysThatChangeAfterRoPE) {
  const Model model = load("fake:late");
  EXPECT_THROW(Engine("expected,budget=32", {}, model.get()), Unsupported);
  EXPECT_THROW(Engine("tova,budget=32", {.positions = Positions::cache}, model.get()), Unsupported);
  EXPECT_EQ(Engine("tova,budget=32", {}, model.get()).decode({{0, some_tokens(20)}}), 0);
}
#endif

}  // namespace
}  // namespace kvkeep::llama
