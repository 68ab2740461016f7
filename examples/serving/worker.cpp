// SPDX-License-Identifier: Apache-2.0
#include "worker.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace serving {
namespace {

using kvkeep::Dtype;

std::unique_ptr<PrefixCache> cache_of(const std::string& kind, kvkeep::PagePool& pool, bool needs_window) {
  if (kind == "hash") return std::make_unique<HashCache>(pool, needs_window);
  if (kind == "radix") return std::make_unique<RadixCache>(pool, needs_window);
  KVKEEP_REQUIRE(kind == "none", "cache: given ", kind, "; allowed hash, radix, none");
  return nullptr;
}

}  // namespace

// (1) Once: a keeper for the model, and where the cache is.
Worker::Worker(const Settings& settings)
    : settings_(settings), pool_(settings.pages, settings.page_size), sequences_(pool_) {
  const kvkeep::ModelSpec spec = Model::spec();
  for (std::int32_t l = 0; l < Model::kLayers; ++l) {
    const auto side = [&] {
      return kvkeep::zeros({settings.pages, settings.page_size, Model::kHeads, Model::kDim}, Dtype::f32);
    };
    layers_.emplace_back(kvkeep::PagedKv{side(), side()});
  }
  keeper_.emplace(spec, kvkeep::make_policy(settings.policy),
                  kvkeep::Provided{.threads = settings.threads, .trace = settings.trace});
  keeper_->bind(layers_);
  cache_ = cache_of(settings.cache, pool_, keeper_->queries_read() > 0);
}

Worker::~Worker() = default;

const float* Worker::page(std::int32_t layer, bool values, std::int32_t page) const {
  const auto& kv = std::get<kvkeep::PagedKv>(layers_[static_cast<std::size_t>(layer)]);
  return (values ? kv.values : kv.keys).select(0, page).data<float>();
}

float* Worker::slot(std::int32_t layer, bool values, SequenceId id, std::int32_t head, std::int32_t slot) {
  const std::int32_t size = pool_.page_size(), number = sequences_.pages(id)[static_cast<std::size_t>(slot / size)];
  return const_cast<float*>(page(layer, values, number)) + (slot % size * Model::kHeads + head) * Model::kDim;
}

kvkeep::CacheView Worker::view_of(const std::vector<SequenceId>& ids) {
  flat_lengths_.clear();
  for (const SequenceId id : ids)
    flat_lengths_.insert(flat_lengths_.end(), living_.at(id).lengths.begin(), living_.at(id).lengths.end());
  return {.sequences = ids,
          .lengths = {flat_lengths_, kRows},
          .block_table = sequences_.table(ids, block_table_),
          .pages = &pool_};  // (2) who counts holders: sequences and the prefix cache
}

Outcome Worker::step(const Orders& orders) {
  Outcome outcome;
  for (const SequenceId id : orders.cancel) leave(id);
  for (const SequenceId id : orders.swap_out)
    if (living_.contains(id)) swap_out(id);
  for (const SequenceId id : orders.swap_in)
    if (swapped_.contains(id)) swap_in(id);
  for (const Request& request : orders.admit) admit(request, outcome);
  Batch batch;
  for (const Orders::Run& run : orders.run)
    if (living_.contains(run.id)) add(run, batch);
  outcome.tokens = static_cast<std::int32_t>(batch.tokens.size());
  if (!batch.ids.empty()) {
    forward(batch);
    take_samples(batch, outcome);
    publish(batch);
    cut(batch);
    begin_samples(batch);
  }
  finish(outcome);
  return outcome;
}

/// A sequence ends, is aborted, or leaves for a while: at any point between steps.
void Worker::leave(SequenceId id) {
  swapped_.erase(id);
  if (living_.erase(id) == 0) return;
  keeper_->leave(id);
  sequences_.release(id);
}

/// Preemption: state and rows go to memory of the host, pages to others.
void Worker::swap_out(SequenceId id) {
  const std::vector<SequenceId> ids{id};
  Swapped swapped{.living = living_.at(id),
                  .state = keeper_->save(id),
                  .rows = kvkeep::copy_rows(keeper_->spec(), keeper_->layers(), view_of(ids), 0)};
  leave(id);
  swapped_.emplace(id, std::move(swapped));
}

void Worker::swap_in(SequenceId id) {
  const Swapped& swapped = swapped_.at(id);
  const auto [shortest, longest] = std::ranges::minmax(swapped.living.lengths);
  require_room((longest + pool_.page_size() - 1) / pool_.page_size(), id);
  static_cast<void>(sequences_.admit(id, longest, shortest));
  living_.emplace(id, swapped.living);
  const std::vector<SequenceId> ids{id};
  kvkeep::restore_rows(keeper_->spec(), keeper_->layers(), view_of(ids), 0, swapped.rows);
  keeper_->restore(id, swapped.state);
  swapped_.erase(id);
}

/// (3) A request begins, with the pages of a prefix that is cached, and the window that was saved beside them.
void Worker::admit(const Request& request, Outcome& outcome) {
  const auto prompt = static_cast<std::int32_t>(request.prompt.size());
  Hit hit;
  if (cache_ != nullptr) hit = cache_->match(request.prompt, prompt - 1);  // the last token gives the first logits
  sequences_.adopt(request.id, hit.pages, hit.tokens);
  if (hit.window != nullptr)
    keeper_->restore(request.id, *hit.window, prompt);
  else
    keeper_->join(request.id, hit.tokens, prompt);
  living_.emplace(request.id, Living{.request = request,
                                     .text = request.prompt,
                                     .computed = hit.tokens,
                                     .lengths = std::vector<std::int32_t>(kRows, hit.tokens)});
  outcome.cached_tokens += hit.tokens;
}

/// Free pages, as many, if need be of those that only the prefix cache holds.
bool Worker::make_room(std::int32_t pages) {
  while (pool_.free_pages() < pages)
    if (cache_ == nullptr || !cache_->evict()) return false;
  return true;
}

void Worker::require_room(std::int32_t pages, SequenceId id) {
  KVKEEP_REQUIRE_AS(kvkeep::StateError, make_room(pages), "step: sequence ", id, " needs ", pages, " pages; there are ",
                    pool_.free_pages(), "; allowed what the last outcome says is available");
}

/// Tokens of one sequence join the step: a piece of its prompt, or its newest token and guesses.
void Worker::add(const Orders::Run& run, Batch& batch) {
  Living& s = living_.at(run.id);
  const auto prompt = static_cast<std::int32_t>(s.request.prompt.size());
  std::vector<Token> tokens;
  if (s.computed < prompt) {
    const std::int32_t count = std::min(run.prompt_tokens, prompt - s.computed);
    if (count <= 0) return;
    tokens.assign(s.text.begin() + s.computed, s.text.begin() + s.computed + count);
  } else {
    std::vector<Token> text = s.text;
    tokens.push_back(text.back());
    for (std::int32_t d = 0; d < s.request.drafts; ++d) {
      text.push_back(guess(text));
      tokens.push_back(text.back());
    }
  }
  const auto count = static_cast<std::int32_t>(tokens.size());
  require_room(sequences_.need(run.id, count), run.id);
  const kvkeep::PageGrant grant = sequences_.append(run.id, count);
  kvkeep::copy_pages(layers_, grant.copies);
  for (std::int32_t& length : s.lengths) length += count;
  batch.ids.push_back(run.id);
  batch.tokens.insert(batch.tokens.end(), tokens.begin(), tokens.end());
  batch.indptr.push_back(static_cast<std::int32_t>(batch.tokens.size()));
}

/// (4) The layers of a step, each of which shows its queries.
void Worker::forward(Batch& batch) {
  constexpr std::int32_t kQuery = Model::kQueryHeads * Model::kDim, kSide = Model::kHeads * Model::kDim;
  const std::size_t tokens = batch.tokens.size();
  std::vector<std::uint64_t> chains(tokens);
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    const Living& s = living_.at(batch.ids[i]);
    std::uint64_t chain = chain_of(std::span(s.text).first(static_cast<std::size_t>(s.computed)));
    for (std::int32_t t = batch.indptr[i]; t < batch.indptr[i + 1]; ++t) {
      const Token token = batch.tokens[static_cast<std::size_t>(t)];
      chains[static_cast<std::size_t>(t)] = chain = chained(chain, token);
      batch.states.push_back(model_.embed(token, s.computed + t - batch.indptr[i]));
    }
  }
  std::vector<float> queries(tokens * kQuery), attended(tokens * kQuery), keys(kSide), values(kSide);
  for (std::int32_t l = 0; l < Model::kLayers; ++l) {
    for (std::size_t i = 0; i < batch.ids.size(); ++i) {
      const Living& s = living_.at(batch.ids[i]);
      for (std::int32_t t = batch.indptr[i]; t < batch.indptr[i + 1]; ++t) {
        const auto at = static_cast<std::size_t>(t);
        model_.project(l, batch.states[at], chains[at], &queries[at * kQuery], keys.data(), values.data());
        for (std::int32_t h = 0; h < Model::kHeads; ++h) {
          const std::int32_t place =
              s.lengths[static_cast<std::size_t>(l * Model::kHeads + h)] - (batch.indptr[i + 1] - t);
          std::copy_n(&keys[static_cast<std::size_t>(h * Model::kDim)], Model::kDim,
                      slot(l, false, batch.ids[i], h, place));
          std::copy_n(&values[static_cast<std::size_t>(h * Model::kDim)], Model::kDim,
                      slot(l, true, batch.ids[i], h, place));
        }
      }
    }
    keeper_->observe(
        {.layer = l,
         .sequences = batch.ids,
         .indptr = batch.indptr,
         .queries = {
             queries.data(), Dtype::f32, {static_cast<std::int64_t>(tokens), Model::kQueryHeads, Model::kDim}}});
    attend(l, batch, queries, attended);
    for (std::size_t t = 0; t < tokens; ++t) model_.finish_layer(l, &attended[t * kQuery], batch.states[t]);
  }
}

void Worker::attend(std::int32_t l, const Batch& batch, std::span<const float> queries, std::span<float> attended) {
  std::vector<float> scratch;
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    const Living& s = living_.at(batch.ids[i]);
    for (std::int32_t t = batch.indptr[i]; t < batch.indptr[i + 1]; ++t)
      for (std::int32_t q = 0; q < Model::kQueryHeads; ++q) {
        const std::int32_t h = q * Model::kHeads / Model::kQueryHeads,
                           slots = s.lengths[static_cast<std::size_t>(l * Model::kHeads + h)] -
                                   (batch.indptr[i + 1] - t) + 1;  // up to the token itself
        const auto side = [&](bool values) {
          return [this, l, h, values, id = batch.ids[i]](std::int32_t j) { return slot(l, values, id, h, j); };
        };
        const std::size_t at = static_cast<std::size_t>(t * Model::kQueryHeads + q) * Model::kDim;
        Model::attend(&queries[at], slots, side(false), side(true), &attended[at], scratch);
      }
  }
}

/// New tokens, and what drafts guessed wrongly is taken back: before the step's event, which would decide over it.
void Worker::take_samples(const Batch& batch, Outcome& outcome) {
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    Living& s = living_.at(batch.ids[i]);
    const auto prompt = static_cast<std::int32_t>(s.request.prompt.size());
    const std::int32_t first = batch.indptr[i], count = batch.indptr[i + 1] - first;
    if (s.computed < prompt) {
      s.computed += count;
      if (s.computed == prompt)
        s.text.push_back(model_.sample(batch.states[static_cast<std::size_t>(first + count - 1)], s.sample, prompt));
      continue;
    }
    std::int32_t good = 0;  // tokens of the step that stand
    while (good < count) {
      const auto at = static_cast<std::size_t>(first + good);
      if (good > 0 && batch.tokens[at] != s.text.back()) break;
      ++good;
      s.text.push_back(model_.sample(batch.states[at], s.sample, s.computed + good));
      if (std::ssize(s.text) - prompt >= s.request.new_tokens) break;
    }
    s.computed += good;
    outcome.accepted_drafts += good - 1;
    if (good == count) continue;
    keeper_->truncate(batch.ids[i], s.computed);
    for (std::int32_t& length : s.lengths) length -= count - good;
    sequences_.truncate(batch.ids[i], std::ranges::max(s.lengths));
  }
}

/// Whole pages of prompts go to the prefix cache, before an event may cut their sequence, and never after one.
void Worker::publish(const Batch& batch) {
  if (cache_ == nullptr) return;
  for (const SequenceId id : batch.ids) {
    const Living& s = living_.at(id);
    if (s.cut_at > 0 || s.computed > std::ssize(s.request.prompt)) continue;
    const auto pages = static_cast<std::size_t>(s.computed / pool_.page_size()),
               tokens = pages * static_cast<std::size_t>(pool_.page_size());
    if (pages == 0) continue;
    const bool ends_a_page = tokens == static_cast<std::size_t>(s.computed);
    SavedWindow window;
    if (ends_a_page && keeper_->queries_read() > 0)
      window = std::make_shared<const std::vector<std::byte>>(keeper_->save(id));
    cache_->insert(std::span(s.text).first(tokens), sequences_.pages(id).first(pages), std::move(window));
  }
}

/// (6) What is due is cut. A sequence whose event lacks pages for copies waits for a later step.
void Worker::cut(const Batch& batch) {
  std::vector<SequenceId> ids = batch.ids;
  while (true) {
    kvkeep::CacheView view = view_of(ids);
    const kvkeep::Plan plan = keeper_->plan(view);
    std::int32_t taken = 0;
    std::vector<SequenceId> lacking;
    for (const kvkeep::PageMove& move : plan.pages) {
      if (!make_room(taken + move.taken))
        lacking.push_back(ids[static_cast<std::size_t>(move.sequence)]);
      else
        taken += move.taken;
    }
    if (!lacking.empty()) {
      std::erase_if(ids, [&](SequenceId id) { return std::ranges::find(lacking, id) != lacking.end(); });
      if (ids.empty()) return;
      continue;
    }
    const kvkeep::Report report = keeper_->apply(plan, view);
    sequences_.settle(ids, report.pages);
    for (std::size_t i = 0; i < ids.size(); ++i)
      for (std::int32_t r = 0; r < kRows; ++r)
        living_.at(ids[i]).lengths[static_cast<std::size_t>(r)] = view.lengths.at(i, r);
    for (const kvkeep::Cut& cut : report.cuts) living_.at(cut.sequence).cut_at = cut.logical_length;
    return;
  }
}

/// (7) Further samples of a prompt that has just ended: forks, which share its pages.
void Worker::begin_samples(const Batch& batch) {
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    const SequenceId id = batch.ids[i];
    const Living parent = living_.at(id);
    const auto prompt = static_cast<std::int32_t>(parent.request.prompt.size());
    if (parent.computed != prompt || parent.sample != 0) continue;
    for (std::int32_t n = 1; n < parent.request.samples; ++n) {
      keeper_->fork(id + n, id);
      sequences_.fork(id + n, id);
      Living child = parent;
      child.sample = n;
      child.text.back() = model_.sample(batch.states[static_cast<std::size_t>(batch.indptr[i + 1] - 1)], n, prompt);
      living_.emplace(id + n, std::move(child));
    }
  }
}

void Worker::finish(Outcome& outcome) {
  for (auto one = living_.begin(); one != living_.end();) {
    const auto& [id, s] = *one++;
    const std::int64_t prompt = std::ssize(s.request.prompt), written = std::ssize(s.text) - prompt;
    if (written < s.request.new_tokens) continue;
    outcome.finished.emplace_back(
        id, std::vector<Token>(s.text.begin() + prompt, s.text.begin() + prompt + s.request.new_tokens));
    leave(id);
  }
  for (const auto& [id, s] : living_) {
    const auto prompt = static_cast<std::int32_t>(s.request.prompt.size());
    Standing standing{.id = id,
                      .ahead = keeper_->forecast(id),
                      .prompt_left = prompt - std::min(prompt, s.computed),
                      .tokens_left = s.request.new_tokens - (static_cast<std::int32_t>(s.text.size()) - prompt),
                      .step_tokens = 1 + s.request.drafts};
    for (const std::int32_t page : sequences_.pages(id)) standing.shared_pages += pool_.references(page) > 1 ? 1 : 0;
    outcome.standing.push_back(std::move(standing));
  }
  outcome.available_pages = pool_.free_pages() + (cache_ == nullptr ? 0 : cache_->evictable());
  outcome.totals = keeper_->totals();
}

}  // namespace serving
