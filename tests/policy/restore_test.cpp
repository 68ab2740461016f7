// SPDX-License-Identifier: Apache-2.0
// Sequences that are saved and come back elsewhere: they go on to the same bits, and a file that does not fit changes
// nothing.

#include <gtest/gtest.h>

#include "engines.h"
#include "folding_engine.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/score/calibration.h"
#include "layer_by_layer_engine.h"
#include "message_of.h"
#include "restored.h"

namespace kvkeep::restore_test {
namespace {

using testing::Array;
using testing::FoldingEngine;
using testing::message_of;

const std::string kSekv = FoldingEngine::kSekv;
const std::string kAms =
    "ams-tova,budget=32,interval=8,recent=8,window=4,rest=fold,memory.max_span=16,memory.min_span=4";
const std::string kRkv = "rkv,budget=32,interval=8,recent=8,sink=2";

using File = testing::StateFileOfATest;

template <class T>
void expect_same(std::span<const T> a, std::span<const T> b, const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_TRUE(a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0) << what;
}

/// What two keepers know of one sequence each.
void expect_same_sequence(const Keeper& a, SequenceId of_a, const Keeper& b, SequenceId of_b, std::int32_t layers,
                          std::int32_t heads) {
  EXPECT_EQ(a.logical_length(of_a), b.logical_length(of_b));
  EXPECT_EQ(a.prompt_length(of_a), b.prompt_length(of_b));
  for (std::int32_t l = 0; l < layers; ++l)
    for (std::int32_t h = 0; h < heads; ++h) {
      expect_same(a.positions(of_a, l, h), b.positions(of_b, l, h), "positions");
      expect_same(a.credit(of_a, l, h), b.credit(of_b, l, h), "credit");
    }
}

void expect_same_spans(const SpanRow& a, const SpanRow& b) {
  ASSERT_EQ(a.size(), b.size());
  const auto bytes = static_cast<std::size_t>(a.size() * a.dim()) * static_cast<std::size_t>(element_size(a.dtype()));
  for (const KvSide side : {KvSide::keys, KvSide::values})
    expect_same(std::span(a.coarse(side), bytes), std::span(b.coarse(side), bytes), "coarse entries");
  expect_same(a.log_length(), b.log_length(), "logarithms");
  expect_same(a.norms(), b.norms(), "norms");
  EXPECT_EQ(a.sketch().signs, b.sketch().signs);
  expect_same(std::span<const BFloat16>(a.sketch().sizes), std::span<const BFloat16>(b.sketch().sizes), "sketch");
  for (std::int64_t i = 0; i < a.size(); ++i) {
    const FoldedSpan &one = a.span(i), &other = b.span(i);
    EXPECT_EQ(std::tie(one.first, one.last, one.length), std::tie(other.first, other.last, other.length));
    for (std::size_t side = 0; side < 2; ++side) {
      const SpanFactors &f = one.factors[side], &g = other.factors[side];
      EXPECT_EQ(std::tie(f.rank, f.raw, f.centred, f.offset), std::tie(g.rank, g.raw, g.centred, g.offset));
    }
    EXPECT_TRUE(std::ranges::equal(a.factors(i), b.factors(i))) << "factors of span " << i;
  }
}

/// What the engine itself brings over: rows of the cache, in other places and pages, and the text to come.
void bring_rows(const FoldingEngine& from, FoldingEngine& to, SequenceId id) {
  FoldingEngine::Living s = from.living.at(id);
  const std::int32_t place = s.place, longest = *std::ranges::max_element(s.lengths);
  s.place = to.free_places.back();
  to.free_places.pop_back();
  if (to.paged) ASSERT_TRUE(to.sequences.admit(id, longest).given());
  for (std::size_t l = 0; l < from.cache.size(); ++l) {
    if (!to.paged) {
      const auto &a = std::get<DenseKv>(from.cache[l]), &b = std::get<DenseKv>(to.cache[l]);
      copy(a.keys.select(0, place), b.keys.select(0, s.place)),
          copy(a.values.select(0, place), b.values.select(0, s.place));
      continue;
    }
    const auto &a = std::get<PagedKv>(from.cache[l]), &b = std::get<PagedKv>(to.cache[l]);
    const auto old_pages = from.sequences.pages(id), new_pages = to.sequences.pages(id);
    ASSERT_EQ(old_pages.size(), new_pages.size());
    for (std::size_t p = 0; p < old_pages.size(); ++p) {
      copy(a.keys.select(0, old_pages[p]), b.keys.select(0, new_pages[p]));
      copy(a.values.select(0, old_pages[p]), b.values.select(0, new_pages[p]));
    }
  }
  to.living.emplace(id, std::move(s));
}

/// The sequence goes on in `there`, which has one of its own, as it does in `here`.
void expect_goes_on(FoldingEngine& here, FoldingEngine& there, SequenceId id, int steps, const File& file) {
  there.join(77);
  there.step({{77, 40}});
  here.keeper.save(id, file.path);
  there.keeper.restore(id, file.path);
  bring_rows(here, there, id);
  for (int i = 0; i < steps; ++i) {
    const std::int32_t tokens = i % 9 == 4 ? 3 : 1;
    here.step({{id, tokens}});
    const Report report = there.step({{id, tokens}});
    EXPECT_EQ(report.cuts.size(), static_cast<std::size_t>(report.slots_dropped > 0 ? 1 : 0));
    for (std::size_t l = 0; l < here.outputs.size(); ++l)
      ASSERT_TRUE(engines::same_bits(here.outputs[l], there.outputs[l])) << "step " << i << ", layer " << l;
  }
  expect_same_sequence(here.keeper, id, there.keeper, id, FoldingEngine::kLayers, FoldingEngine::kHeads);
  EXPECT_EQ(here.living.at(id).lengths, there.living.at(id).lengths);
  for (std::int32_t l = 0; l < FoldingEngine::kLayers; ++l)
    for (std::int32_t h = 0; h < FoldingEngine::kHeads; ++h)
      expect_same_spans(here.keeper.part<parts::Folds>().spans(id, l, h),
                        there.keeper.part<parts::Folds>().spans(id, l, h));
  EXPECT_GT(there.keeper.part<parts::Folds>().of(id).spans, 20);
}

TEST(Restore, GoesOnToTheSameBitsWithEverythingThatWasFolded) {
  const File weights("router");
  write_routing(weights.path, {.projections = Array::full({2, 4, 3, 16}, 0.25F),
                               .thresholds = Array::full({2, 4}, 0.6F),
                               .gate_weights = {},
                               .gate_biases = {}});
  for (const std::string& policy :
       {kSekv, kSekv + ",memory.store=bf16", kSekv + ",budget=40", kSekv + ",memory.router=" + weights.path.string(),
        kAms, kAms + ",memory.zoom=coverage"})
    for (const int page_size : {0, 4}) {
      if (page_size > 0 && policy != kSekv && policy != kAms) continue;
      SCOPED_TRACE(policy + text(", page size ", page_size));
      const File file("folded");
      FoldingEngine here(policy, 2, page_size), there(policy, 3, page_size);
      here.join(5);
      here.step({{5, 90}});
      for (int i = 0; i < 20; ++i) here.step({{5, 1}});
      const std::int64_t folded = here.keeper.part<parts::Folds>().of(5).tokens;
      expect_goes_on(here, there, 5, 36, file);
      EXPECT_GT(there.keeper.part<parts::Folds>().of(5).tokens, folded) << "it folds on";
    }
  // The cap on factors is each keeper's own affair.
  const File file("caps");
  FoldingEngine here(kSekv), there(kSekv + ",memory.host_bytes=1000000", 2);
  here.join(5);
  here.step({{5, 130}});
  expect_goes_on(here, there, 5, 30, file);
  EXPECT_EQ(there.keeper.part<parts::Folds>().far_bytes(),
            there.keeper.part<parts::Folds>().of(5).far_bytes + there.keeper.part<parts::Folds>().of(77).far_bytes);
}

/// The same for policies that drop: two engines, random numbers that both get.
void expect_goes_on(engines::Engine& here, engines::Engine& there, const std::string& name) {
  const File file(name);
  oracle::Random random(31);
  here.join(1), here.join(3);
  here.step(engines::numbers_of(random, {{1, 70}, {3, 20}}));
  for (int i = 0; i < 20; ++i) here.step(engines::numbers_of(random, {{1, 1}, {3, 1 + i % 2}}));
  ASSERT_NO_FATAL_FAILURE(testing::bring_over(here, there, 3, file.path));
  std::int64_t dropped = 0;
  for (int i = 0; i < 24; ++i) {
    const engines::Numbers numbers = engines::numbers_of(random, {{3, 1 + i % 3}});
    if (i == 9) {
      for (engines::Engine* engine : {&here, &there}) {
        engine->feed(engines::numbers_of(random, {{3, 0}}));  // observed, nothing new
        engine->cut({3});
      }
    }
    const Report a = here.step(numbers), b = there.step(numbers);
    EXPECT_EQ(a.slots_dropped, b.slots_dropped);
    dropped += b.slots_dropped;
    expect_same_sequence(here.keeper, 3, there.keeper, 3, engines::kLayers, engines::kHeads);
    ASSERT_EQ(here.lengths.at(3), there.lengths.at(3)) << "step " << i;
  }
  EXPECT_GT(dropped, 30);
  for (std::int32_t r = 0; r < engines::kRows; ++r)
    for (std::int32_t t = 0; t < here.lengths.at(3)[static_cast<std::size_t>(r)]; ++t)
      for (const engines::Sided side : engines::kAllSides)
        ASSERT_TRUE(engines::same_bits(here.slot_of(3, r / engines::kHeads, r % engines::kHeads, t, side),
                                       there.slot_of(3, r / engines::kHeads, r % engines::kHeads, t, side)));
}

std::filesystem::path write_calibration(const std::filesystem::path& path) {
  oracle::Random random(7);
  Calibration calibration;
  calibration.head_dim = engines::kKeyDim;
  for (std::int32_t l = 0; l < engines::kLayers; ++l)
    for (std::int32_t h = 0; h < 4; ++h)
      for (int f = 0; f < engines::kKeyDim / 2; ++f) {
        Calibration::Head& head = calibration.heads[{l, h}];
        head.q_mean.emplace_back(static_cast<float>(random.normal()), static_cast<float>(random.normal()));
        head.q_abs_mean.push_back(2);
      }
  save_calibration(path, calibration);
  return path;
}

TEST(Restore, GoesOnToTheSameBitsUnderPoliciesThatDrop) {
  const File statistics("calibration");
  const std::string tail = ",budget=32,interval=8,sink=2,";
  for (const std::string& policy :
       {"ams-tova" + tail + "recent=8,window=4", kRkv,
        "triattention" + tail + "recent=8,calibration=" + write_calibration(statistics.path).string(),
        "snapkv" + tail + "window=6", "h2o" + tail + "recent=8,window=8", "expected" + tail + "recent=8",
        "adakv-snapkv" + tail + "window=6", std::string("streaming,budget=32,interval=8,sink=2"),
        "random" + tail + "recent=8"}) {
    SCOPED_TRACE(policy);
    engines::DenseEngine dense(policy, true, Dtype::f32), there(policy, true, Dtype::f32);
    expect_goes_on(dense, there, "dense");
    engines::PagedEngine paged(policy, true, Dtype::bf16, 4, PageLayout::slot_head, engines::Form::apart),
        elsewhere(policy, true, Dtype::bf16, 4, PageLayout::slot_head, engines::Form::apart);
    expect_goes_on(paged, elsewhere, "paged");
  }
}

TEST(Restore, SaysInItsVersionWhetherItHoldsPins) {
  const File file("version");
  engines::DenseEngine here("tova,budget=32,interval=8,sink=2,recent=8", true, Dtype::f32);
  here.join(0);
  const auto version = [&] {
    here.keeper.save(0, file.path);
    return io::SafetensorsFile::open(file.path).metadata().at("kvkeep_sequence");
  };
  EXPECT_EQ(version(), "3");
  here.keeper.part<parts::Pins>().pin(0, 3, 5);
  EXPECT_EQ(version(), "4");
}

TEST(Restore, TakesBackSpeculativeTokensThatCameBeforeItWasSaved) {
  for (const std::string policy :
       {"snapkv,budget=32,interval=8,sink=2,window=6", "expected,budget=32,interval=8,sink=2,recent=8"}) {
    SCOPED_TRACE(policy);
    const File file("speculative");
    engines::DenseEngine here(policy, true, Dtype::f32), there(policy, true, Dtype::f32);
    oracle::Random random(8);
    here.join(0);
    here.step(engines::numbers_of(random, {{0, 60}}));
    for (int i = 0; i < 5; ++i) here.step(engines::numbers_of(random, {{0, 1}}));
    const std::int64_t length = here.keeper.logical_length(0);
    here.keeper.save(0, file.path);
    there.keeper.restore(0, file.path);
    for (engines::Engine* engine : {static_cast<engines::Engine*>(&here), static_cast<engines::Engine*>(&there)}) {
      EXPECT_THROW(engine->keeper.truncate(0, 3), StateError) << "behind the last event";
      engine->keeper.truncate(0, length - 4);
      EXPECT_EQ(engine->keeper.physical_length(0, 0, 0), here.lengths.at(0)[0] - 4);
    }
    expect_same_sequence(here.keeper, 0, there.keeper, 0, engines::kLayers, engines::kHeads);
  }
}

TEST(Restore, TakesBackTokensWhoseQueriesNobodyReads) {
  const File file("unread");
  const std::string policy = "tova,budget=64,interval=32,recent=4";
  engines::DenseEngine here(policy, true, Dtype::f32), there(policy, true, Dtype::f32),
      forged(policy, true, Dtype::f32);
  const auto observe = [](engines::Engine& engine, std::int32_t tokens, const Array& queries) {
    const SequenceId id = 1;
    const engines::Ints indptr{0, tokens};
    for (std::int32_t l = 0; l < engines::kLayers; ++l)
      engine.keeper.observe(
          {.layer = l, .sequences = {&id, 1}, .indptr = indptr, .queries = queries, .unread = !queries.defined()});
    for (std::int32_t& length : engine.lengths.at(id)) length += tokens;
  };
  here.join(1);
  observe(here, 40, Array::full({40, 4, engines::kKeyDim}, 1.0F));
  static_cast<void>(here.cut({1}));
  observe(here, 10, {});
  static_cast<void>(here.cut({1}));
  here.keeper.save(1, file.path);
  there.keeper.restore(1, file.path);
  there.lengths[1] = here.lengths.at(1);
  for (engines::Engine* engine : {static_cast<engines::Engine*>(&here), static_cast<engines::Engine*>(&there)}) {
    engine->keeper.truncate(1, 43);
    EXPECT_EQ(engine->keeper.logical_length(1), 43);
    for (std::int32_t& length : engine->lengths.at(1)) length -= 7;
    observe(*engine, 60, Array::full({60, 4, engines::kKeyDim}, 1.0F));
    EXPECT_EQ(engine->cut({1}).cuts.size(), 1U);
  }
  expect_same_sequence(here.keeper, 1, there.keeper, 1, engines::kLayers, engines::kHeads);

  const io::SafetensorsFile saved = io::SafetensorsFile::read(file.path);
  EXPECT_EQ(saved.metadata().at("kvkeep_sequence"), "5") << "earlier versions would refuse to take the tokens back";
  StateTensors tensors;
  for (const std::string& name : saved.names()) tensors.emplace_back(name, clone(saved.tensor(name)));
  for (auto& [name, tensor] : tensors)
    if (name == "queries.unread") tensor.data<std::uint8_t>()[1] = 2;
  write_state(file.path, {tensors, saved.metadata()});
  EXPECT_NE(message_of<InvalidArgument>([&] { forged.keeper.restore(1, file.path); }).find("\"queries.unread\" in "),
            std::string::npos);
  EXPECT_FALSE(forged.keeper.knows(1));
}

TEST(Restore, BringsBackWhatBecameOfANarrowedPromptAndRefusesOneThatIsStillNarrowing) {
  for (const std::string policy : {"asl,budget=24,window=6,pool=3,min_layer=1,observed_layers=2,threshold=0.6",
                                   "asl-2pass,budget=24,window=6,pool=3,min_layer=1,observed_layers=2,threshold=0.6"}) {
    SCOPED_TRACE(policy);
    const File file("narrowed");
    layer_by_layer::Engine engine(policy);
    engine.join(1, 60);
    engine.begin({{1, 60}});
    engine.observe(0);
    engine.narrow(0);
    EXPECT_NE(message_of<StateError>([&] {
                engine.keeper.save(1, file.path);
              }).find("the prompt of sequence 1 has only reached layer 1"),
              std::string::npos);
    EXPECT_FALSE(std::filesystem::exists(file.path));
    for (std::int32_t l = 1; l < layer_by_layer::kLayers; ++l) engine.observe(l), engine.narrow(l);
    engine.end();
    engine.keeper.save(1, file.path);
    Keeper there(layer_by_layer::model(), make_policy(policy), {.layer_by_layer = true});
    there.restore(9, file.path);
    const PromptReport *a = engine.keeper.part<parts::Prompts>().report_of(1),
                       *b = there.part<parts::Prompts>().report_of(9);
    ASSERT_TRUE(a != nullptr && b != nullptr);
    EXPECT_EQ(std::tie(a->tokens, a->selection_layer, a->entered, a->going_on, a->second_pass),
              std::tie(b->tokens, b->selection_layer, b->entered, b->going_on, b->second_pass));
    expect_same_sequence(engine.keeper, 1, there, 9, layer_by_layer::kLayers, layer_by_layer::kHeads);
  }
}

TEST(Restore, ComesBackAsItWasBeforeItsFirstToken) {
  const File file("fresh");
  engines::DenseEngine here(kRkv, true, Dtype::f32), there(kRkv, true, Dtype::f32);
  here.keeper.join(2, 7, 30);
  here.keeper.save(2, file.path);
  there.keeper.restore(4, file.path);
  EXPECT_EQ(there.keeper.prompt_length(4), 30);
  expect_same_sequence(here.keeper, 2, there.keeper, 4, engines::kLayers, engines::kHeads);
}

TEST(Restore, ComesBackBeforeItsFirstFold) {
  const File file("unfolded");
  for (const std::string& policy : {kSekv, kAms})
    for (const int tokens : {0, 5}) {
      FoldingEngine here(policy), there(policy, 2);
      here.join(1);
      if (tokens > 0) here.step({{1, tokens}});
      ASSERT_EQ(here.keeper.part<parts::Folds>().of(1).spans, 0);
      here.keeper.save(1, file.path);
      there.keeper.restore(1, file.path);
      expect_same_sequence(here.keeper, 1, there.keeper, 1, FoldingEngine::kLayers, FoldingEngine::kHeads);
    }
}

TEST(Restore, RefusesPoliciesThatAreNoObjectOfOptions) {
  const File whole("told"), forged("untold");
  engines::DenseEngine here(kRkv, true, Dtype::f32);
  here.join(1);
  here.keeper.save(1, whole.path);
  const io::SafetensorsFile honest = io::SafetensorsFile::open(whole.path);
  StateTensors tensors;
  for (const std::string& name : honest.names()) tensors.emplace_back(name, honest.tensor(name));
  for (const std::string& policy : {std::string("{}"), std::string("[]"), std::string("no JSON"),
                                    "{\"a\":" + std::string(1000000, '[') + std::string(1000000, ']') + "}"}) {
    std::map<std::string, std::string> about = honest.metadata();
    about["policy"] = policy;
    write_state(forged.path, {tensors, about});
    engines::DenseEngine there(kRkv, true, Dtype::f32);
    EXPECT_NE(message_of<InvalidArgument>([&] {
                there.keeper.restore(1, forged.path);
              }).find("was saved with another policy"),
              std::string::npos);
  }
}

TEST(Restore, RefusesMoreQueriesThanItHasSeenTokens) {
  const File whole("few"), forged("many");
  const std::string snapkv = "snapkv,budget=128,recent=8,interval=8";
  engines::DenseEngine here(snapkv, true, Dtype::f32), there(snapkv, true, Dtype::f32);
  oracle::Random random(2);
  here.join(1);
  here.step(engines::numbers_of(random, {{1, 5}}));
  here.keeper.save(1, whole.path);
  const io::SafetensorsFile honest = io::SafetensorsFile::open(whole.path);
  for (const int more : {1, 2, 11}) {
    StateTensors tensors;
    for (const std::string& name : honest.names()) {
      Array t = honest.tensor(name);
      if (name == "queries.positions") t = Array::cat({Array::full({more}, 0, t.dtype()), t}, 0);
      if (name == "queries") {
        Shape shape = t.sizes();
        shape[1] = more;
        t = Array::cat({Array::full(shape, 0, t.dtype()), t}, 1);
      }
      tensors.emplace_back(name, t);
    }
    write_state(forged.path, {tensors, honest.metadata()});
    const std::string said = message_of<InvalidArgument>([&] { there.keeper.restore(1, forged.path); });
    EXPECT_NE(said.find("query ring"), std::string::npos) << said;
  }
}

TEST(Restore, RefusesAnotherPolicyOrModelByTheFieldsThatDiffer) {
  const File file("other");
  engines::DenseEngine here("ams-tova,budget=32,interval=8,recent=8,window=4", true, Dtype::f32);
  oracle::Random random(2);
  here.join(1);
  here.step(engines::numbers_of(random, {{1, 50}}));
  here.keeper.save(1, file.path);
  const auto restored = [&](ModelSpec spec, const std::string& policy) {
    Keeper keeper(std::move(spec), make_policy(policy));
    const std::string said = message_of<InvalidArgument>([&] { keeper.restore(1, file.path); });
    EXPECT_FALSE(keeper.knows(1));
    EXPECT_NE(said.find(file.path.string()), std::string::npos) << said;
    return said;
  };
  EXPECT_NE(restored(engines::model(), "ams-tova,budget=33,interval=8,recent=8,window=4")
                .find("another policy: budget is 32 there and 33 here; allowed the same"),
            std::string::npos);
  EXPECT_NE(restored(engines::model(), kRkv).find("policy is \"ams-tova\" there and \"rkv\" here"), std::string::npos);
  ModelSpec other = engines::model();
  other.key_dim = 10;
  EXPECT_NE(restored(other, "ams-tova,budget=32,interval=8,recent=8,window=4")
                .find("another model: key_dim is 8 there and 10 here"),
            std::string::npos);
  other = engines::model();
  other.rope.inv_freq[1] = 0.25;
  EXPECT_NE(restored(other, "ams-tova,budget=32,interval=8,recent=8,window=4")
                .find("rope/inv_freq/1 is 0.3 there and 0.25 here"),
            std::string::npos);
  other = engines::model();
  other.logit_cap = 30;
  EXPECT_NE(restored(other, "ams-tova,budget=32,interval=8,recent=8,window=4")
                .find("logit_cap is not given there and 30.0 here"),
            std::string::npos);
  other = engines::model();
  other.layers[1].sinks[1] = 0;
  EXPECT_NE(restored(other, "ams-tova,budget=32,interval=8,recent=8,window=4")
                .find("layers/1/sinks/1 is null there and 0.0 here"),
            std::string::npos);
  EXPECT_NE(message_of<StateError>([&] { here.keeper.restore(1, file.path); }).find("sequence 1 is already here"),
            std::string::npos);
}

TEST(Restore, RefusesToSaveInTheMiddleOfAStepAndAnUnknownSequence) {
  const File file("middle");
  engines::DenseEngine engine(kRkv, true, Dtype::f32);
  engine.join(1);
  const Array queries = Array::full({3, 4, engines::kKeyDim}, 0.5F);
  const SequenceId id = 1;
  const std::vector<std::int32_t> indptr{0, 3};
  engine.keeper.observe({.layer = 0, .sequences = {&id, 1}, .indptr = indptr, .queries = queries});
  EXPECT_NE(message_of<StateError>([&] {
              engine.keeper.save(1, file.path);
            }).find("layer 1 has shown 0 of the 3 tokens of sequence 1"),
            std::string::npos);
  EXPECT_NE(message_of<StateError>([&] { engine.keeper.save(2, file.path); }).find("sequence 2 is not known"),
            std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(file.path));
}

TEST(Restore, LeavesTheKeeperAsItWasWhereTheCapHasNoRoomForItsFactors) {
  const File file("full");
  FoldingEngine here(kSekv);
  here.join(1);
  here.step({{1, 150}});
  here.keeper.save(1, file.path);
  const std::int64_t bytes = here.keeper.part<parts::Folds>().of(1).far_bytes;
  FoldingEngine there(kSekv + text(",memory.host_bytes=", bytes - 1), 2);
  EXPECT_NE(message_of<StateError>([&] {
              there.keeper.restore(1, file.path);
            }).find(text("no room for ", bytes, " bytes of factors")),
            std::string::npos);
  EXPECT_FALSE(there.keeper.knows(1));
  EXPECT_EQ(there.keeper.part<parts::Folds>().far_bytes(), 0);
  there.join(1);  // the id is free
}

TEST(Restore, RefusesEveryFileThatIsCutOffOrChangedAnywhere) {
  const File whole("whole"), broken("broken");
  FoldingEngine here(kSekv);
  here.join(1);
  here.step({{1, 60}});
  here.keeper.save(1, whole.path);
  const std::string bytes = whole.bytes();
  ASSERT_GT(bytes.size(), 3000U);
  Keeper keeper(FoldingEngine::model(), make_policy(kSekv), {.surprisal = true, .reads_folded = true});
  const auto expect_refused = [&](const std::string& changed, std::size_t at) {
    broken.write(changed);
    const std::string said = message_of<InvalidArgument>([&] { keeper.restore(1, broken.path); });
    EXPECT_NE(said.find(broken.path.string()), std::string::npos) << said;
    EXPECT_FALSE(keeper.knows(1)) << at;
    EXPECT_EQ(keeper.part<parts::Folds>().far_bytes(), 0);
  };
  for (std::size_t at = 0; at < bytes.size(); at += 97) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 4);
    if (changed.substr(at - at % 8, 8).find_first_not_of(' ') == std::string::npos) continue;
    expect_refused(changed, at);
  }
  for (std::size_t size = 0; size < bytes.size(); size += 1013) expect_refused(bytes.substr(0, size), size);
  expect_refused(bytes + "more", bytes.size());
  std::filesystem::remove(broken.path);
  EXPECT_NE(message_of<InvalidArgument>([&] { keeper.restore(1, broken.path); }).find(broken.path.string()),
            std::string::npos);
  keeper.restore(1, whole.path);
}

/// A file whose checksum is right and whose numbers are not: whoever wrote it. It is refused, or it is a sequence that
/// can go on.
TEST(Restore, TrustsNoNumberOfAFileThatIsWhole) {
  const File whole("honest"), forged("forged");
  for (const std::string& policy : {kSekv, kAms}) {
    FoldingEngine here(policy);
    here.join(1);
    here.step({{1, 80}});
    for (int i = 0; i < 12; ++i) here.step({{1, 1}});
    here.keeper.save(1, whole.path);
    const io::SafetensorsFile honest = io::SafetensorsFile::open(whole.path);
    oracle::Random random(11);
    int refused = 0, taken = 0;
    for (int round = 0; round < 150; ++round) {
      StateTensors tensors;
      for (const std::string& name : honest.names()) tensors.emplace_back(name, clone(honest.tensor(name)));
      const auto victim = static_cast<std::size_t>(random.between(0, static_cast<int>(tensors.size()) - 1));
      Tensor& t = tensors[victim].second;
      const bool resized = random.between(0, 4) == 0;
      if (resized && t.dim() > 0 && t.size(0) > 0) {
        t = random.between(0, 1) == 0 ? clone(t.narrow(0, 0, t.size(0) - 1))
                                      : Tensor(Array::cat({t, t.narrow(0, 0, 1)}, 0));
      } else if (t.nbytes() >= 4) {
        const std::int32_t values[] = {-1, 0, 1, 7, 100, 1 << 30, INT32_MAX, INT32_MIN};
        const std::int32_t value = values[random.between(0, 7)];
        const auto at = static_cast<std::size_t>(random.between(0, static_cast<int>(t.nbytes() / 4) - 1)) * 4;
        std::memcpy(t.bytes() + at, &value, 4);
      }
      write_state(forged.path, {tensors, honest.metadata()});
      FoldingEngine there(policy, 2);
      try {
        there.keeper.restore(1, forged.path);
      } catch (const Error& e) {
        ++refused;
        EXPECT_NE(std::string(e.what()).find(forged.path.string()), std::string::npos) << e.what();
        EXPECT_FALSE(there.keeper.knows(1));
        continue;
      }
      ++taken;
      bring_rows(here, there, 1);
      try {
        for (int i = 0; i < 10; ++i) there.step({{1, 1}});
        there.keeper.truncate(1, there.keeper.logical_length(1) - 1);
      } catch (const Error&) {
      }
      there.keeper.leave(1);
    }
    EXPECT_GT(refused, 30);
    EXPECT_GT(taken, 10);
  }
}

}  // namespace
}  // namespace kvkeep::restore_test
