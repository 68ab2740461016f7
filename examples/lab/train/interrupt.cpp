// SPDX-License-Identifier: Apache-2.0
#include "interrupt.h"

#include <csignal>

namespace train {
namespace {

volatile std::sig_atomic_t stop_requested = 0;
void (*before_interrupt)(int) = SIG_DFL;
void (*before_termination)(int) = SIG_DFL;

void restore(int signal_number) {
  std::signal(signal_number, signal_number == SIGINT ? before_interrupt : before_termination);
}

void request(int signal_number) {
  stop_requested = 1;
  restore(signal_number);
}

}  // namespace

StopOnInterrupt::StopOnInterrupt() {
  before_interrupt = std::signal(SIGINT, request);
  before_termination = std::signal(SIGTERM, request);
}
StopOnInterrupt::~StopOnInterrupt() { restore(SIGINT), restore(SIGTERM); }
bool StopOnInterrupt::requested() const { return stop_requested != 0; }

}  // namespace train
