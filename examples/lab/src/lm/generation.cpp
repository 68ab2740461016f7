// SPDX-License-Identifier: Apache-2.0
#include "kvlab/generation.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "kvkeep/core/error.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/parts/surprisal.h"

namespace kvkeep::lm {
namespace {

bool cuts_every_layer(const ModelSpec& spec) {
  return static_cast<std::int32_t>(spec.full_layers().size()) == spec.num_layers();
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The token that is fed after those that were predicted.
std::int32_t fed_next(const Request& request, std::span<const std::int32_t> predicted) {
  return predicted.size() <= request.forced.size() ? request.forced[predicted.size() - 1] : predicted.back();
}

}  // namespace

std::int64_t slots_needed(const ModelSpec& spec, const Trigger& trigger, const Request& request) {
  const auto prompt = static_cast<std::int64_t>(request.prompt.size());
  const std::int64_t all = prompt + request.new_tokens - 1;
  if (request.forced_at_once && !request.forced.empty()) return all;
  const bool bounded = trigger.kind == Trigger::Kind::slack && trigger.budget.unit == Budget::Unit::slots &&
                       trigger.prefill != Trigger::Prefill::only && !trigger.ragged;
  if (!cuts_every_layer(spec) || trigger.never || !bounded) return all;  // sliding layers are never cut
  return std::min(all,
                  std::max(prompt + 1, trigger.budget.resolve({all}, {prompt}, 0) + std::int64_t{trigger.interval}));
}

// The tokens of one step. Sequences that decode come before those that prefill.
struct Generator::Batch {
  std::vector<SequenceId> ids;
  std::vector<std::int32_t> tokens, indptr{0}, positions, places;
  std::vector<std::int32_t> lengths;  ///< [sequences * layers * Hkv] before the step
  std::vector<std::int32_t> after;    ///< the same after it, less what a prompt lost on its way
  std::vector<char> left;  ///< [sequences] 1: its prompt starts over in the next step, and it has no logits in this one
  std::vector<std::int32_t> steps;  ///< [sequences]
  Tensor block_table;               ///< if the cache is in pages; `places` are then its rows
  std::size_t decoding = 0;
  std::vector<PromptSurprisal> surprisal;  ///< of the prompts, if the policy reads it
  std::vector<std::vector<float>>
      passed;  ///< [decoding] surprisal of the tokens that a sequence feeds after its first, if the policy reads it

  [[nodiscard]] std::int32_t tokens_of(std::size_t i) const { return indptr[i + 1] - indptr[i]; }
};

Generator::Generator(Decoder& decoder, std::unique_ptr<KVPolicy> policy, GeneratorOptions options)
    : decoder_(decoder),
      options_(std::move(options)),
      keeper_(decoder.spec(), std::move(policy),
              {.layer_by_layer = true,
               .output_projections = decoder.output_projections(),
               .surprisal = true,
               .reads_folded = true,
               .accelerator = options_.accelerator}) {
  KVKEEP_REQUIRE(keeper_.device() == decoder.device(), "generate: the decoder is on ", decoder.device().str(),
                 " and the keeper works on ", keeper_.device().str(),
                 "; allowed one device, named by GeneratorOptions::accelerator if it is not the CPU");
  if (!options_.cache.empty()) {
    KVKEEP_REQUIRE(options_.page_size == 0, "generate: given a cache and a page size of ", options_.page_size,
                   "; allowed a dense cache (page_size=0)");
    cache_ = std::move(options_.cache);
  } else if (options_.page_size == 0) {
    const std::vector<LayerCache> dense = decoder.make_cache(options_.places, options_.capacity, options_.cache_dtype);
    cache_.assign(dense.begin(), dense.end());
  } else {
    KVKEEP_REQUIRE_AS(Unsupported, cuts_every_layer(decoder.spec()) || keeper_.policy().trigger().never,
                      "generate: the model has sliding layers, and policy ", keeper_.policy().name(),
                      " moves whole pages; allowed a dense cache (page_size=0), or policy full");
    static_cast<void>(PagePool(0, options_.page_size));  // throws if the size is wrong
    const std::int64_t pages = options_.places * ((options_.capacity + options_.page_size - 1) / options_.page_size);
    cache_ = decoder.make_pages(pages, options_.page_size, options_.cache_dtype);
    pages_ = std::make_unique<Pages>(static_cast<std::int32_t>(pages), options_.page_size);
  }
  std::vector<LayerKv> bound = cache_;
  for (std::size_t l = 0; pages_ && l < bound.size(); ++l)  // pages of sliding layers are the decoder's alone
    if (decoder.spec().layers[l].kind == LayerKind::sliding) bound[l] = std::monostate{};
  keeper_.bind(std::move(bound));
  free_places_.resize(static_cast<std::size_t>(options_.places));
  std::iota(free_places_.rbegin(), free_places_.rend(), 0);
}

void Generator::check_ids(const std::vector<std::int32_t>& ids, const char* which) const {
  for (std::size_t i = 0; i < ids.size(); ++i)
    KVKEEP_REQUIRE(ids[i] >= 0 && ids[i] < decoder_.config().vocab, "generate: token id ", ids[i], " at place ", i,
                   " of the ", which, " is outside the vocabulary; allowed 0 to ", decoder_.config().vocab - 1);
}

void Generator::check(const Request& request) const {
  KVKEEP_REQUIRE(!request.prompt.empty(), "generate: the prompt is empty; allowed one token or more");
  KVKEEP_REQUIRE(request.new_tokens >= 1, "generate: new_tokens is ", request.new_tokens, "; allowed 1 or more");
  check_ids(request.prompt, "prompt");
  check_ids(request.forced, "forced tokens");
  check_sampling(request.sampling);
  const std::int64_t needed = slots_needed(keeper_.spec(), keeper_.policy().trigger(), request);
  KVKEEP_REQUIRE(needed <= options_.capacity, "generate: a prompt of ", request.prompt.size(), " with ",
                 request.new_tokens, " new tokens needs ", needed, " slots; the cache has room for ",
                 options_.capacity);
}

SequenceId Generator::join(Request request) {
  check(request);
  KVKEEP_REQUIRE_AS(StateError, has_place(), "generate: every place of the cache is taken; allowed ", options_.places,
                    " sequences at once");
  const SequenceId id = next_++;
  keeper_.join(id, 0, static_cast<std::int32_t>(request.prompt.size()));
  try {
    for (const PositionSpan& span : request.pinned) keeper_.part<parts::Pins>().pin(id, span.begin, span.end);
  } catch (...) {
    keeper_.leave(id);
    throw;
  }
  if (pages_) static_cast<void>(pages_->sequences.admit(id, 0));
  Sequence sequence{.request = std::move(request), .place = free_places_.back()};
  sequence.prompt = sequence.request.prompt;
  sequence.lengths.assign(static_cast<std::size_t>(keeper_.spec().num_layers() * keeper_.spec().kv_heads), 0);
  free_places_.pop_back();
  sequences_.emplace(id, std::move(sequence));
  return id;
}

void Generator::go_on(SequenceId id, std::vector<std::int32_t> tokens, std::int32_t new_tokens) {
  static_cast<void>(done(id));
  Sequence& sequence = sequences_.at(id);
  KVKEEP_REQUIRE_AS(StateError, !sequence.waits && !sequence.result.tokens.empty(), "generate: the prompt of sequence ",
                    id, " has not run; allowed once it has predicted a token");
  KVKEEP_REQUIRE(!tokens.empty(), "generate: there are no tokens to go on with; allowed one or more");
  KVKEEP_REQUIRE(new_tokens >= 1, "generate: new_tokens is ", new_tokens, "; allowed 1 or more");
  check_ids(tokens, "turn");
  KVKEEP_REQUIRE_AS(StateError, std::ssize(tokens) <= slots_left(id), "generate: ", tokens.size(),
                    " more tokens of sequence ", id, " need as many slots; the cache has room for ", slots_left(id));
  if (sequence.last.defined()) sequence.next_surprisal = token_surprisal(sequence.last, tokens.front());
  sequence.turn = std::move(tokens);
  sequence.request.new_tokens = static_cast<std::int32_t>(sequence.result.tokens.size()) + new_tokens;
  sequence.done = false;
}

std::int64_t Generator::slots_left(SequenceId sequence) const {
  static_cast<void>(done(sequence));
  return options_.capacity - std::ranges::max(sequences_.at(sequence).lengths);
}

bool Generator::done(SequenceId sequence) const {
  const auto found = sequences_.find(sequence);
  KVKEEP_REQUIRE_AS(StateError, found != sequences_.end(), "generate: sequence ", sequence,
                    " is not known; allowed after join() and before leave()");
  return found->second.done;
}

Completion Generator::leave(SequenceId id) {
  static_cast<void>(done(id));
  Sequence& sequence = sequences_.at(id);
  Completion result = std::move(sequence.result);
  result.end_bytes = bytes_held(id);
  if (result.events.empty()) result.kept_bytes = result.end_bytes;
  if (sequence.request.keep_positions) result.positions = positions(id);
  if (const PromptReport* report = prompt_report(id)) result.prompt = *report;
  if (const parts::Folds* folds = keeper_.find<parts::Folds>()) result.folded = folds->of(id);
  if (sequence.request.keep_logits)
    result.logits = sequence.logits.empty() ? at::empty({0, decoder_.config().vocab}, at::TensorOptions(at::kFloat))
                                            : at::cat(sequence.logits);
  free_places_.push_back(sequence.place);
  if (pages_) pages_->sequences.release(id);
  keeper_.leave(id);
  sequences_.erase(id);
  return result;
}

std::int32_t Generator::Sequence::feeds() const {
  if (!turn.empty()) return static_cast<std::int32_t>(turn.size());
  if (!request.forced_at_once || result.tokens.size() != 1) return 1;
  return std::clamp<std::int32_t>(static_cast<std::int32_t>(request.forced.size()), 1, request.new_tokens - 1);
}

void Generator::add(Batch& batch, SequenceId id) const {
  const Sequence& sequence = sequences_.at(id);
  const std::size_t predicted = sequence.result.tokens.size();
  const auto position = static_cast<std::int32_t>(keeper_.logical_length(id));
  batch.ids.push_back(id);
  batch.places.push_back(sequence.place);
  batch.steps.push_back(static_cast<std::int32_t>(predicted));
  batch.lengths.insert(batch.lengths.end(), sequence.lengths.begin(), sequence.lengths.end());
  if (predicted == 0)
    batch.tokens.insert(batch.tokens.end(), sequence.prompt.begin(), sequence.prompt.end());
  else if (!sequence.turn.empty())
    batch.tokens.insert(batch.tokens.end(), sequence.turn.begin(), sequence.turn.end());
  else if (const std::int32_t count = sequence.feeds(); count > 1)
    batch.tokens.insert(batch.tokens.end(), sequence.request.forced.begin(), sequence.request.forced.begin() + count);
  else
    batch.tokens.push_back(fed_next(sequence.request, sequence.result.tokens));
  batch.indptr.push_back(static_cast<std::int32_t>(batch.tokens.size()));
  const std::int32_t tokens = batch.tokens_of(batch.ids.size() - 1);
  for (std::int32_t i = 0; i < tokens; ++i) batch.positions.push_back(position + i);
  for (const std::int32_t length : sequence.lengths) batch.after.push_back(length + tokens);
  batch.left.push_back(0);
}

Generator::Batch Generator::gather() const {
  Batch batch;
  for (const auto& [id, sequence] : sequences_)
    if (!sequence.done && !sequence.result.tokens.empty()) add(batch, id);
  batch.decoding = batch.ids.size();
  batch.passed.resize(batch.decoding);
  for (const auto& [id, sequence] : sequences_)
    if (!sequence.done && !sequence.waits && sequence.result.tokens.empty()) add(batch, id);
  return batch;
}

PromptRun Generator::run_prompt(std::span<Generator* const> generators, const Request& request) {
  KVKEEP_REQUIRE(!generators.empty(), "run prompt: there are no generators; allowed one or more");
  Generator& first = *generators.front();
  bool surprisal = false;
  for (const Generator* g : generators) {
    KVKEEP_REQUIRE(&g->decoder_ == &first.decoder_ && g->options_.cache_dtype == first.options_.cache_dtype,
                   "run prompt: generators differ in decoder or cache dtype; allowed those that share both");
    KVKEEP_REQUIRE_AS(Unsupported, !g->keeper_.policy().narrows(), "run prompt: policy ", g->keeper_.policy().name(),
                      " narrows prompts, so it runs its own; allowed policies that do not");
    KVKEEP_REQUIRE_AS(Unsupported, !g->pages_, "run prompt: a cache is in pages; allowed dense caches");
    KVKEEP_REQUIRE_AS(StateError, g->has_place(), "generate: every place of the cache is taken; allowed ",
                      g->options_.places, " sequences at once");
    g->check(request);
    surprisal = surprisal || g->keeper_.policy().needs().surprisal;
  }
  PromptRun run;
  for (Generator* g : generators) {
    run.sequences.push_back(g->join(request));
    g->sequences_.at(run.sequences.back()).waits = true;
  }

  const auto start = std::chrono::steady_clock::now();
  Decoder& decoder = first.decoder_;
  const auto tokens = static_cast<std::int32_t>(request.prompt.size());
  const std::vector<LayerCache> dense = decoder.make_cache(1, tokens, first.options_.cache_dtype);
  std::vector<LayerKv> cache(dense.begin(), dense.end());
  Batch batch;
  first.add(batch, run.sequences.front());
  batch.places = {0};
  const Lengths lengths{batch.lengths, first.keeper_.spec().num_layers() * first.keeper_.spec().kv_heads};
  const Step step{batch.tokens, batch.indptr, batch.positions, batch.places,
                  SlotCounts(lengths, first.keeper_.spec().kv_heads)};
  StepOptions options;
  options.on_layer = [&](const LayerSight& sight) {
    for (std::size_t g = 0; g < generators.size(); ++g)
      generators[g]->keeper_.observe({.layer = sight.layer,
                                      .sequences = {&run.sequences[g], 1},
                                      .indptr = sight.indptr,
                                      .queries = sight.queries,
                                      .positions = sight.positions});
  };
  std::optional<PromptSurprisal> surprise;
  if (surprisal) {
    surprise.emplace(request.prompt);
    options.on_logits = [&](const LogitsSight& sight) { surprise->see(sight.logits.cpu()); };
  }
  run.logits = decoder.forward(step, cache, {}, options).cpu();
  if (surprise) run.surprisal.assign(surprise->values().begin(), surprise->values().end());
  run.cache = std::move(cache);
  run.seconds = seconds_since(start);
  return run;
}

void Generator::begin(SequenceId id, const PromptRun& prompt) {
  static_cast<void>(done(id));
  Sequence& sequence = sequences_.at(id);
  KVKEEP_REQUIRE_AS(StateError, sequence.waits, "generate: sequence ", id,
                    " does not wait for its prompt; allowed after run_prompt(), once");
  const auto start = std::chrono::steady_clock::now();
  const auto tokens = static_cast<std::int64_t>(sequence.prompt.size());
  for (std::size_t l = 0; l < cache_.size(); ++l) {
    const LayerSides from = sides_of(prompt.cache[l]), to = sides_of(cache_[l]);
    const auto put = [&](const kvkeep::Tensor& theirs, const kvkeep::Tensor& ours) {
      if (theirs.defined()) copy(theirs.select(0, 0), ours.select(0, sequence.place).narrow(1, 0, tokens));
    };
    put(from.keys, to.keys);
    put(from.values, to.values);
    put(from.key_scales, to.key_scales);
    put(from.value_scales, to.value_scales);
  }
  sequence.waits = false;
  Batch batch;
  add(batch, id);
  if (auto* known = keeper_.find<parts::Surprisal>()) known->supply(id, prompt.surprisal);
  predict(batch, prompt.logits);
  decide(batch);
  const double seconds = prompt.seconds + seconds_since(start);
  sequence.result.first_token_seconds += seconds;
  pace_.prefill_seconds += seconds;
  pace_.prompt_tokens += tokens;
}

bool Generator::step() {
  for (auto& [id, sequence] : sequences_)  // after go_on(); else there is room for what was asked for
    if (!sequence.result.tokens.empty() && slots_left(id) < sequence.feeds()) sequence.done = true;
  Batch batch = gather();
  if (batch.ids.empty()) return false;
  const auto start = std::chrono::steady_clock::now();
  const Tensor logits = run(batch).cpu();
  predict(batch, logits);
  decide(batch);
  const double seconds = seconds_since(start);
  const bool prefilled = batch.decoding < batch.ids.size();
  for (std::size_t i = batch.decoding; i < batch.ids.size(); ++i)
    sequences_.at(batch.ids[i]).result.first_token_seconds += seconds;
  (prefilled ? pace_.prefill_seconds : pace_.decode_seconds) += seconds;
  if (prefilled)
    pace_.prompt_tokens += static_cast<std::int64_t>(batch.tokens.size()) - batch.indptr[batch.decoding];
  else
    pace_.decoded_tokens += batch.indptr[batch.decoding];
  if (options_.hooks.on_step)
    options_.hooks.on_step(static_cast<std::int64_t>(batch.ids.size() - batch.decoding) + batch.indptr[batch.decoding]);
  return true;
}

Tensor Generator::run(Batch& batch) {
  if (pages_) {
    for (std::size_t i = 0; i < batch.ids.size();
         ++i)  // nothing is shared, and every place has its pages: none are missing, none are copied
      static_cast<void>(pages_->sequences.append(batch.ids[i], batch.tokens_of(i)));
    batch.block_table = pages_->sequences.table(batch.ids);
    std::iota(batch.places.begin(), batch.places.end(), 0);
  }
  const Lengths lengths{batch.lengths, keeper_.spec().num_layers() * keeper_.spec().kv_heads};
  const Step step{batch.tokens, batch.indptr, batch.positions, batch.places,
                  SlotCounts(lengths, keeper_.spec().kv_heads)};
  StepOptions options;
  options.on_layer = [&](const LayerSight& sight) {
    keeper_.observe({.layer = sight.layer,
                     .sequences = batch.ids,
                     .indptr = sight.indptr,
                     .queries = sight.queries,
                     .positions = sight.positions});
    if (options_.hooks.on_layer) options_.hooks.on_layer(sight);
  };
  if (keeper_.policy().narrows() && batch.decoding < batch.ids.size())
    options.on_attended = [&](const LayerSight& sight) { return narrow(batch, sight); };
  parts::Folds* const folds = keeper_.find<parts::Folds>();
  const auto rotated = [&batch](const LayerSight& sight) {
    return Observation{.layer = sight.layer,
                       .sequences = batch.ids,
                       .indptr = sight.indptr,
                       .queries = sight.queries,
                       .basis = QueryBasis::post_rope,
                       .positions = sight.positions};
  };
  if (folds != nullptr) options.before_attention = [&](const LayerSight& sight) { folds->prefetch(rotated(sight)); };
  if (folds != nullptr || options_.hooks.on_attention)
    options.view = [&](const LayerSight& sight, const Attended& attended) {
      if (folds != nullptr) static_cast<void>(folds->view(rotated(sight), attended));
      if (options_.hooks.on_attention) options_.hooks.on_attention({batch.ids, sight, attended});
    };
  const bool prompts = keeper_.policy().needs().surprisal && batch.decoding < batch.ids.size();
  if (prompts)
    for (std::size_t i = batch.decoding; i < batch.ids.size(); ++i)
      batch.surprisal.emplace_back(sequences_.at(batch.ids[i]).prompt);
  bool passes = false;  // several tokens at once whose predictions, or surprisal, are asked for
  for (std::size_t i = 0; i < batch.decoding; ++i)
    passes = passes || (batch.tokens_of(i) > 1 &&
                        (sequences_.at(batch.ids[i]).turn.empty() || keeper_.policy().needs().surprisal));
  if (prompts || passes)
    options.on_logits = [&](const LogitsSight& sight) {
      for (std::size_t i = 0; i < batch.ids.size(); ++i) {
        const std::int64_t first = std::max<std::int64_t>(batch.indptr[i], sight.first_token),
                           last = std::min<std::int64_t>(batch.indptr[i + 1], sight.first_token + sight.logits.size(0));
        if (first >= last) continue;
        if (i < batch.decoding)
          pass(batch, i, sight, first, std::min<std::int64_t>(last, batch.indptr[i + 1] - 1));
        else if (prompts)
          batch.surprisal[i - batch.decoding].see(
              sight.logits.narrow(0, first - sight.first_token, last - first).cpu());
      }
    };
  const Tensor logits = decoder_.forward(step, cache_, batch.block_table, options);
  if (keeper_.policy().needs().surprisal) tell_surprisal(batch);
  return logits;
}

// Takes the token that f32 [1, vocab] in host memory predicts.
std::int32_t Generator::write(SequenceId id, const Tensor& row) {
  Sequence& sequence = sequences_.at(id);
  const std::span<const float> logits{row.const_data_ptr<float>(), static_cast<std::size_t>(row.numel())};
  const Sampling& sampling = sequence.request.sampling;
  const std::int32_t next =
      sampling.greedy() ? argmax(row).front() : draw(logits, sampling, std::ssize(sequence.result.tokens));
  sequence.result.tokens.push_back(next);
  if (options_.hooks.on_logits) options_.hooks.on_logits(id, logits);
  if (options_.hooks.on_token) options_.hooks.on_token(id, next);
  if (sequence.request.keep_logits) sequence.logits.push_back(row.clone());
  return next;
}

// Takes in tokens [first, last) of the step, which are those of a decoding sequence without its last. Predictions
// within a turn of go_on() are nobody's.
void Generator::pass(Batch& batch, std::size_t i, const LogitsSight& sight, std::int64_t first, std::int64_t last) {
  for (std::int64_t t = first; t < last; ++t) {
    const Tensor row = sight.logits.narrow(0, t - sight.first_token, 1).cpu();
    if (sequences_.at(batch.ids[i]).turn.empty()) static_cast<void>(write(batch.ids[i], row));
    if (keeper_.policy().needs().surprisal)
      batch.passed[i].push_back(token_surprisal(row[0], batch.tokens[static_cast<std::size_t>(t) + 1]));
  }
}

void Generator::tell_surprisal(const Batch& batch) {
  for (std::size_t i = 0; i < batch.ids.size(); ++i)
    if (i < batch.decoding) {
      std::vector<float> surprisal{sequences_.at(batch.ids[i]).next_surprisal};
      surprisal.insert(surprisal.end(), batch.passed[i].begin(), batch.passed[i].end());
      keeper_.part<parts::Surprisal>().supply(batch.ids[i], surprisal);
    } else
      keeper_.part<parts::Surprisal>().supply(batch.ids[i], batch.surprisal[i - batch.decoding].values());
}

// One layer of the prompts in the step: the keeper decides and cuts, the decoder continues with what is left.
std::optional<Onward> Generator::narrow(Batch& batch, const LayerSight& sight) {
  const CacheView view = view_of(batch);
  const LayerReport report = keeper_.part<parts::Prompts>().narrow({.layer = sight.layer,
                                                                    .sequences = batch.ids,
                                                                    .indptr = sight.indptr,
                                                                    .queries = sight.queries,
                                                                    .basis = QueryBasis::post_rope,
                                                                    .positions = sight.positions},
                                                                   view);
  if (pages_) pages_->sequences.settle(view.sequences, report.pages);
  if (std::ranges::none_of(report.prompts, [](const Narrowing& prompt) { return prompt.tokens.has_value(); }))
    return std::nullopt;
  Onward onward{{}, {0}};
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    const std::int32_t first = sight.indptr[i], last = sight.indptr[i + 1];
    const auto found = std::ranges::find(report.prompts, batch.ids[i], &Narrowing::sequence);
    if (found == report.prompts.end() || !found->tokens) {
      for (std::int32_t token = first; token < last; ++token) onward.tokens.push_back(token);
    } else if (found->restart) {
      batch.left[i] = 1;
      restart_prompt(batch.ids[i]);
    } else {
      for (const std::int32_t place : *found->tokens) onward.tokens.push_back(first + place);
    }
    onward.indptr.push_back(static_cast<std::int32_t>(onward.tokens.size()));
  }
  return onward;
}

void Generator::restart_prompt(SequenceId id) {
  Sequence& sequence = sequences_.at(id);
  std::vector<std::int32_t> chosen;
  for (const std::int32_t place : prompt_report(id)->going_on)
    chosen.push_back(sequence.prompt[static_cast<std::size_t>(place)]);
  sequence.prompt = std::move(chosen);
}

void Generator::predict(const Batch& batch, const Tensor& logits) {
  const std::size_t rows = sequences_.at(batch.ids.front()).lengths.size();
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    Sequence& sequence = sequences_.at(batch.ids[i]);
    std::copy_n(batch.after.begin() + static_cast<std::ptrdiff_t>(i * rows), rows, sequence.lengths.begin());
    if (i >= batch.decoding)
      sequence.result.peak_bytes = std::max(sequence.result.peak_bytes, prompt_bytes(batch.ids[i]));
    if (batch.left[i] != 0) continue;
    const Tensor row = logits.narrow(0, static_cast<std::int64_t>(i), 1);
    const std::int32_t next = write(batch.ids[i], row);
    sequence.result.peak_bytes = std::max(sequence.result.peak_bytes, bytes_held(batch.ids[i]));
    sequence.done = static_cast<std::int32_t>(sequence.result.tokens.size()) >= sequence.request.new_tokens ||
                    (sequence.request.stop_at_end && sequence.result.tokens.size() > sequence.request.forced.size() &&
                     decoder_.config().ends(next));
    sequence.turn.clear();
    if (!keeper_.policy().needs().surprisal) continue;
    sequence.last = row[0].clone();
    if (!sequence.done)
      sequence.next_surprisal = token_surprisal(sequence.last, fed_next(sequence.request, sequence.result.tokens));
  }
}

const PromptReport* Generator::prompt_report(SequenceId id) const {
  const parts::Prompts* prompts = keeper_.find<parts::Prompts>();
  return prompts == nullptr ? nullptr : prompts->report_of(id);
}

// Peak bytes of a prompt on its way through the layers: a layer's rows are whole until it is cut.
std::int64_t Generator::prompt_bytes(SequenceId id) const {
  const PromptReport* report = prompt_report(id);
  const Sequence& sequence = sequences_.at(id);
  if (report == nullptr || !sequence.result.tokens.empty()) return 0;
  std::vector<std::int32_t> lengths(sequence.lengths.size());
  const auto heads = static_cast<std::size_t>(keeper_.spec().kv_heads);
  std::int64_t most = 0;
  for (std::size_t l = 0; l < report->entered.size(); ++l) {
    const auto row = static_cast<std::ptrdiff_t>(l * heads);
    std::fill_n(lengths.begin() + row, heads, report->entered[l]);
    most = std::max(most, live_bytes(lengths));
    if (!report->second_pass) std::copy_n(sequence.lengths.begin() + row, heads, lengths.begin() + row);
  }
  return most;
}

CacheView Generator::view_of(Batch& batch) {
  const std::int32_t rows = keeper_.spec().num_layers() * keeper_.spec().kv_heads;
  return {.sequences = batch.ids,
          .lengths = {batch.after, rows},
          .places = batch.places,
          .block_table = batch.block_table,
          .pages = pages_ ? &pages_->pool : nullptr};
}

void Generator::decide(Batch& batch) {
  const std::size_t rows = sequences_.at(batch.ids.front()).lengths.size();
  const CacheView view = view_of(batch);
  if (options_.hooks.before_decision) options_.hooks.before_decision({keeper_, view, batch.steps});
  const Plan plan = keeper_.plan(view);
  if (options_.hooks.on_event && !plan.cuts.empty()) options_.hooks.on_event({keeper_, view, plan});
  std::vector<std::int64_t> bytes_before;
  for (const Cut& cut : plan.cuts) bytes_before.push_back(bytes_held(cut.sequence));
  const Report report = keeper_.apply(plan, view);
  if (pages_) pages_->sequences.settle(view.sequences, report.pages);
  for (std::size_t c = 0; c < report.cuts.size(); ++c) {
    const Cut& cut = report.cuts[c];
    const auto i =
        static_cast<std::size_t>(std::find(batch.ids.begin(), batch.ids.end(), cut.sequence) - batch.ids.begin());
    Sequence& sequence = sequences_.at(cut.sequence);
    std::copy_n(batch.after.begin() + static_cast<std::ptrdiff_t>(i * rows), rows, sequence.lengths.begin());
    record(cut.sequence, cut, bytes_before[c]);
  }
}

void Generator::record(SequenceId id, const Cut& cut, std::int64_t bytes_before) {
  Sequence& sequence = sequences_.at(id);
  SequenceEvent event{.step = static_cast<std::int32_t>(sequence.result.tokens.size()) - 1,
                      .length_before = cut.length_before,
                      .length_after = cut.length_after,
                      .bytes_before = bytes_before,
                      .bytes_after = bytes_held(id),
                      .slots_kept = cut.slots_after,
                      .slots_chosen = cut.slots_chosen};
  if (sequence.request.keep_positions) event.positions = positions(id);
  sequence.result.kept_bytes = event.bytes_after;
  sequence.result.events.push_back(std::move(event));
}

std::vector<std::vector<std::int32_t>> Generator::positions(SequenceId id) const {
  std::vector<std::vector<std::int32_t>> rows;
  for (const std::int32_t layer : keeper_.spec().full_layers())
    for (std::int32_t head = 0; head < keeper_.spec().kv_heads; ++head) {
      const auto held = keeper_.positions(id, layer, head);
      rows.emplace_back(held.begin(), held.end());
    }
  return rows;
}

std::int64_t Generator::live_bytes(std::span<const std::int32_t> lengths) const {
  const ModelSpec& spec = keeper_.spec();
  std::int64_t slots = 0;
  for (const std::int32_t layer : spec.full_layers())
    for (std::int32_t head = 0; head < spec.kv_heads; ++head)
      slots += lengths[static_cast<std::size_t>(layer * spec.kv_heads + head)];
  return slots * bytes_of_slot(spec, options_.cache_dtype);
}

std::int64_t Generator::bytes_held(SequenceId id) const {
  const parts::Folds* folds = keeper_.find<parts::Folds>();
  return live_bytes(sequences_.at(id).lengths) + (folds == nullptr ? 0 : folds->of(id).near_bytes);
}

GenerationRun generate(Decoder& decoder, std::unique_ptr<KVPolicy> policy, std::vector<Request> requests,
                       GeneratorOptions options) {
  KVKEEP_REQUIRE(policy != nullptr, "generate: policy must not be null; allowed one from make_policy()");
  GenerationRun run;
  run.completions.resize(requests.size());
  if (requests.empty()) return run;
  if (options.capacity == 0) {
    options.capacity = 1;
    for (const Request& request : requests)
      options.capacity = std::max(options.capacity, slots_needed(decoder.spec(), policy->trigger(), request));
  }
  Generator generator(decoder, std::move(policy), std::move(options));
  std::vector<SequenceId> alive;
  std::size_t next = 0;
  while (true) {
    while (next < requests.size() && generator.has_place())
      alive.push_back(generator.join(std::move(requests[next++])));
    if (!generator.step()) break;
    std::erase_if(alive, [&](SequenceId id) {
      if (!generator.done(id)) return false;
      run.completions[static_cast<std::size_t>(id)] = generator.leave(id);
      return true;
    });
  }
  run.totals = generator.keeper().totals();
  run.pace = generator.pace();
  return run;
}

}  // namespace kvkeep::lm
