// SPDX-License-Identifier: Apache-2.0
// Span traces: edges of what may be in one, and what does not fit refused with the name of tensor or option.

#include "kvlab/span_trace.h"
#include "kvkeep/torch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "folded_prompt.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/policy/sekv.h"
#include "replayed_trace.h"

namespace kvkeep::span_trace_test {
namespace {

using namespace testing;

/// A span trace in memory, to be changed at will.
struct Trace : testing::ReplayedTrace {
  explicit Trace(const FoldedPrompt& p)
      : ReplayedTrace{trace::replay_span, {}, {{"kvkeep_trace", "1"}, {"kind", "span"}}} {
    tensors["keys"] = p.keys, tensors["values"] = p.values, tensors["queries"] = p.queries;
    at::Tensor h = at::zeros({static_cast<std::int64_t>(p.surprisal.size())});
    std::ranges::copy(p.surprisal, h.data_ptr<float>());
    tensors["surprisal"] = h;
  }
};

const Tensor& in(const trace::Result& result, const std::string& name) {
  const auto found = std::ranges::find_if(result.tensors, [&](const auto& t) { return t.first == name; });
  KVKEEP_REQUIRE(found != result.tensors.end(), "no tensor ", name);
  return found->second;
}

TEST(SpanTrace, OfAnEmptyPromptHasAnEmptyMemory) {
  Trace trace(FoldedPrompt(90, 0, 2, 4, 16, 2));
  const trace::Result result = trace.replay("sekv,zoom=mass");
  EXPECT_EQ(in(result, "anchors").numel(), 0);
  EXPECT_EQ(in(result, "span_keys").sizes(), Shape({2, 0, 16}));
  EXPECT_EQ(apart(in(result, "output"), at::zeros({2, 4, 16})), 0);
  EXPECT_EQ(in(result, "bytes").data<std::int64_t>()[0], 0);
}

TEST(SpanTrace, SaysNearAndFarBytesAndWhetherTheBudgetIsExceeded) {
  Trace trace(FoldedPrompt(91, 200, 2, 4, 16, 2));
  const trace::Result loose = trace.replay("sekv,recent=20,zoom=mass"),
                      tight = trace.replay("sekv,recent=20,zoom=mass,budget=29,max_span=4");
  EXPECT_EQ(loose.metadata.at("over_budget"), "false");
  EXPECT_EQ(tight.metadata.at("over_budget"), "true");
  EXPECT_EQ(torch_tensor(in(tight, "zoomed")).sum().item<std::int64_t>(), 0) << "nothing opens";
  EXPECT_LT(in(tight, "anchors").numel(), in(loose, "anchors").numel());
  EXPECT_EQ(loose.metadata.at("bytes"), text("[", in(loose, "bytes").data<std::int64_t>()[0], ", ",
                                             in(loose, "bytes").data<std::int64_t>()[1], "]"));
}

TEST(SpanTrace, IsCutAsThePaperDoesUnlessThePolicyStatesIt) {
  Trace trace(FoldedPrompt(91, 200, 2, 4, 16, 2));
  const auto anchors = [&trace](const std::string& more) {
    return torch_tensor(in(trace.replay("sekv,recent=20,zoom=mass" + more), "anchors")).clone();
  };
  EXPECT_TRUE(anchors("").equal(anchors(",alpha=1")));
  EXPECT_LT(anchors(",alpha=3").numel(), anchors("").numel());
}

TEST(SpanTrace, StoresHalfTheBytesInSixteenBits) {
  Trace trace(FoldedPrompt(92, 300, 2, 4, 16, 2));
  const trace::Result wide = trace.replay("sekv,recent=20,zoom=coverage,memory.coverage=1,coverage_floor=0"),
                      half = trace.replay("sekv,recent=20,zoom=coverage,memory.coverage=1,coverage_floor=0,store=bf16");
  EXPECT_EQ(in(wide, "bytes").data<std::int64_t>()[1], 2 * in(half, "bytes").data<std::int64_t>()[1]);
  EXPECT_LT(apart(in(wide, "output"), in(half, "output")), 2e-2);
  EXPECT_GT(apart(in(wide, "output"), in(half, "output")), 0);
  EXPECT_LT(apart(in(wide, "output"), in(wide, "output_full")), 0.15)
      << "everything is zoomed, a hundredth of the squares is left out";
}

TEST(SpanTrace, GivesHeadsOfAGroupWithEqualQueriesEqualAnswers) {  // S-14
  FoldedPrompt p(93, 200, 2, 4, 16, 1);
  p.queries.select(1, 1).copy_(p.queries.select(1, 0));
  const trace::Result result = Trace(p).replay("sekv,recent=20,zoom=mass");
  EXPECT_EQ(apart(in(result, "output").select(1, 0), in(result, "output").select(1, 1)), 0);
}

TEST(SpanTrace, RefusesWhatIsMissingOrDoesNotFit) {
  const Trace whole(FoldedPrompt(94, 60, 2, 4, 16, 2));
  whole.expect_refused("sekv", "router.W");
  whole.expect_refused("sekv,zoom=mass,rank=gates", "gate.0.weight");
  whole.expect_refused("tova,budget=32", "allowed sekv");
  for (const char* name : {"keys", "values", "queries", "surprisal"}) {
    Trace trace = whole;
    trace.tensors.erase(name);
    trace.expect_refused("sekv,zoom=mass", text("\"", name, "\" is missing"));
  }
  const auto changed = [&](const char* name, const at::Tensor& tensor, const std::string& words) {
    Trace trace = whole;
    trace.tensors[name] = tensor;
    trace.expect_refused("sekv", words);
  };
  changed("values", at::zeros({2, 59, 16}), "the shape of keys");
  changed("queries", at::zeros({2, 3, 16}), "a multiple of 2");
  changed("surprisal", at::zeros({61}), "one per key");
  Trace routed = whole;
  routed.tensors["router.W"] = at::zeros({4, 8, 15}), routed.tensors["router.tau"] = at::zeros({4});
  routed.expect_refused("sekv", "router.W");
  at::Tensor wild = at::zeros({2, 60, 16});
  wild.data_ptr<float>()[5] = HUGE_VALF;
  changed("keys", wild, "NaN or infinity");
  Trace trace = whole;
  trace.metadata["kind"] = "event";
  trace.expect_refused("sekv", "kind \"event\"");
}

TEST(Sekv, HasThePublishedDefaultsUnderOfficial) {
  const auto policy = make_policy("sekv,variant=official");
  const SekvOptions& o = dynamic_cast<const Sekv&>(*policy).options();
  EXPECT_EQ(o.segmenter.sink + o.segmenter.recent + o.segmenter.max_span, 0);
  EXPECT_EQ(o.memory.factors.rank, FactorOptions::Rank::gates);
  EXPECT_EQ(o.memory.factors.centred, FactorOptions::Centred::never);
  EXPECT_TRUE(o.memory.factors.soft_gates && !o.memory.factors.raw);
  EXPECT_EQ(make_policy_from_json(policy->to_json())->to_json(), policy->to_json());
  EXPECT_THROW(static_cast<void>(make_policy("sekv,variant=official,zoom_heads=group")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(make_policy("sekv,rank=some")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(make_policy("sekv,window=512")), InvalidArgument);
  const SegmenterOptions cut =
      dynamic_cast<const Sekv&>(*make_policy("sekv,budget=100,zoom_share=0.25")).segmenter(1000, 4, 128, true);
  EXPECT_DOUBLE_EQ(cut.most_entries, 75);
  EXPECT_DOUBLE_EQ(cut.entries_per_span, 1 + 4 / 256.0);
}

}  // namespace
}  // namespace kvkeep::span_trace_test
