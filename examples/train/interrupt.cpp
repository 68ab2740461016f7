#include "interrupt.h"

#include <csignal>

namespace train {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

void request(int signal_number) {
  stop_requested = 1;
  std::signal(signal_number, SIG_DFL);
}

}  // namespace

StopOnInterrupt::StopOnInterrupt() { std::signal(SIGINT, request), std::signal(SIGTERM, request); }
StopOnInterrupt::~StopOnInterrupt() { std::signal(SIGINT, SIG_DFL), std::signal(SIGTERM, SIG_DFL); }
bool StopOnInterrupt::requested() const { return stop_requested != 0; }

}  // namespace train
