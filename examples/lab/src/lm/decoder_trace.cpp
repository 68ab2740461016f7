// SPDX-License-Identifier: Apache-2.0
#include "kvlab/decoder_trace.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <string>
#include <vector>

#include "i32_tensor.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvkeep/version.h"
#include "kvlab/decoder.h"
#include "kvlab/generation.h"

namespace kvkeep::lm {
namespace {

using trace::Result;

constexpr std::int32_t kMostTokens =
    1 << 24;  ///< as many as the command may predict; the cache has room for them from the start

std::int32_t number(const io::SafetensorsFile& file, const std::string& key, std::int32_t least) {
  const auto found = file.metadata().find(key);
  KVKEEP_REQUIRE(found != file.metadata().end(), file.where(), ": metadata \"", key,
                 "\" is missing; a trace of kind \"", trace::kind_of(file), "\" needs it");
  const std::string& written = found->second;
  std::int32_t value = 0;
  const auto [end, error] = std::from_chars(written.data(), written.data() + written.size(), value);
  KVKEEP_REQUIRE(
      error == std::errc() && end == written.data() + written.size() && value >= least && value <= kMostTokens,
      file.where(), ": metadata \"", key, "\" is \"", shortened(written), "\"; allowed an integer from ", least, " to ",
      kMostTokens);
  return value;
}

std::vector<std::int32_t> ids(const io::SafetensorsFile& file, const char* name) {
  const kvkeep::Tensor stored = file.tensor(name);
  KVKEEP_REQUIRE(stored.dim() == 1 && (stored.dtype() == Dtype::i32 || stored.dtype() == Dtype::i64), file.where(),
                 ": tensor \"", name, "\" is ", stored.dtype(), " with ", stored.dim(),
                 " dimensions; allowed i32 or i64 [n]");
  KVKEEP_REQUIRE(stored.numel() >= 1, file.where(), ": tensor \"", name, "\" is empty; allowed one token or more");
  std::vector<std::int32_t> values(static_cast<std::size_t>(stored.numel()));
  const kvkeep::Tensor wide = as<std::int64_t>(stored);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t id = wide.data<std::int64_t>()[i];
    KVKEEP_REQUIRE(id >= 0 && id <= INT32_MAX, file.where(), ": tensor \"", name, "\" holds ", id, " at place ", i,
                   "; allowed token ids of the model's vocabulary");
    values[i] = static_cast<std::int32_t>(id);
  }
  return values;
}

Decoder open_model(const io::SafetensorsFile& file, const std::filesystem::path& folder) {
  const auto model = file.metadata().find("model"), dtype = file.metadata().find("compute_dtype");
  KVKEEP_REQUIRE(model != file.metadata().end(), file.where(),
                 ": metadata \"model\" is missing; allowed a checkpoint's folder, relative to the trace");
  KVKEEP_REQUIRE_AS(Unsupported, dtype == file.metadata().end() || dtype->second == "f32", file.where(),
                    ": metadata \"compute_dtype\" is \"",
                    dtype == file.metadata().end() ? "" : shortened(dtype->second), "\"; allowed f32");
  return Decoder::open(folder / model->second);
}

std::map<std::string, std::string> about(const KVPolicy& policy) {
  return {{"kvkeep_result", "1"}, {"policy", policy.to_json()}, {"kvkeep_version", kVersion}};
}

/// Decodes greedily from the last logits on, up to and with an end token. `cache` holds `n` slots.
std::vector<std::int32_t> continue_greedily(Decoder& decoder, std::span<const LayerCache> cache, Tensor last,
                                            std::int32_t n, std::int32_t new_tokens) {
  std::vector<std::int32_t> greedy;
  while (static_cast<std::int32_t>(greedy.size()) < new_tokens) {
    const std::vector<std::int32_t> token = argmax(last);
    greedy.push_back(token[0]);
    if (decoder.config().ends(token[0]) || static_cast<std::int32_t>(greedy.size()) == new_tokens) break;
    const std::vector<std::int32_t> one{0, 1}, row{0}, at{n + static_cast<std::int32_t>(greedy.size()) - 1};
    last = decoder.forward({token, one, at, row, at}, cache);
  }
  return greedy;
}

}  // namespace

Result replay_decoder(const io::SafetensorsFile& file, const std::filesystem::path& folder, const KVPolicy& policy) {
  KVKEEP_REQUIRE(policy.name() == "full", file.where(),
                 ": a trace of kind \"decoder\" runs without eviction; given policy ", policy.name(), "; allowed full");
  const std::vector<std::int32_t> prompt = ids(file, "input_ids");
  const auto n = static_cast<std::int32_t>(prompt.size());
  const std::int32_t new_tokens = number(file, "new_tokens", 0);
  const std::int32_t tail = file.metadata().contains("query_tail") ? std::min(number(file, "query_tail", 0), n) : n;
  Decoder decoder = open_model(file, folder);

  const std::vector<LayerCache> cache = decoder.make_cache(1, std::int64_t{n} + new_tokens);
  std::vector<std::int32_t> positions(prompt.size());
  std::iota(positions.begin(), positions.end(), 0);
  Result result;
  StepOptions options{.logits = Logits::all};
  Tensor queries;
  options.on_layer = [&](const LayerSight& sight) {
    if (sight.layer == 0) queries = sight.queries.narrow(0, n - tail, tail).permute({1, 0, 2}).contiguous();
  };
  const std::vector<std::int32_t> whole{0, n}, row{0}, none{0};
  const Tensor logits = decoder.forward({prompt, whole, positions, row, none}, cache, options);
  result.tensors.emplace_back("logits", logits);
  for (std::size_t l = 0; l < cache.size(); ++l) {
    result.tensors.emplace_back(text("layer.", l, ".keys"), contiguous(cache[l].keys.select(0, 0).narrow(1, 0, n)));
    result.tensors.emplace_back(text("layer.", l, ".values"), contiguous(cache[l].values.select(0, 0).narrow(1, 0, n)));
  }
  result.tensors.emplace_back("queries", queries);
  const std::vector<std::int32_t> greedy = continue_greedily(decoder, cache, logits.narrow(0, n - 1, 1), n, new_tokens);
  result.tensors.emplace_back("greedy", i32_tensor(greedy, {static_cast<std::int64_t>(greedy.size())}));
  result.metadata = about(policy);
  result.metadata["tokens"] = std::to_string(greedy.size());
  return result;
}

Result replay_generate(const io::SafetensorsFile& file, const std::filesystem::path& folder,
                       std::unique_ptr<KVPolicy> policy) {
  KVKEEP_REQUIRE(policy != nullptr, "replay: policy must not be null; allowed one from make_policy()");
  Request request{.prompt = ids(file, "prompt"),
                  .new_tokens = number(file, "new_tokens", 1),
                  .keep_logits = true,
                  .keep_positions = true};
  Decoder decoder = open_model(file, folder);
  Result result;
  result.metadata = about(*policy);
  GenerationRun run = generate(decoder, std::move(policy), {std::move(request)});
  const Completion& done = run.completions.front();

  const auto tokens = static_cast<std::int64_t>(done.tokens.size()),
             events = static_cast<std::int64_t>(done.events.size());
  result.tensors.emplace_back("tokens", i32_tensor(done.tokens, {tokens}));
  result.tensors.emplace_back("logits", done.logits);
  std::vector<std::int32_t> flat;
  for (const SequenceEvent& event : done.events)
    flat.insert(flat.end(), {event.step, event.length_before, event.length_after});
  result.tensors.emplace_back("events", i32_tensor(flat, {events, 3}));
  for (std::size_t i = 0; i < done.events.size(); ++i) {
    std::vector<std::int32_t> kept;
    std::size_t width = 0;
    for (const auto& row : done.events[i].positions) width = std::max(width, row.size());
    for (const auto& row : done.events[i].positions) {
      kept.insert(kept.end(), row.begin(), row.end());
      kept.insert(kept.end(), width - row.size(), -1);
    }
    const std::int64_t heads = decoder.spec().kv_heads;
    result.tensors.emplace_back(text("event.", i, ".positions"),
                                i32_tensor(kept, {static_cast<std::int64_t>(done.events[i].positions.size()) / heads,
                                                  heads, static_cast<std::int64_t>(width)}));
  }
  result.metadata["tokens"] = std::to_string(tokens);
  result.metadata["events"] = std::to_string(events);
  result.metadata["slots_chosen"] = std::to_string(run.totals.slots_chosen);
  result.metadata["slots_dropped"] = std::to_string(run.totals.slots_dropped);
  return result;
}

}  // namespace kvkeep::lm
