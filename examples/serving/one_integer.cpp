// SPDX-License-Identifier: Apache-2.0
#include "one_integer.h"

#include <algorithm>
#include <functional>
#include <memory>

namespace serving {

using kvkeep::Dtype;

OneIntegerEngine::OneIntegerEngine(const OneIntegerSettings& settings)
    : settings_(settings), blocks_(settings.blocks), tree_(blocks_, settings.block_size) {
  for (std::int32_t l = 0; l < Model::kLayers; ++l) {
    const auto side = [&] {
      return kvkeep::zeros({settings.blocks, settings.block_size, Model::kHeads, Model::kDim}, Dtype::f32);
    };
    layers_.emplace_back(kvkeep::PagedKv{side(), side()});
  }
  keeper_.emplace(Model::spec(), kvkeep::make_policy(settings.policy));
  keeper_->bind(layers_);
}

float* OneIntegerEngine::slot(std::int32_t layer, bool values, std::int32_t block, std::int32_t slot) const {
  const auto& kv = std::get<kvkeep::PagedKv>(layers_[static_cast<std::size_t>(layer)]);
  return (values ? kv.values : kv.keys).data<float>() +
         (std::int64_t{block} * settings_.block_size + slot) * Model::kHeads * Model::kDim;
}

/// Where a slot of a request lies: by its cached length, never by its position.
float* OneIntegerEngine::place(const Served& s, std::int32_t layer, bool values, std::int32_t slot) const {
  return this->slot(layer, values, s.blocks[static_cast<std::size_t>(slot / settings_.block_size)],
                    slot % settings_.block_size);
}

std::int32_t OneIntegerEngine::blocks_for(std::int64_t slots) const {
  return static_cast<std::int32_t>((slots + settings_.block_size - 1) / settings_.block_size);
}

void OneIntegerEngine::copy_block(std::int32_t from, std::int32_t to) const {
  for (std::int32_t l = 0; l < Model::kLayers; ++l)
    for (const bool values : {false, true})
      std::copy_n(slot(l, values, from, 0), settings_.block_size * Model::kHeads * Model::kDim, slot(l, values, to, 0));
}

/// Blocks of a request to memory of the host, or back.
void OneIntegerEngine::copy_rows(const Served& s, std::vector<float>& rows, bool back) const {
  const auto numbers = static_cast<std::size_t>(settings_.block_size * Model::kHeads * Model::kDim);
  rows.resize(s.blocks.size() * 2 * Model::kLayers * numbers);
  float* at = rows.data();
  for (const std::int32_t block : s.blocks)
    for (std::int32_t l = 0; l < Model::kLayers; ++l)
      for (const bool values : {false, true}) {
        float* const there = slot(l, values, block, 0);
        std::copy_n(back ? at : there, numbers, back ? there : at);
        at += numbers;
      }
}

void OneIntegerEngine::submit(Request request) {
  const std::int64_t most = std::ssize(request.prompt) + request.new_tokens + request.drafts;
  KVKEEP_REQUIRE(!request.prompt.empty() && request.new_tokens >= 1 && blocks_for(most) <= settings_.blocks, "request ",
                 request.id, ": ", request.prompt.size(), " tokens of a prompt and ", request.new_tokens,
                 " of an answer; allowed 1 or more of each, and as many as ", settings_.blocks, " blocks hold");
  Served s{.request = std::move(request)};
  s.text = s.request.prompt;
  waiting_.push_back(std::move(s));
}

/// (8) A request ends, or leaves for a while: its blocks lose a holder each, those that the tree has too stay there.
void OneIntegerEngine::release(Served& s) {
  for (const std::int32_t block : std::exchange(s.blocks, {})) blocks_.give_back(block);
  const SequenceId id = s.request.id + s.sample;
  keeper_->leave(id);
  std::erase(order_, id);
}

void OneIntegerEngine::cancel(SequenceId id) {
  const auto same = [id](const Served& s) { return s.request.id + s.sample == id; };
  std::erase_if(waiting_, same);
  std::erase_if(away_, [&](const Away& a) { return same(a.served); });
  if (const auto found = running_.find(id); found != running_.end()) {
    release(found->second);
    running_.erase(found);
  }
}

/// Swapped: state and blocks to the host, and `evicted` stays. Computed again: nothing stays but the text, so the
/// integer is 0 again, and events come where they came the first time.
void OneIntegerEngine::preempt(SequenceId id, Leave how) {
  const auto found = running_.find(id);
  if (found == running_.end()) return;
  Served s = std::move(found->second);
  running_.erase(found);
  if (how == Leave::swap) {
    Away away{.served = s, .state = keeper_->save(id), .rows = {}};
    copy_rows(s, away.rows, false);
    release(s);
    away.served.blocks.clear();
    away_.push_back(std::move(away));
    ++numbers_.swapped;
    return;
  }
  release(s);
  if (s.text.size() > s.said.size()) s.said = s.text;
  s.text = s.request.prompt;
  s.computed = s.evicted = 0;
  s.cut = false;
  waiting_.push_front(std::move(s));
  ++numbers_.recomputed;
}

/// Free blocks, as many, and one for each that runs, so that it does not leave again at once. Only the tree makes room.
bool OneIntegerEngine::room_beside_others(std::int32_t blocks) {
  const std::int32_t wanted = blocks + static_cast<std::int32_t>(running_.size());
  while (blocks_.free() < wanted && tree_.evict()) continue;
  return blocks_.free() >= wanted || running_.empty();
}

bool OneIntegerEngine::come_back() {
  Away& away = away_.front();
  Served s = away.served;
  const SequenceId id = s.request.id + s.sample;
  if (!room_beside_others(blocks_for(s.cached()))) return false;
  for (std::int32_t b = blocks_for(s.cached()); b > 0; --b) s.blocks.push_back(blocks_.take());
  copy_rows(s, away.rows, true);
  keeper_->restore(id, away.state);
  running_.emplace(id, std::move(s));
  order_.push_back(id);
  away_.pop_front();
  return true;
}

/// (1) A request begins, with the blocks of a text that it begins with.
bool OneIntegerEngine::admit() {
  Served& s = waiting_.front();
  const SequenceId id = s.request.id + s.sample;
  const auto prompt = static_cast<std::int32_t>(s.prompt());
  BlockTree::Hit hit;
  if (settings_.prefix_cache)
    hit = tree_.match(std::span(s.text).first(s.text.size() - 1), keeper_->queries_read() > 0);
  for (const std::int32_t block : hit.blocks) blocks_.hold(block);
  if (!room_beside_others(blocks_for(prompt) - static_cast<std::int32_t>(hit.blocks.size()))) {
    for (const std::int32_t block : hit.blocks) blocks_.give_back(block);
    return false;
  }
  if (hit.window != nullptr)
    keeper_->restore(id, *hit.window, prompt, hit.tokens);
  else
    keeper_->join(id, hit.tokens, prompt);
  s.blocks = std::move(hit.blocks);
  s.computed = hit.tokens;
  numbers_.hits += hit.tokens;
  running_.emplace(id, std::move(s));
  order_.push_back(id);
  waiting_.pop_front();
  return true;
}

/// Free blocks, as many: from the tree, then from requests that came after `keep`, then from what the tree shares.
bool OneIntegerEngine::make_room(std::int32_t blocks, SequenceId keep) {
  while (blocks_.free() < blocks) {
    if (tree_.evict()) continue;
    const auto other = std::find_if(order_.rbegin(), order_.rend(), [keep](SequenceId id) { return id != keep; });
    if (other != order_.rend())
      preempt(*other, numbers_.swapped <= numbers_.recomputed ? Leave::swap : Leave::recompute);
    else if (!tree_.evict(true))
      return false;
  }
  return true;
}

/// (2) Blocks for a step's tokens, which begin at slot cached(). One that others hold too is copied before it is
/// written.
bool OneIntegerEngine::grow(SequenceId id, std::int32_t tokens) {
  Served& s = running_.at(id);
  const auto last_is_shared = [&] {
    return s.cached() % settings_.block_size != 0 && blocks_.references(s.blocks.back()) > 1;
  };
  const auto need = [&] {
    return blocks_for(s.cached() + tokens) - static_cast<std::int32_t>(s.blocks.size()) + (last_is_shared() ? 1 : 0);
  };
  while (blocks_.free() < need())
    if (!make_room(need(), id)) return false;
  if (last_is_shared()) {
    const std::int32_t own = blocks_.take();
    copy_block(s.blocks.back(), own);
    blocks_.give_back(std::exchange(s.blocks.back(), own));
  }
  while (std::ssize(s.blocks) < blocks_for(s.cached() + tokens)) s.blocks.push_back(blocks_.take());
  return true;
}

/// A piece of its prompt, or its newest token and guesses.
std::vector<Token> OneIntegerEngine::next_tokens(const Served& s, std::int32_t most) const {
  std::vector<Token> text = s.text;
  if (s.computed < s.prompt())
    text.resize(static_cast<std::size_t>(std::min(s.computed + std::min(most, settings_.chunk), s.prompt())));
  else
    for (std::int32_t d = 0; d < s.request.drafts; ++d) text.push_back(guess(text));
  text.erase(text.begin(), text.begin() + s.computed);
  return std::ssize(text) > most ? std::vector<Token>{} : text;
}

/// (3) The layers. A token's position counts all tokens before it; its slot, those that are cached.
std::vector<Model::State> OneIntegerEngine::run(SequenceId id, std::span<const Token> tokens) {
  constexpr std::int32_t kQuery = Model::kQueryHeads * Model::kDim;
  const Served& s = running_.at(id);
  const std::vector<std::int32_t> indptr{0, static_cast<std::int32_t>(tokens.size())};
  std::vector<Model::State> states;
  std::vector<std::uint64_t> chains;
  std::uint64_t chain = chain_of(std::span(s.text).first(static_cast<std::size_t>(s.computed)));
  for (const Token token : tokens) {
    const std::int64_t position = s.computed + std::ssize(states);
    states.push_back(model_.embed(token, position));
    chains.push_back(chain = chained(chain, token));
  }
  std::vector<float> queries(tokens.size() * kQuery), attended(kQuery), scratch;
  for (std::int32_t l = 0; l < Model::kLayers; ++l) {
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const std::int32_t slot = s.cached() + static_cast<std::int32_t>(t);
      model_.project(l, states[t], chains[t], &queries[t * kQuery], place(s, l, false, slot), place(s, l, true, slot));
    }
    keeper_->observe({.layer = l,
                      .sequences = {&id, 1},
                      .indptr = indptr,
                      .queries = {queries.data(), Dtype::f32, {indptr[1], Model::kQueryHeads, Model::kDim}}});
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::int32_t q = 0; q < Model::kQueryHeads; ++q) {
        const auto side = [&](bool values) {
          const std::int32_t head = q * Model::kHeads / Model::kQueryHeads * Model::kDim;
          return [this, &s, l, values, head](std::int32_t slot) { return place(s, l, values, slot) + head; };
        };
        Model::attend(&queries[t * kQuery + static_cast<std::size_t>(q * Model::kDim)],
                      s.cached() + static_cast<std::int32_t>(t) + 1, side(false), side(true),
                      &attended[static_cast<std::size_t>(q * Model::kDim)], scratch);
      }
      model_.finish_layer(l, attended.data(), states[t]);
    }
  }
  numbers_.tokens += std::ssize(tokens);
  return states;
}

/// (4) What drafts guessed wrongly is taken back before the event, from the keeper, the length and the block table.
void OneIntegerEngine::accept(SequenceId id, std::span<const Token> tokens, std::span<const Model::State> states) {
  Served& s = running_.at(id);
  const bool prompt = s.computed < s.prompt();
  std::size_t good = prompt ? tokens.size() : 0;
  if (prompt && s.computed + std::ssize(tokens) == s.prompt())
    s.text.push_back(model_.sample(states.back(), s.sample, s.prompt()));
  while (!prompt && good < tokens.size() && (good == 0 || tokens[good] == s.text.back()) &&
         std::ssize(s.text) - s.prompt() < s.request.new_tokens) {
    ++good;
    s.text.push_back(model_.sample(states[good - 1], s.sample, s.computed + static_cast<std::int64_t>(good)));
  }
  s.computed += static_cast<std::int64_t>(good);
  const auto again = std::min(s.said.size(), s.text.size());
  if (!std::equal(s.said.begin(), s.said.begin() + static_cast<std::ptrdiff_t>(again), s.text.begin()))
    ++numbers_.said_otherwise;
  const auto wrong = static_cast<std::int64_t>(tokens.size() - good);
  numbers_.accepted += prompt ? 0 : static_cast<std::int64_t>(good) - 1;
  numbers_.rejected += wrong;
  if (wrong == 0) return;
  KVKEEP_REQUIRE(wrong <= keeper_->rollback_limit(id), "request ", id, ": ", wrong, " drafts cannot be taken back");
  keeper_->truncate(id, s.computed);
  for (; std::ssize(s.blocks) > blocks_for(s.cached()); s.blocks.pop_back()) blocks_.give_back(s.blocks.back());
}

/// (5) Whole blocks below whole_prefix() hold the tokens of their places, before an event and after it. A policy that
/// reads queries wants its window beside them, which is there until the first event.
void OneIntegerEngine::publish(SequenceId id) {
  const Served& s = running_.at(id);
  if (!settings_.prefix_cache) return;
  const std::int64_t blocks = keeper_->whole_prefix(id) / settings_.block_size, tokens = blocks * settings_.block_size;
  const bool windows = keeper_->queries_read() > 0;
  if (tokens == 0 || (windows && (s.cut || s.computed - tokens > keeper_->rollback_limit(id)))) return;
  const std::int32_t before = blocks_.references(s.blocks[static_cast<std::size_t>(blocks - 1)]);
  std::function<BlockTree::Window()> window;
  if (windows) window = [&] { return std::make_shared<const std::vector<std::byte>>(keeper_->save(id)); };
  tree_.insert(std::span(s.text).first(static_cast<std::size_t>(tokens)),
               std::span(s.blocks).first(static_cast<std::size_t>(blocks)), window);
  if (s.cut && blocks_.references(s.blocks[static_cast<std::size_t>(blocks - 1)]) > before) ++numbers_.published_cut;
}

/// (6) What is due is cut. Afterwards its row of the block table is shorter, and the integer is larger: that is all.
/// False: there are no blocks for copies of shared ones.
bool OneIntegerEngine::cut(SequenceId id) {
  while (true) {
    Served& s = running_.at(id);
    std::int32_t length = s.cached();
    std::vector<std::int32_t> row = s.blocks;
    const kvkeep::CacheView view{.sequences = {&id, 1},
                                 .lengths = {{&length, 1}},
                                 .block_table = {row.data(), Dtype::i32, {1, std::ssize(row)}},
                                 .pages = &blocks_};
    const kvkeep::Plan plan = keeper_->plan(view);
    if (!plan.pages.empty() && plan.pages.front().taken > blocks_.free()) {
      if (!make_room(plan.pages.front().taken, id)) return false;
      continue;  // who holds what has changed
    }
    const bool due = !keeper_->apply(plan, view).report().cuts.empty();
    s.evicted = keeper_->evicted(id);
    row.resize(static_cast<std::size_t>(blocks_for(length)));
    s.blocks = std::move(row);
    s.cut = s.cut || due;
    numbers_.cuts += due ? 1 : 0;
    return true;
  }
}

/// (7) Further samples of a prompt that has just ended share all blocks, and the integer.
void OneIntegerEngine::fork(SequenceId id, const Model::State& last) {
  Served& parent = running_.at(id);
  if (parent.forked || parent.sample != 0 || parent.computed != parent.prompt()) return;
  parent.forked = true;
  for (std::int32_t n = 1; n < parent.request.samples; ++n, ++numbers_.forks) {
    keeper_->fork(id + n, id);
    Served child = parent;
    child.sample = n;
    child.said.clear();
    child.text.back() = model_.sample(last, n, parent.prompt());
    for (const std::int32_t block : child.blocks) blocks_.hold(block);
    running_.emplace(id + n, std::move(child));
    order_.push_back(id + n);
  }
}

bool OneIntegerEngine::finish(SequenceId id) {
  const auto found = running_.find(id);
  Served& s = found->second;
  if (std::ssize(s.text) - s.prompt() < s.request.new_tokens) return false;
  const auto answer = s.text.begin() + s.prompt();
  answers_[id] = {answer, answer + s.request.new_tokens};
  release(s);
  running_.erase(found);
  return true;
}

bool OneIntegerEngine::step() {
  while (!away_.empty() && come_back()) continue;
  while (!waiting_.empty() && away_.empty() && admit()) continue;
  std::int32_t left = settings_.step_tokens;
  for (const SequenceId id : std::vector<SequenceId>(order_.begin(), order_.end())) {
    if (!running_.contains(id)) continue;  // it left in this step
    const std::vector<Token> tokens = next_tokens(running_.at(id), left);
    if (tokens.empty()) break;
    left -= static_cast<std::int32_t>(tokens.size());
    KVKEEP_REQUIRE_AS(kvkeep::StateError, grow(id, static_cast<std::int32_t>(tokens.size())), "step: request ", id,
                      " lacks blocks; the pool has ", blocks_.count());
    const std::vector<Model::State> states = run(id, tokens);
    accept(id, tokens, states);
    publish(id);
    KVKEEP_REQUIRE_AS(kvkeep::StateError, cut(id), "step: the event of request ", id, " lacks blocks; the pool has ",
                      blocks_.count());
    fork(id, states.back());
    finish(id);
  }
  return !running_.empty() || waiting() > 0;
}

}  // namespace serving
