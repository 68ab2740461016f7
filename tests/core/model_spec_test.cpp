// SPDX-License-Identifier: Apache-2.0
// What a model's description may hold.

#include "kvkeep/core/model_spec.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "message_of.h"

namespace kvkeep::model_spec_test {
namespace {

TEST(ModelSpec, RefusesNumbersThatNoModelHas) {
  const auto says = [](const std::function<void(ModelSpec&)>& change) {
    ModelSpec spec;
    spec.query_heads = 4, spec.kv_heads = 2, spec.key_dim = spec.value_dim = 8;
    spec.rope.inv_freq = {1, 0.1, 0};
    spec.layers.resize(2);
    spec.check();
    change(spec);
    return testing::message_of<InvalidArgument>([&] { spec.check(); });
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
  for (const double wrong : {kNan, kInf, -kInf, -1.0, 1e300}) {
    EXPECT_NE(says([&](ModelSpec& s) { s.rope.inv_freq[1] = wrong; }).find("rope.inv_freq[1] is "), std::string::npos);
    EXPECT_NE(says([&](ModelSpec& s) { s.rope.attention_scaling = wrong; }).find("rope.attention_scaling is "),
              std::string::npos);
  }
  EXPECT_NE(says([](ModelSpec& s) { s.rope.attention_scaling = 0; }).find("allowed above 0"), std::string::npos);
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(says([](ModelSpec& s) { s.kv_heads = s.query_heads = kMost; }),
            "ModelSpec: kv_heads is 2147483647; allowed 1 to 65536");
  EXPECT_NE(says([](ModelSpec& s) { s.query_heads = kMost - 1; }).find("query_heads is"), std::string::npos);
  EXPECT_NE(says([](ModelSpec& s) { s.model_heads = kMost; }).find("model_heads is"), std::string::npos);
  EXPECT_NE(says([](ModelSpec& s) { s.key_dim = kMost; }).find("key_dim is 2147483647"), std::string::npos);
  EXPECT_NE(says([](ModelSpec& s) { s.value_dim = kMost; }).find("value_dim 2147483647"), std::string::npos);
  EXPECT_NE(says([](ModelSpec& s) { s.kv_heads = s.query_heads = 1 << 16, s.layers.resize(257); }).find("257 layers"),
            std::string::npos);
  EXPECT_NE(says([](ModelSpec& s) { s.rope.style = RopeStyle::none; }).find("style is none, and rope.inv_freq has 3"),
            std::string::npos);
  EXPECT_NE(says([](ModelSpec& s) {
              s.layers[1].rope = RopeSpec{.inv_freq = {1, 1, 1, 1, 1}};
            }).find("ModelSpec: layer 1: rope.inv_freq has 5 pairs"),
            std::string::npos);
  EXPECT_NE(says([](ModelSpec& s) { s.layers[1].rope = RopeSpec{.inv_freq = {-1}}; }).find("layer 1: rope.inv_freq[0]"),
            std::string::npos);
}

TEST(ModelSpec, RefusesSinkLogitsAndCapsThatNoModelHas) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  ModelSpec spec;
  spec.query_heads = 4, spec.kv_heads = 2, spec.key_dim = spec.value_dim = 8;
  spec.layers.resize(2);
  const auto says = [&](std::vector<float> sinks, double cap) {
    ModelSpec wrong = spec;
    wrong.layers[1].sinks = std::move(sinks);
    wrong.logit_cap = cap;
    return testing::message_of<InvalidArgument>([&] { wrong.check(); });
  };
  spec.layers[0].sinks = {0, -kInf, 1e30F, -5};
  spec.logit_cap = 50;
  spec.check();
  EXPECT_EQ(spec.sinks_of(0, 1)[0], 1e30F) << "query heads 2 and 3 read KV head 1";
  EXPECT_EQ(spec.sinks_of(1, 1), nullptr);
  for (const std::size_t count : {1U, 2U, 5U})
    EXPECT_EQ(
        says(std::vector<float>(count), 0),
        text("ModelSpec: layer 1 has ", count, " sink logits; allowed none, or one for each of the 4 query heads"));
  for (const float wrong : {kInf, kNan})
    EXPECT_EQ(says({0, 0, wrong, 0}, 0), text("ModelSpec: the sink logit of query head 2 of layer 1 is ", wrong,
                                              "; allowed finite numbers, and minus infinity for none"));
  for (const double wrong : {-1.0, static_cast<double>(kInf), static_cast<double>(kNan)})
    EXPECT_EQ(says({}, wrong),
              text("ModelSpec: logit_cap must be finite and not negative (0 means none); given ", wrong));
}

TEST(ModelSpec, RopeIsAPropertyOfALayer) {
  ModelSpec spec;
  spec.layers.resize(4);
  spec.layers[1].rope = RopeSpec::absent();
  spec.layers[2].rope = RopeSpec{.style = RopeStyle::interleaved, .inv_freq = {0.5}};
  spec.layers[3].kind = LayerKind::sliding;
  EXPECT_EQ(&spec.rope_of(0), &spec.rope);
  EXPECT_EQ(spec.rope_of(1).style, RopeStyle::none);
  EXPECT_EQ(spec.rope_of(2).inv_freq, std::vector<double>{0.5});
  EXPECT_EQ(spec.first_without_rope(), 0) << "nothing is stated of the model";
  spec.rope.inv_freq = {1};
  EXPECT_EQ(spec.first_without_rope(), -1);
  spec.layers[2].rope = RopeSpec();
  EXPECT_EQ(spec.first_without_rope(), 2);
  spec.layers[2].kind = LayerKind::sliding;
  EXPECT_EQ(spec.first_without_rope(), -1) << "no policy cuts it";
}

}  // namespace
}  // namespace kvkeep::model_spec_test
