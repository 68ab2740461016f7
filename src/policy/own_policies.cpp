// SPDX-License-Identifier: Apache-2.0
// The library's own scorers, allocators and policies, in the order in which they are listed.

#include <utility>

#include "known_policies.h"
#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/chunks.h"
#include "kvkeep/allot/critical.h"
#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/allot/pyramid.h"
#include "kvkeep/allot/threshold.h"
#include "kvkeep/policy/asl.h"
#include "kvkeep/policy/gemfilter.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/policy/pyramidinfer.h"
#include "kvkeep/score/cur.h"
#include "kvkeep/score/defensive.h"
#include "kvkeep/score/expected.h"
#include "kvkeep/score/given.h"
#include "kvkeep/score/h2o.h"
#include "kvkeep/score/keydiff.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/recency.h"
#include "kvkeep/score/rkv.h"
#include "kvkeep/score/rpc.h"
#include "kvkeep/score/snapkv.h"
#include "kvkeep/score/tova.h"
#include "kvkeep/score/triattention.h"
#include "kvkeep/score/vase.h"
#if KVKEEP_FOLDING
#include "kvkeep/policy/sekv.h"
#endif

namespace kvkeep {
namespace {

/// RPC as published keeps the prompt without counting it, protects only prompt and window, and adds 256 slots per
/// further 1024 tokens.
void rpc_defaults(const Fields& f, Retention& r) {
  if (!f.says("scorer", "style", "official")) return;
  r.sink = 0;
  r.recent = 0;
  r.protect_prompt = true;
  r.trigger.kind = Trigger::Kind::counter;
  r.trigger.interval = 1024;
  r.trigger.budget.growth = 256;
  r.trigger.budget.decoded_only = true;
}

void random_attention_defaults(const Fields&, Retention& r) {
  r.sink = 0;
  r.recent = r.trigger.interval = 64;
  r.protect_prompt = true;
}

PolicyEntry full() {
  return {.name = "full",
          .what = "keeps everything",
          .source = "the engine without kvkeep",
          .describe = [](Fields&) -> MakePolicy {
            return [](std::string, std::unique_ptr<KVPolicy>) { return std::make_unique<Full>(); };
          }};
}

#if KVKEEP_FOLDING
PolicyEntry sekv() {
  return {.name = "sekv",
          .what =
              "spans of low surprisal fold into one coarse entry and low-rank factors, and open again when a query "
              "asks for them",
          .source = "SeKV (AmirAbaskohi/SeKV)",
          .needs = "queries and values, surprisal of every token",
          .describe = [](Fields& f) -> MakePolicy {
            SekvOptions o;
            o.describe(f);
            return
                [o](std::string json, std::unique_ptr<KVPolicy>) { return std::make_unique<Sekv>(o, std::move(json)); };
          }};
}
#endif

/// A policy that narrows prompts. `describe`: as PolicyEntry.
PolicyEntry narrowing(const char* name, const char* what, const char* source,
                      std::function<MakePolicy(Fields&)> describe) {
  return {name, what, source, "prompts layer by layer, with queries", true, std::move(describe)};
}

/// asl and its relatives, which differ in `o`.
PolicyEntry selecting(const char* name, const char* what, const char* source, const AslOptions& o) {
  return narrowing(name, what, source, [name, o](Fields& f) -> MakePolicy {
    AslOptions read = o;
    read.describe(f, name);
    return [name, read](std::string json, std::unique_ptr<KVPolicy> decoding) {
      return std::make_unique<Asl>(name, read, std::move(decoding), std::move(json));
    };
  });
}

/// A policy whose constructor takes options, the policy that decides after the prompt, and JSON.
template <class P, class O>
MakePolicy read_narrowing(Fields& f) {
  O o;
  o.describe(f);
  return [o](std::string json, std::unique_ptr<KVPolicy> decoding) {
    return std::make_unique<P>(o, std::move(decoding), std::move(json));
  };
}

}  // namespace

KnownPolicies::KnownPolicies() {
  add(full());

  add(scorer_entry<Recency>());
  add(scorer_entry<Tova>());
  add(scorer_entry<KeyDiff>());
  add(scorer_entry<Knorm>());
  add(scorer_entry<Rkv>());
  add(scorer_entry<RandomScorer>());
  add(scorer_entry<RandomAttention>(RandomAttention::traits, random_attention_defaults));
#if KVKEEP_FILES
  add(scorer_entry<TriAttention>());
#endif
  add(scorer_entry<SnapKV>());
  add(scorer_entry<Rpc>(Rpc::traits, rpc_defaults));
  add(scorer_entry<H2O>());
  add(scorer_entry<Expected>());
  add(scorer_entry<Cur>());
  add(scorer_entry<Defensive>());
  add(scorer_entry<Vase>());
  add(scorer_entry<Given>());

  add(allocator_entry<MassSegmented>());
  add(allocator_entry<Pyramid>());
  add(allocator_entry<AdaptiveHeads>());
  add(allocator_entry<Chunks>());
  add(allocator_entry<Critical>());
  add(allocator_entry<Threshold>());

  AslOptions two_pass, fixed;
  two_pass.two_pass = true;
  fixed.selector.fixed_layer = 0;
  constexpr const char* kAslSource = "ASL: Adaptive Selection Layer (TANIGUCHIREI/ASL)";
  add(selecting("asl", "the best tokens continue from the layer where the ranking of a prompt settles", kAslSource,
                {}));
  add(selecting("asl-2pass", "the tokens that asl selects run again as a short prompt of their own", kAslSource,
                two_pass));
  add(selecting("fastkv", "the best tokens continue from a given layer",
                "Jo et al., FastKV: KV Cache Compression for Fast Long-Context Processing with Token-Selective "
                "Propagation",
                fixed));
  add(narrowing("gemfilter", "the tokens that the last query of an early layer chooses run again as a short prompt",
                "Shi et al., Discovering the Gems in Early Layers (GemFilter)",
                read_narrowing<GemFilter, GemFilterOptions>));
  add(narrowing("pyramidinfer", "fewer tokens of a prompt continue from layer to layer",
                "Yang et al., PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference",
                read_narrowing<PyramidInfer, ShrinkingContextOptions>));
#if KVKEEP_FOLDING
  add(sekv());
#endif
  complete_ = true;
}

}  // namespace kvkeep
