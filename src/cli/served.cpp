// SPDX-License-Identifier: Apache-2.0
#include "served.h"

#include <cmath>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "gpu_times.h"
#include "kvkeep/core/error.h"

namespace kvkeep::cli {
namespace {

constexpr std::array kShares{0.5, 0.9, 0.99};

// Times in bins of 0.1 %.
class Histogram {
 public:
  void add(double seconds, std::int64_t times) {
    const auto bin = static_cast<std::int64_t>(std::floor(std::log(std::max(seconds, kLeast) / kLeast) / kWidth));
    counts_.resize(std::max(counts_.size(), static_cast<std::size_t>(bin) + 1), 0);
    counts_[static_cast<std::size_t>(bin)] += times;
    all_ += times;
  }
  [[nodiscard]] Percentiles percentiles() const {
    Percentiles found{};
    std::int64_t below = 0;
    std::size_t next = 0;
    for (std::size_t bin = 0; bin < counts_.size(); ++bin) {
      below += counts_[bin];
      for (; next < kShares.size() && static_cast<double>(below) >= kShares[next] * static_cast<double>(all_); ++next)
        found[next] = kLeast * std::exp((static_cast<double>(bin) + 0.5) * kWidth);
    }
    return all_ > 0 ? found : Percentiles{};
  }

 private:
  static constexpr double kLeast = 1e-7, kWidth = 1e-3;
  std::vector<std::int64_t> counts_;
  std::int64_t all_ = 0;
};

// Steps by the thousand and million: one pass over the requests that run, and no more.
class PaperEngine {
 public:
  PaperEngine(const Course& course, const Roofline& roofline, std::int64_t room, const Load& load)
      : course_(course),
        roofline_(roofline),
        room_(room - course.scratch),
        prompt_bytes_(*std::max_element(course.held.begin(), course.held.begin() + course.prompt + 1)) {
    KVKEEP_REQUIRE(course.most_held(0) <= room_, "--length: one request holds ", course.most_held(0),
                   " bytes of a cache, the GPU has room for ", std::max<std::int64_t>(0, room_),
                   "; allowed fewer tokens, a smaller budget, or a GPU with more memory");
    for (std::size_t seen = 0; seen + 1 < course.held.size(); ++seen)
      moments_.push_back({course.read[seen], course.held[seen + 1], course.event[seen]});
    std::mt19937 bits(load.seed);
    double time = 0;
    for (std::int64_t r = 0; r < load.requests; ++r) {
      if (load.rate > 0)
        time -= std::log((static_cast<double>(bits()) + 0.5) / 4294967296.0) / load.rate;  // alike on every machine
      arrivals_.push_back(time);
    }
  }

  Served serve() {
    const auto all = std::ssize(arrivals_);
    while (served_.finished < all) {
      if (running_.empty() && away_.empty()) served_.seconds = std::max(served_.seconds, arrivals_[came_in_]);
      double seconds = make_room();
      seconds += take_in();
      served_.most_bytes = std::max(served_.most_bytes, need_ + course_.scratch);
      served_.most_at_once = std::max<std::int64_t>(served_.most_at_once, std::ssize(running_));
      served_.in_flight += run(seconds) * static_cast<double>(running_.size());
      ++served_.steps;
      if (done_ > 0) std::erase_if(running_, [&](const OnPaper& one) { return one.seen + 1 == course_.length; });
      served_.finished += std::exchange(done_, 0);
    }
    served_.in_flight /= served_.seconds - arrivals_.front();
    std::ranges::sort(first_);
    for (std::size_t i = 0; i < kShares.size(); ++i)
      served_.first[i] = first_[static_cast<std::size_t>(std::ceil(kShares[i] * static_cast<double>(all))) - 1];
    served_.between = between_.percentiles();
    return served_;
  }

 private:
  struct OnPaper {
    double arrived = 0, left = 0;  // seconds
    std::int32_t seen = 0;         // tokens in the cache
    std::int32_t piece = 0;        // of its prompt, in the step that is planned
  };
  // After so many tokens.
  struct Moment {
    std::int64_t read, next;  // bytes: of K and V; held at most in the step after
    double event;
  };

  [[nodiscard]] bool in_prompt(const OnPaper& one) const { return one.seen < course_.prompt; }
  [[nodiscard]] const Moment& moment(const OnPaper& one) const { return moments_[static_cast<std::size_t>(one.seen)]; }
  // Bytes in its next step. A prompt takes its room at once.
  [[nodiscard]] std::int64_t next_bytes(const OnPaper& one) const {
    return in_prompt(one) ? prompt_bytes_ : moment(one).next;
  }
  // To the host's memory, or back.
  [[nodiscard]] double moving(const OnPaper& one) const { return static_cast<double>(moment(one).read) / kHostLink; }

  // The newest leave until the next step fits. Seconds for their way.
  double make_room() {
    double seconds = 0;
    for (; need_ > room_; running_.pop_back(), ++served_.away) {
      OnPaper& newest = running_.back();
      need_ -= next_bytes(newest);
      seconds += moving(newest);
      newest.left = served_.seconds;
      prompts_ -= in_prompt(newest) ? 1 : 0;
      away_.push_front(newest);
    }
    return seconds;
  }

  // Plans pieces of prompts, as many as have room in the step, in their order, and who comes in. Seconds for those that
  // come back.
  double take_in() {
    std::int32_t room = course_.piece;  // tokens
    const auto plan = [&](OnPaper& one) {
      const std::int32_t tokens = course_.piece_after(one.seen);
      one.piece = tokens <= room ? tokens : 0;
      room -= one.piece;
      return one.piece > 0;
    };
    if (prompts_ > 0)
      for (OnPaper& one : running_)
        if (in_prompt(one)) plan(one);
    const auto fits = [&](const OnPaper& one) {
      // A page for each of the others, so that it need not leave at once.
      const std::int64_t pages = std::ssize(running_) * kPage * course_.token_bytes;
      return running_.empty() || need_ + next_bytes(one) + pages <= room_;
    };
    const auto enter = [&](const OnPaper& one) {
      need_ += next_bytes(one);
      prompts_ += in_prompt(one) ? 1 : 0;
      running_.push_back(one);
    };
    double seconds = 0;
    for (; !away_.empty() && fits(away_.front()); away_.pop_front()) {
      OnPaper& one = away_.front();
      seconds += moving(one);
      if (in_prompt(one))
        plan(one);
      else
        came_back_.push_back(one.left);
      enter(one);
    }
    for (; away_.empty() && came_in_ < arrivals_.size() && arrivals_[came_in_] <= served_.seconds; ++came_in_) {
      OnPaper one{.arrived = arrivals_[came_in_]};
      if (!fits(one) || !plan(one)) break;
      enter(one);
    }
    return seconds;
  }

  // One step, with its events, `before` seconds after the last. Writes its tokens. Its seconds.
  double run(double before) {
    Roofline::Work work;
    double events = 0;
    std::int64_t read = 0, need = 0;
    const auto end = [&](const OnPaper& one) {
      const Moment& now = moment(one);
      if (now.event > 0) events += now.event, ++served_.events;
      if (one.seen + 1 < course_.length)
        need += next_bytes(one);
      else
        ++done_;
      return now.read;
    };
    ended_.clear();
    for (OnPaper& one : running_) {
      if (!in_prompt(one)) {
        ++one.seen, ++work.decoding;
        read += end(one);
      } else if (one.piece == 0) {
        need += prompt_bytes_;
      } else {
        one.seen += one.piece;
        work.prompt_tokens += one.piece;
        work.prompt_seconds += roofline_.attention(course_, one.piece, one.seen);
        work.shown += course_.shows_queries ? 1 : 0;
        end(one);
        if (!in_prompt(one)) ended_.push_back(one.arrived), --prompts_;
      }
    }
    work.read = static_cast<double>(read);
    work.shown += course_.shows_queries ? work.decoding : 0;
    const double seconds = before + roofline_.seconds(work) + events;
    served_.seconds += seconds;
    for (const double arrived : ended_) first_.push_back(served_.seconds - arrived);
    const std::int64_t in_turn = work.decoding - std::ssize(came_back_);
    if (in_turn > 0) between_.add(seconds, in_turn);
    for (const double left : came_back_) between_.add(served_.seconds - left, 1);
    came_back_.clear();
    served_.tokens += work.decoding + std::ssize(ended_);
    need_ = need;
    return seconds;
  }

  static constexpr std::int64_t kPage = 16;
  const Course& course_;
  const Roofline& roofline_;
  std::int64_t room_, prompt_bytes_, need_ = 0;  // need_: bytes of the next step
  std::vector<Moment> moments_;
  std::vector<double> arrivals_, first_;   // first_: waits for the first token
  std::vector<double> came_back_, ended_;  // in this step: when they had left, when those had come whose prompt ended
  std::size_t came_in_ = 0;                // of arrivals
  std::vector<OnPaper> running_;           // as they came
  std::int64_t prompts_ = 0, done_ = 0;    // of running_
  std::deque<OnPaper> away_;               // the oldest first
  Histogram between_;
  Served served_;
};

}  // namespace

Served serve(const Course& course, const Roofline& roofline, std::int64_t room, const Load& load) {
  return PaperEngine(course, roofline, room, load).serve();
}

}  // namespace kvkeep::cli
