#pragma once
// A progress bar with the time left, on a terminal only. Everything here goes to stderr.

#include <chrono>
#include <cstdint>
#include <string>

namespace kvkeep::cli {

class Progress {
 public:
  // Draws nothing when `total` is 0, when stderr is not a terminal, or when quiet.
  Progress(std::int64_t total, bool quiet);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Shows at once what is being done.
  void label(std::string what);
  void advance(std::int64_t done);
  // Removes the bar, so that other lines can be written.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  void draw();
  std::int64_t total_, done_ = 0;
  bool shown_ = false, drawn_ = false;
  std::string label_;
  Clock::time_point start_ = Clock::now(), last_ = {};
};

// One line on stderr that begins with "kvkeep: ", escaped.
void note(const std::string& said);

}  // namespace kvkeep::cli
