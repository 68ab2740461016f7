#pragma once
/// Pinned spans: positions that an engine protects, such as a system prompt or a tool result.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

namespace kvkeep {

/// Logical positions [begin, end).
struct PositionSpan {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  [[nodiscard]] bool operator==(const PositionSpan&) const = default;
};

/// A set of positions, as ascending spans that neither overlap nor touch.
class PositionSpans {
 public:
  void add(PositionSpan span) {
    if (spans_.empty() || spans_.back().end < span.begin) {
      spans_.push_back(span);
      return;
    }
    std::vector<PositionSpan> all;
    for (const PositionSpan& one : spans_) {
      if (one.end < span.begin || one.begin > span.end) {
        all.push_back(one);
      } else {
        span = {std::min(span.begin, one.begin), std::max(span.end, one.end)};
      }
    }
    all.insert(std::ranges::upper_bound(all, span.begin, {}, &PositionSpan::begin), span);
    spans_ = std::move(all);
  }

  void remove(PositionSpan span) {
    std::vector<PositionSpan> left;
    for (const PositionSpan& one : spans_) {
      if (one.begin < span.begin) left.push_back({one.begin, std::min(one.end, span.begin)});
      if (one.end > span.end) left.push_back({std::max(one.begin, span.end), one.end});
    }
    spans_ = std::move(left);
  }

  /// Removes the positions from `end` on.
  void truncate(std::int32_t end) noexcept {
    while (!spans_.empty() && spans_.back().begin >= end) spans_.pop_back();
    if (!spans_.empty()) spans_.back().end = std::min(spans_.back().end, end);
  }

  [[nodiscard]] std::span<const PositionSpan> spans() const { return spans_; }
  [[nodiscard]] bool empty() const { return spans_.empty(); }

 private:
  std::vector<PositionSpan> spans_;
};

/// Whether ascending spans hold a position.
[[nodiscard]] inline bool holds(std::span<const PositionSpan> spans, std::int32_t position) {
  const auto after = std::ranges::upper_bound(spans, position, {}, &PositionSpan::begin);
  return after != spans.begin() && position < std::prev(after)->end;
}

/// How many positions of the spans are at or after `first`.
[[nodiscard]] inline std::int64_t positions_from(std::int32_t first, std::span<const PositionSpan> spans) {
  std::int64_t count = 0;
  for (const PositionSpan& span : spans) count += std::max(0, span.end - std::max(span.begin, first));
  return count;
}

}  // namespace kvkeep
