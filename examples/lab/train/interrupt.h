// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Ctrl-C as a request to stop.

namespace train {

/// While it lives, Ctrl-C and a kill ask the loop to stop after the step in progress; a second one ends the program as
/// usual.
class StopOnInterrupt {
 public:
  StopOnInterrupt();
  ~StopOnInterrupt();
  StopOnInterrupt(const StopOnInterrupt&) = delete;
  StopOnInterrupt& operator=(const StopOnInterrupt&) = delete;

  bool requested() const;
};

}  // namespace train
