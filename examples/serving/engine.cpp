// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <algorithm>

namespace serving {

Engine::Thread::Thread(const Settings& settings, Look look)
    : worker_(settings), look_(std::move(look)), thread_([this] { serve(); }) {}

Engine::Thread::~Thread() {
  {
    const std::scoped_lock lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Engine::Thread::push(Orders orders) {
  {
    const std::scoped_lock lock(mutex_);
    orders_.push_back(std::move(orders));
  }
  changed_.notify_all();
}

Outcome Engine::Thread::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !outcomes_.empty() || thrown_; });
  if (thrown_) std::rethrow_exception(thrown_);
  Outcome outcome = std::move(outcomes_.front());
  outcomes_.pop_front();
  return outcome;
}

void Engine::Thread::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return over_ || !orders_.empty(); });
    if (over_) return;
    const Orders orders = std::move(orders_.front());
    orders_.pop_front();
    lock.unlock();
    std::exception_ptr thrown;
    Outcome outcome;
    try {
      outcome = worker_.step(orders);
      if (look_) look_(worker_);
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    thrown_ = thrown;
    outcomes_.push_back(std::move(outcome));
    changed_.notify_all();
    if (thrown_) return;
  }
}

Engine::Engine(const Settings& settings, Limits limits, Look look)
    : settings_(settings),
      limits_(limits),
      trigger_(kvkeep::make_policy(settings.policy)->trigger()),
      available_(settings.pages),
      thread_(settings, std::move(look)) {
  KVKEEP_REQUIRE(limits.in_flight >= 1 && limits.in_flight <= 2, "steps in flight: ", limits.in_flight,
                 "; allowed 1 and 2");
  KVKEEP_REQUIRE(limits.chunk >= settings.page_size && limits.chunk % settings.page_size == 0, "chunk: ", limits.chunk,
                 " tokens; allowed whole pages of ", settings.page_size);
  KVKEEP_REQUIRE(limits.step_tokens >= limits.chunk, "step tokens: ", limits.step_tokens, "; allowed a chunk of ",
                 limits.chunk, " or more");
}

std::int32_t Engine::pages_for(std::int32_t slots) const {
  return (slots + settings_.page_size - 1) / settings_.page_size;
}

std::int32_t Engine::most_slots(std::int32_t prompt) const {
  const bool bounded = trigger_.prefill == kvkeep::Trigger::Prefill::pieces && !trigger_.ragged &&
                       trigger_.budget.unit != kvkeep::Budget::Unit::bytes;
  return bounded ? std::min(prompt, trigger_.budget.resolve({prompt}, {prompt}, 0) + limits_.chunk) : prompt;
}

void Engine::submit(Request request) {
  const auto prompt = static_cast<std::int32_t>(request.prompt.size());
  KVKEEP_REQUIRE(prompt > 0 && request.new_tokens > 0 && request.samples > 0 && request.drafts >= 0, "request ",
                 request.id, ": ", prompt, " tokens of a prompt, ", request.new_tokens, " of an answer, ",
                 request.samples, " samples, ", request.drafts, " drafts; allowed 1 or more, and 0 or more drafts");
  const std::int32_t pages = 2 * pages_for(most_slots(prompt)) + 2;
  KVKEEP_REQUIRE(pages <= settings_.pages, "request ", request.id, ": a prompt of ", prompt,
                 " tokens, and copies of its pages, take ", pages, " pages; the pool has ", settings_.pages,
                 "; allowed shorter prompts, more pages, or a policy with a small budget and prefill=pieces");
  waiting_.push_back(std::move(request));
}

void Engine::cancel(SequenceId id) { to_cancel_.push_back(id); }
void Engine::preempt(SequenceId id) { to_preempt_.push_back(id); }

std::int32_t Engine::free_pages() const {
  std::int32_t free = available_ - next_.reserved;
  for (const OnItsWay& step : on_their_way_) free -= step.reserved;
  return free;
}

bool Engine::reserve(std::int32_t pages) {
  if (pages > free_pages()) return false;
  next_.reserved += pages;
  return true;
}

/// What holds a page can only become less once the prompt has ended; until then the prefix cache may take every page.
std::int32_t Engine::need(const Planned& one, std::int32_t tokens) const {
  const std::int32_t shared =
      one.known.prompt_left > 0 ? pages_for(one.ahead.length() + tokens) : one.known.shared_pages;
  const kvkeep::PageNeed need = one.ahead.need(tokens, settings_.page_size, shared);
  return need.append + need.event;
}

void Engine::leave(SequenceId id, Orders& orders) {
  const auto found = running_.find(id);
  orders.swap_out.push_back(id);
  away_.emplace(id, std::move(found->second));
  away_order_.push_back(id);
  running_.erase(found);
  std::erase(order_, id);
  ++numbers_.preempted;
}

/// Those that left come before those that wait.
void Engine::bring_back(Orders& orders) {
  while (!away_order_.empty()) {
    const SequenceId id = away_order_.front();
    Planned& one = away_.at(id);
    const bool settled = one.ordered.empty() && std::ranges::find(orders.swap_out, id) == orders.swap_out.end();
    // With a page to spare for each that runs, so that it does not leave again at once.
    const std::int32_t pages = pages_for(one.ahead.length());
    if (!settled || pages + static_cast<std::int32_t>(running_.size()) > free_pages() || !reserve(pages)) return;
    one.known.shared_pages = 0;
    orders.swap_in.push_back(id);
    order_.push_back(id);
    running_.emplace(id, std::move(one));
    away_.erase(id);
    away_order_.pop_front();
  }
}

void Engine::admit(Orders& orders) {
  while (!waiting_.empty() && away_.empty() &&
         reserve(pages_for(most_slots(static_cast<std::int32_t>(waiting_.front().prompt.size()))))) {
    orders.admit.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

bool Engine::run(Orders& orders) {
  bool all = true;
  std::int32_t left = limits_.step_tokens;
  for (const SequenceId id : order_) {
    Planned& one = running_.at(id);
    std::int32_t tokens = one.known.step_tokens;
    if (one.prompt_left > 0) {
      tokens = std::min({limits_.chunk, one.prompt_left, left});
      if (tokens < one.prompt_left) tokens = tokens / settings_.page_size * settings_.page_size;
    } else if (const auto steps = static_cast<std::int32_t>(one.ordered.size());
               steps > 0 && (tokens > 1 || one.known.tokens_left <= steps)) {
      continue;  // how many drafts stand is not known yet; or the steps on their way write the rest of the answer
    }
    if (tokens == 0 || tokens > left) continue;
    if (!reserve(need(one, tokens))) {
      all = false;
      continue;
    }
    one.ahead.step(tokens);
    orders.run.push_back({.id = id, .prompt_tokens = one.prompt_left > 0 ? tokens : 0});
    one.prompt_left -= std::min(one.prompt_left, tokens);
    one.ordered.push_back(tokens);
    next_.run.push_back(id);
    left -= tokens;
  }
  return all;
}

Orders Engine::plan() {
  Orders orders;
  next_ = {};
  for (const SequenceId id : std::exchange(to_cancel_, {})) {
    cancelled_.insert(id);
    orders.cancel.push_back(id);
    std::erase_if(waiting_, [id](const Request& request) { return request.id == id; });
    running_.erase(id), away_.erase(id);
    std::erase(order_, id), std::erase(away_order_, id);
  }
  for (const SequenceId id : std::exchange(to_preempt_, {}))
    if (running_.contains(id)) leave(id, orders);
  // Who runs comes first: as long as one of them lacks pages, nobody else gets any.
  if (run(orders)) {
    bring_back(orders);
    admit(orders);
  }
  const bool idle = orders.run.empty() && orders.swap_in.empty() && orders.admit.empty() && orders.cancel.empty() &&
                    orders.swap_out.empty() && on_their_way_.empty();
  if (!idle || running_.empty()) {
    KVKEEP_REQUIRE_AS(kvkeep::StateError, !idle || waiting() == 0, "serving: ", waiting(),
                      " sequences wait, and an empty pool of ", settings_.pages, " pages is too small for the first");
    return orders;
  }
  KVKEEP_REQUIRE_AS(kvkeep::StateError, running_.size() > 1, "serving: sequence ", order_.front(), " of ",
                    running_.begin()->second.ahead.length(), " slots needs more than the ", available_,
                    " pages that are available of ", settings_.pages);
  leave(order_.back(), orders);  // the newest makes room
  return orders;
}

void Engine::absorb(Outcome outcome) {
  for (const SequenceId id : on_their_way_.front().run)
    for (std::map<SequenceId, Planned>* const all : {&running_, &away_})
      if (const auto one = all->find(id); one != all->end()) one->second.ordered.pop_front();
  on_their_way_.pop_front();
  available_ = outcome.available_pages;
  for (Standing& standing : outcome.standing) {
    const SequenceId id = standing.id;
    if (cancelled_.contains(id)) {
      to_cancel_.push_back(id);  // again: a sample that was cancelled before its fork
      continue;
    }
    const auto away = away_.find(id), running = running_.find(id);
    Planned now(std::move(standing));
    if (away == away_.end() && running == running_.end()) {
      order_.push_back(id);
      running_.emplace(id, std::move(now));
      continue;
    }
    Planned& one = away != away_.end() ? away->second : running->second;
    now.ordered = std::move(one.ordered);
    for (const std::int32_t tokens : now.ordered) {
      now.ahead.step(tokens);
      now.prompt_left -= std::min(now.prompt_left, tokens);
    }
    one = std::move(now);
  }
  for (auto& [id, answer] : outcome.finished) {
    running_.erase(id), away_.erase(id);
    std::erase(order_, id), std::erase(away_order_, id);
    if (cancelled_.contains(id)) continue;
    answers_.insert_or_assign(id, std::move(answer));
    ++numbers_.finished;
  }
  numbers_.tokens += outcome.tokens;
  numbers_.cached_tokens += outcome.cached_tokens;
  numbers_.accepted_drafts += outcome.accepted_drafts;
  numbers_.most_running = std::max(numbers_.most_running, running());
  totals_ = outcome.totals;
}

bool Engine::step() {
  Orders orders = plan();
  const bool something = !orders.run.empty() || !orders.swap_in.empty() || !orders.admit.empty() ||
                         !orders.cancel.empty() || !orders.swap_out.empty();
  if (something) {
    on_their_way_.push_back(std::move(next_));
    thread_.push(std::move(orders));
    ++numbers_.steps;
    numbers_.most_in_flight = std::max<std::int64_t>(numbers_.most_in_flight, std::ssize(on_their_way_));
  }
  if (on_their_way_.empty()) return false;
  if (!something || std::ssize(on_their_way_) >= limits_.in_flight) absorb(thread_.wait());
  return true;
}

}  // namespace serving
