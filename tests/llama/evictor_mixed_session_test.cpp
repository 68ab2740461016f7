// SPDX-License-Identifier: Apache-2.0
// Models whose layers slide or have states: sequences that are saved, come back, and go back.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "evictor_engine.h"

namespace kvkeep::llama {
namespace {

const std::string kMixedPolicies[] = {"tova,budget=40,interval=8,sink=2,recent=4,prefill=cut",
                                      "knorm,budget=40,interval=8,recent=4,share=union", "tova,budget=900"};

/// Under another id, in another context whose cells are others; saved in the middle of a prompt, or behind it.
TEST_P(LlamaEvictor, ASessionOfAMixedModelGoesOnWhereItWasSaved) {
  if (!exact()) return;
  for (const char* kind : {"swa", "states"}) {
    const Model model = of_kind(kind);
    for (const std::string& policy : kMixedPolicies)
      for (const bool unified : {true, false})
        for (const bool prompted : {true, false}) {
          SCOPED_TRACE(std::string(kind) + ' ' + policy + (unified ? "" : " streams") + (prompted ? "" : " prompt"));
          const Setting setting{.cells = 1536, .sequences = 3, .unified = unified, .type = GGML_TYPE_F32};
          const Engine first(policy, setting, model.get()), second(policy, setting, model.get());
          ASSERT_EQ(first.decode({{0, words(90, 1), prompted}}), 0);
          if (prompted) ASSERT_EQ(first.decode({{0, words(21, 2)}}), 0);
          ASSERT_EQ(second.decode({{0, words(230, 3)}, {1, words(20, 4)}}), 0);
          ASSERT_EQ(second.decode({{1, words(200, 5)}}), 0);
          ASSERT_TRUE(llama_memory_seq_rm(second.memory(), 0, -1, -1));
          restore(second, save(first, 0), 2);
          EXPECT_EQ(second.evictor->next_position(2), prompted ? 111 : 90);
          EXPECT_TRUE(second.evictor->cells(2).empty()) << "cells are not known yet";
          ASSERT_EQ(second.decode({{1, words(3, 6)}}), 0) << "others go on meanwhile";
          for (unsigned i = 0; i < 40; ++i) {
            ASSERT_EQ(first.decode({{0, words(i == 0 ? 12 : 1, i)}}), 0);
            ASSERT_EQ(second.decode({{2, words(i == 0 ? 12 : 1, i)}}), 0);
            ASSERT_NO_FATAL_FAILURE(expect_alike(logits_of(second, model.get()), logits_of(first, model.get())));
          }
          for (const std::int32_t l : first.evictor->keeper().spec().full_layers())
            EXPECT_EQ(second.positions(2, l, 0), first.positions(0, l, 0));
          EXPECT_EQ(first.evictor->spent().cut > 2, policy != kMixedPolicies[2]);
        }
  }
}

TEST_P(LlamaEvictor, AStateOfAMixedModelThatLlamaCppAloneSavedIsAPrefix) {
  if (!exact()) return;
  for (const char* kind : {"swa", "states"}) {
    const Model model = of_kind(kind);
    const Engine alone("", {}, model.get()), kept(kMixedPolicies[0], {}, model.get());
    ASSERT_EQ(alone.decode({{0, words(120, 1)}}), 0);
    Session session;
    session.cache.resize(llama_state_seq_get_size(alone.context.get(), 0));
    llama_state_seq_get_data(alone.context.get(), session.cache.data(), session.cache.size(), 0);
    restore(kept, session, 0);
    ASSERT_EQ(kept.decode({{0, words(4, 2)}}), 0);
    EXPECT_EQ(kept.evictor->report().cuts.at(0).logical_length, 124) << kind;
    EXPECT_EQ(kept.evictor->cells(0).size(), 40U) << kind;
  }
}

/// As far as the window of layers that slide is there, and no event has cut: what is left gives what a context gives
/// that has never seen more.
TEST_P(LlamaEvictor, ASequenceOfLayersThatSlideGoesBackAsFarAsTheirWindowIsThere) {
  if (!exact()) return;
  const Model model = of_kind("swa");
  const std::int32_t window = llama_model_n_swa(model.get());
  const Setting setting{.cells = 1024, .type = GGML_TYPE_F32};
  const std::vector<llama_token> text = words(600, 1), more = words(20, 2);
  const auto begin = [&](const Engine& run, std::ptrdiff_t tokens) {
    for (std::ptrdiff_t at = 0; at < tokens; at += 60)
      ASSERT_EQ(run.decode({{0, {text.begin() + at, text.begin() + std::min(at + 60, tokens)}, false}}), 0);
  };
  const Engine run(kMixedPolicies[2], setting, model.get());
  begin(run, 100);
  EXPECT_EQ(run.evictor->least_length(0), 0) << "nothing has left the window's cells";
  ASSERT_TRUE(run.evictor->go_back(0, 0));
  begin(run, 600);
  const std::int64_t least = run.evictor->least_length(0);
  EXPECT_EQ(least, llama_memory_seq_pos_min(run.memory(), 0) + window - 1);
  EXPECT_GT(least, 200) << "cells of 256 were written anew";
  EXPECT_EQ(run.evictor->least_length(0, true), 0) << "full layers have all";
#ifdef KVKEEP_TEST_FAKE_LLAMA
  for (std::int64_t p = least - window + 1; p < 600; ++p)
    EXPECT_TRUE(fake_llama_slides_over(run.context.get(), 0, static_cast<llama_pos>(p))) << p;
  EXPECT_FALSE(fake_llama_slides_over(run.context.get(), 0, static_cast<llama_pos>(least - window)));
#endif
  EXPECT_FALSE(run.evictor->go_back(0, least - 1));
  EXPECT_EQ(run.evictor->next_position(0), 600) << "nothing has changed";
  for (const std::int64_t tokens : {least + 60, least + 1, least}) {
    ASSERT_TRUE(run.evictor->go_back(0, tokens));
    EXPECT_EQ(run.evictor->next_position(0), tokens);
    EXPECT_EQ(run.evictor->cells(0).size(), static_cast<std::size_t>(tokens));
  }
  const Engine fresh(kMixedPolicies[2], setting, model.get());
  begin(fresh, least);
  for (const Engine* each : {&run, &fresh}) ASSERT_EQ(each->decode({{0, more}}), 0);
  expect_alike(logits_of(run, model.get()), logits_of(fresh, model.get()));
}

TEST_P(LlamaEvictor, ASequenceOfLayersThatSlideGoesBackToItsLastEvent) {
  if (!exact()) return;
  const Model model = of_kind("swa");
  const Setting setting{.cells = 512, .type = GGML_TYPE_F32};
  const Engine run(kMixedPolicies[0], setting, model.get()), fresh(kMixedPolicies[0], setting, model.get());
  for (const Engine* each : {&run, &fresh}) ASSERT_EQ(each->decode({{0, words(90, 1)}}), 0);
  ASSERT_EQ(run.decode({{0, words(6, 2)}}), 0);
  EXPECT_EQ(run.evictor->least_length(0), 90);
  EXPECT_FALSE(run.evictor->go_back(0, 89)) << "what was cut is gone";
  ASSERT_TRUE(run.evictor->go_back(0, 90));
  for (const Engine* each : {&run, &fresh}) ASSERT_EQ(each->decode({{0, words(30, 3)}}), 0);
  expect_alike(logits_of(run, model.get()), logits_of(fresh, model.get()));
  EXPECT_EQ(run.evictor->spent().cut, 2);
}

TEST_P(LlamaEvictor, StatesDoNotGoBackAndNothingHasChanged) {
  if (!exact()) return;
  const Model model = of_kind("states");
  const Setting setting{.cells = 512, .type = GGML_TYPE_F32};
  for (const std::string& policy : {kMixedPolicies[0], kMixedPolicies[2]}) {
    const Engine run(policy, setting, model.get()), fresh(policy, setting, model.get());
    for (const Engine* each : {&run, &fresh}) {
      ASSERT_EQ(each->decode({{0, words(90, 1)}}), 0);
      ASSERT_EQ(each->decode({{0, words(6, 2)}}), 0);
    }
    const auto before = std::ssize(run.evictor->cells(0));
    EXPECT_FALSE(run.evictor->go_back(0, 95));
    EXPECT_FALSE(run.evictor->go_back(0, 91));
    EXPECT_TRUE(run.evictor->go_back(0, 96)) << "to where it is";
    EXPECT_EQ(run.evictor->next_position(0), 96);
    EXPECT_EQ(std::ssize(run.evictor->cells(0)), before);
    for (const Engine* each : {&run, &fresh}) ASSERT_EQ(each->decode({{0, words(30, 3)}}), 0);
    expect_alike(logits_of(run, model.get()), logits_of(fresh, model.get()));
    for (const std::int32_t l : run.evictor->keeper().spec().full_layers())
      EXPECT_EQ(run.positions(0, l, 1), fresh.positions(0, l, 1));
  }
}

}  // namespace
}  // namespace kvkeep::llama
