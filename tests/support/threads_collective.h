// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Ranks that are threads of one process.

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/policy/across_ranks.h"

namespace kvkeep::testing {

class ThreadRanks {
 public:
  explicit ThreadRanks(std::int32_t size) : letters_(static_cast<std::size_t>(size)) {}

  [[nodiscard]] std::int32_t size() const { return static_cast<std::int32_t>(letters_.size()); }
  [[nodiscard]] int gathers() const { return round_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// A rank is gone: nobody waits any more.
  void lose() {
    const std::scoped_lock lock(mutex_);
    lost_ = true;
    all_are_here_.notify_all();
  }

  /// Runs `body` on every rank; throws what the first one threw.
  void run(const std::function<void(std::shared_ptr<Collective>)>& body) {
    std::vector<std::thread> threads;
    std::vector<std::exception_ptr> errors(letters_.size());
    for (std::int32_t r = 0; r < size(); ++r)
      threads.emplace_back([&, r] {
        try {
          body(std::make_shared<Rank>(*this, r));
        } catch (...) {
          errors[static_cast<std::size_t>(r)] = std::current_exception();
          lose();
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
  }

 private:
  class Rank final : public Collective {
   public:
    Rank(ThreadRanks& all, std::int32_t rank) : all_(all), rank_(rank) {}
    [[nodiscard]] std::int32_t rank() const override { return rank_; }
    [[nodiscard]] std::int32_t size() const override { return all_.size(); }
    void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
      all_.gather(static_cast<std::size_t>(rank_), mine, all);
    }

   private:
    ThreadRanks& all_;
    std::int32_t rank_;
  };

  void gather(std::size_t rank, std::span<const std::byte> mine, std::span<std::byte> all) {
    std::unique_lock lock(mutex_);
    letters_[rank].assign(mine.begin(), mine.end());
    bytes_ += mine.size();
    const int round = round_;
    if (++here_ == letters_.size()) {
      here_ = 0, ++round_;
      gathered_ = letters_;
      all_are_here_.notify_all();
    } else if (!all_are_here_.wait_for(lock, std::chrono::seconds(20), [&] { return round_ != round || lost_; }) ||
               round_ == round) {
      refuse<RankError>("threads: a rank did not come; allowed all of them");
    }
    for (const auto& letter : gathered_) {
      KVKEEP_REQUIRE_AS(RankError, letter.size() == mine.size(), "threads: ", letter.size(), " bytes and ",
                        mine.size());
      std::memcpy(all.data(), letter.data(), letter.size());
      all = all.subspan(letter.size());
    }
  }

  std::mutex mutex_;
  std::condition_variable all_are_here_;
  std::vector<std::vector<std::byte>> letters_, gathered_;
  std::size_t here_ = 0, bytes_ = 0;
  int round_ = 0;
  bool lost_ = false;
};

}  // namespace kvkeep::testing
