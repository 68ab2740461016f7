// SPDX-License-Identifier: Apache-2.0
// kvkeep-llama check: what a GPU keeps and gives, against the CPU.

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <random>

#include "measure.h"

namespace {

/// Two engines that were fed the same tokens.
struct Compared {
  std::int64_t slots = 0, apart = 0;     ///< that both should hold; that one of the two holds
  std::int64_t tokens = 0, another = 0;  ///< decoded; after which the likeliest next token is another

  void slots_of(const kvkeep::Keeper& a, const kvkeep::Keeper& b) {
    for (const std::int32_t l : a.spec().full_layers())
      for (std::int32_t h = 0; h < a.spec().kv_heads; ++h) {
        const auto held = a.positions(0, l, h), other = b.positions(0, l, h);
        std::vector<std::int32_t> only;
        std::ranges::set_difference(held, other, std::back_inserter(only));
        slots += std::ssize(held);
        apart += std::ssize(only);
      }
  }
};

}  // namespace

bool check(const Options& o) {
  constexpr std::int64_t kOneIn = 20;  // slots that roundings may decide otherwise, and what follows from them
  const Model model = load(o);
  const auto known = static_cast<unsigned>(llama_vocab_n_tokens(llama_model_get_vocab(model.get())));
  std::mt19937 random(o.seed);
  std::vector<llama_token> prompt(static_cast<std::size_t>(o.prompt_tokens));
  for (llama_token& id : prompt) id = static_cast<llama_token>(random() % known);
  const int cells = o.context > 0 ? o.context : o.prompt_tokens + o.tokens;
  Options on_host = o;
  on_host.device = "cpu";
  bool good = true;
  std::printf("%-48s %8s %12s %10s %8s %10s\n", "policy", "events", "slots", "apart", "tokens", "another");
  for (const std::string& policy : o.policies) {
    Engine there(model.get(), o, policy, cells), here(model.get(), on_host, policy, cells, false);
    if (there.evictor() == nullptr) fail("check: " + policy + " has no evictor; allowed policies");
    Compared all;
    std::int64_t events = 0;
    there.feed(prompt);
    here.feed(prompt);
    for (int i = 0; i < o.tokens && interrupted == 0; ++i) {
      llama_token id = here.sample();
      all.another += there.sample() == id ? 0 : 1;
      ++all.tokens;
      there.decode(&id, 1);
      here.decode(&id, 1);
      if (here.evictor()->spent().cut == std::exchange(events, here.evictor()->spent().cut)) continue;
      all.slots_of(here.evictor()->keeper(), there.evictor()->keeper());
    }
    const bool alike = here.evictor()->spent().cut == there.evictor()->spent().cut && events > 0 &&
                       all.apart * kOneIn <= all.slots && (!policy.starts_with("streaming") || all.apart == 0);
    std::printf("%-48s %8lld %12lld %10lld %8lld %10lld%s\n", policy.c_str(), static_cast<long long>(events),
                static_cast<long long>(all.slots), static_cast<long long>(all.apart),
                static_cast<long long>(all.tokens), static_cast<long long>(all.another),
                alike ? "" : "  DIFFERS by more than roundings");
    std::fflush(stdout);
    good = good && alike;
  }
  return good;
}
