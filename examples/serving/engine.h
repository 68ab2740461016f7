// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The half of the engine that plans: which sequences run in a step, who waits, who leaves for a while. It counts, and
/// touches neither cache nor keeper, so a step is planned while an earlier one runs.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "worker.h"

namespace serving {

struct Limits {
  std::int32_t in_flight = 1;     ///< steps: 1 plans after each, 2 plans a step while the one before it runs
  std::int32_t chunk = 16;        ///< tokens of a prompt in one step, whole pages
  std::int32_t step_tokens = 64;  ///< of all sequences in one step
};

class Engine {
 public:
  /// Called on the worker's thread after each step.
  using Look = std::function<void(const Worker&)>;
  Engine(const Settings& settings, Limits limits, Look look = {});

  /// Throws kvkeep::InvalidArgument for a request without tokens, and for one that never fits the pool.
  void submit(Request request);
  /// Of one sample: its user has gone. Unknown ids are ignored.
  void cancel(SequenceId id);
  /// Makes a sequence leave for a while, as a lack of pages does. Ids that do not run are ignored.
  void preempt(SequenceId id);

  /// Plans a step and hands it to the worker; takes in what has finished. False: nothing is left to do.
  bool step();

  struct Numbers {
    std::int64_t steps = 0, tokens = 0, cached_tokens = 0, accepted_drafts = 0, preempted = 0;
    std::int64_t finished = 0, most_running = 0, most_in_flight = 0;
  };
  [[nodiscard]] const Numbers& numbers() const { return numbers_; }
  [[nodiscard]] const kvkeep::Totals& totals() const { return totals_; }
  [[nodiscard]] std::int64_t running() const { return std::ssize(running_); }
  [[nodiscard]] std::int64_t waiting() const { return std::ssize(waiting_) + std::ssize(away_); }
  [[nodiscard]] std::int32_t available_pages() const { return available_; }
  /// Ids of sequences that run, the oldest first.
  [[nodiscard]] const std::deque<SequenceId>& order() const { return order_; }
  /// Answers that have been finished since the last call.
  [[nodiscard]] std::map<SequenceId, std::vector<Token>> take_answers() { return std::exchange(answers_, {}); }

 private:
  /// Steps that wait for the worker, and what came of them, in order.
  class Thread {
   public:
    Thread(const Settings& settings, Look look);
    ~Thread();
    void push(Orders orders);
    /// Waits for the oldest. Throws what the step threw.
    Outcome wait();

   private:
    void serve();
    Worker worker_;
    Look look_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Orders> orders_;
    std::deque<Outcome> outcomes_;
    std::exception_ptr thrown_;
    bool over_ = false;
    std::thread thread_;
  };

  /// A sequence, as it will be after the steps that are on their way.
  struct Planned {
    explicit Planned(Standing now) : known(std::move(now)), ahead(known.ahead), prompt_left(known.prompt_left) {}
    Standing known;                ///< after the last step that is done
    kvkeep::LengthForecast ahead;  ///< (5) and after those that are on their way
    std::int32_t prompt_left = 0;
    std::deque<std::int32_t> ordered = {};  ///< tokens of each of these
  };
  struct OnItsWay {
    std::vector<SequenceId> run = {};
    std::int32_t reserved = 0;  ///< pages
  };

  Orders plan();
  void bring_back(Orders& orders);
  void admit(Orders& orders);
  /// False: a sequence lacks pages.
  bool run(Orders& orders);
  void leave(SequenceId id, Orders& orders);
  void absorb(Outcome outcome);
  [[nodiscard]] std::int32_t pages_for(std::int32_t slots) const;
  /// The most slots of a row while a prompt comes in: under prefill=pieces the budget and a chunk.
  [[nodiscard]] std::int32_t most_slots(std::int32_t prompt) const;
  /// The most pages that a step of so many tokens takes.
  [[nodiscard]] std::int32_t need(const Planned& one, std::int32_t tokens) const;
  /// Pages that no step on its way may take.
  [[nodiscard]] std::int32_t free_pages() const;
  bool reserve(std::int32_t pages);

  Settings settings_;
  Limits limits_;
  kvkeep::Trigger trigger_;
  std::deque<Request> waiting_;
  std::map<SequenceId, Planned> running_;
  std::deque<SequenceId> order_;        ///< of running_, as they came
  std::map<SequenceId, Planned> away_;  ///< preempted
  std::deque<SequenceId> away_order_;
  std::set<SequenceId> cancelled_;  ///< all that ever were
  std::vector<SequenceId> to_cancel_, to_preempt_;
  std::deque<OnItsWay> on_their_way_;
  OnItsWay next_;
  std::int32_t available_;  ///< pages after the last step that is done
  std::map<SequenceId, std::vector<Token>> answers_;
  Numbers numbers_;
  kvkeep::Totals totals_;
  Thread thread_;
};

}  // namespace serving
