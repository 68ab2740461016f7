// SPDX-License-Identifier: Apache-2.0
// An engine with the least of kvkeep: it evicts from dense caches and from pages, under any policy by its text, and
// what is left out is refused by name.

#include <kvkeep/c.h>
#include <kvkeep/kvkeep.h>
#include <kvkeep/recipes.h>

#include <cstdio>
#include <string>

namespace {

constexpr std::int32_t kPrompt = 40, kBudget = 16, kHeads = 2, kDim = 8, kPage = 4;

kvkeep::ModelSpec model() {
  kvkeep::ModelSpec spec;
  spec.query_heads = spec.kv_heads = kHeads;
  spec.key_dim = spec.value_dim = kDim;
  spec.layers.resize(1);
  return spec;
}

kvkeep::Tensor numbers(kvkeep::Shape shape) {
  const kvkeep::Tensor made = kvkeep::empty(shape, kvkeep::Dtype::f32);
  for (std::int64_t i = 0; i < made.numel(); ++i) made.data<float>()[i] = static_cast<float>((i * 7919) % 101) / 101;
  return made;
}

/// The length of a prompt after its event.
std::int32_t cut(const std::string& policy, bool paged) {
  kvkeep::Keeper keeper(model(), kvkeep::make_policy(policy + ",prefill=cut,budget=" + std::to_string(kBudget)));
  if (paged)
    keeper.bind({kvkeep::PagedKv{numbers({10, kPage, kHeads, kDim}), numbers({10, kPage, kHeads, kDim})}});
  else
    keeper.bind({kvkeep::DenseKv{numbers({1, kHeads, kPrompt, kDim}), numbers({1, kHeads, kPrompt, kDim})}});
  const kvkeep::SequenceId id = 1;
  std::int32_t length = kPrompt;
  kvkeep::CacheView view{.sequences = {&id, 1}, .lengths = {.data = {&length, 1}}};
  if (paged) {
    view.block_table = kvkeep::empty({1, 10}, kvkeep::Dtype::i32);
    for (std::int32_t p = 0; p < 10; ++p) view.block_table.data<std::int32_t>()[p] = p;
  }
  keeper.join(id);
  const std::int32_t indptr[] = {0, kPrompt};
  keeper.observe({.layer = 0,
                  .sequences = view.sequences,
                  .indptr = indptr,
                  .queries = numbers({kPrompt, kHeads, kDim}),
                  .basis = kvkeep::QueryBasis::post_rope});
  keeper.step(view);
  return length;
}

/// True if the policy is refused in a sentence that has both words.
bool refused(const char* policy, const char* name, const char* option) {
  try {
    static_cast<void>(kvkeep::make_policy(policy));
  } catch (const kvkeep::Unsupported& error) {
    const std::string what = error.what();
    return what.find(name) != std::string::npos && what.find(option) != std::string::npos;
  }
  return false;
}

int failures = 0;
void expect(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("minimal: %s\n", what.c_str());
  ++failures;
}

}  // namespace

int main() {
  for (const char* policy : {"streaming", "tova", "snapkv,window=4", "h2o", "knorm", "keydiff", "ams-tova",
                             "ams-snapkv,scorer.window=4", "chunkkv-tova"})
    for (const bool paged : {false, true}) expect(cut(policy, paged) == kBudget, std::string("not cut: ") + policy);
  for (const kvkeep::PolicyInfo& info : kvkeep::policies())
    if (!info.scorer.empty() && info.allocator != "threshold")  // which has no default
      static_cast<void>(kvkeep::make_policy(info.name + ",budget=256"));
  expect(kvkeep::policies().size() > 80, "few policies");
  expect(kvkeep::recipes::ams_tova(64)->to_json() == kvkeep::make_policy("ams-tova,budget=64")->to_json(),
         "a recipe is another policy");
  expect(refused("sekv,budget=64", "sekv", "KVKEEP_FOLDING=ON"), "sekv is not refused");
  expect(refused("tova,budget=64,rest=fold", "rest=fold", "KVKEEP_FOLDING=ON"), "rest=fold is not refused");
  expect(refused("ams-triattention,budget=64", "ams-triattention", "KVKEEP_FILES=ON"), "triattention is not refused");
  expect(kvkeep_save(nullptr, 1, "file") == KVKEEP_UNSUPPORTED &&
             std::string(kvkeep_last_error()).find("KVKEEP_FILES=ON") != std::string::npos,
         "C's save is not refused");
  return failures == 0 ? 0 : 1;
}
