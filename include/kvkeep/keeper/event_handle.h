// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The event of a step, until it is complete.

#include <optional>
#include <utility>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/parts/report.h"

namespace kvkeep {

class Keeper;

/// What Keeper::step() and apply() return. An engine that does not run ahead takes the report, which waits:
///
///     kvkeep::Report report = keeper.step(view);
///
/// One that does keeps the handle, and waits before it reads the lengths:
///
///     kvkeep::EventHandle event = keeper.step(view);
///     // ... whatever the host has to do before the next step ...
///     const kvkeep::Report& report = event.wait();
///
/// The event is complete at once, and wait() costs nothing, on the CPU and wherever lengths do not depend on scores
/// (Keeper::finish()). Until then the keeper, and what the view refers to, stay where they are. An event whose handle
/// is lost goes on waiting for Keeper::finish(): the keeper refuses the next one.
class EventHandle {
 public:
  /// Complete.
  explicit EventHandle(Report report) : report_(std::move(report)) {}
  /// Pending, over `view`. report: what is known so far.
  EventHandle(Keeper& keeper, const CacheView& view, Report report)
      : keeper_(&keeper), view_(view), report_(std::move(report)) {}

  /// Whether wait() costs nothing.
  [[nodiscard]] bool done() const { return !report_.pending; }
  /// What is known so far: everything once done(); before that Report::pending is set.
  [[nodiscard]] const Report& report() const& { return report_; }
  [[nodiscard]] Report report() && { return std::move(report_); }
  /// Completes the event. Throws as Keeper::finish() does, and may be called again then.
  const Report& wait() &;
  Report wait() && {
    wait();
    return std::move(report_);
  }
  operator Report() && { return std::move(*this).wait(); }

 private:
  Keeper* keeper_ = nullptr;  ///< of an event that was pending, and its view
  std::optional<CacheView> view_;
  Report report_;
};

}  // namespace kvkeep
