// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Random events for property tests and fuzzing: everything follows from one seed, on any machine.

#include <cstdint>
#include <string>

#include "event_oracle.h"

namespace oracle {

/// splitmix64: small, and the same everywhere (std:: distributions are not).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  /// Uniform in [first, last].
  int between(int first, int last);
  /// Uniform in [0, 1).
  double unit();
  bool chance(double probability) { return unit() < probability; }
  double normal();
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int>(values.size()) - 1)];
  }

 private:
  uint64_t state_;
};

/// How layers turn beside the model's RoPE.
enum class Ropes : uint8_t {
  one,         ///< as the model's
  same_pairs,  ///< some by other frequencies and another factor
  any,         ///< some not at all, some by fewer pairs
};

struct RandomCase {
  Options options;
  Sequence sequence;
  std::string description;  ///< one line, enough to read a failure
};

/// Options any policy file may hold, and an event for them. T is in [1, 300] and mostly small.
RandomCase random_case(uint64_t seed);

/// The same, with the options given and T at most `largest_T`.
RandomCase random_case(uint64_t seed, const Options& options, int largest_T = 300);

/// How many random cases a test runs: `normally`, a third of it under the address sanitizer, or what the environment
/// variable KVKEEP_RANDOM_CASES says.
int random_case_count(int normally);

/// The next event of the same sequence: what `rows` kept (with its credit), then `new_tokens` more. Rows must keep
/// equally many slots.
Sequence continued(const Sequence& before, const std::vector<Row>& rows, int new_tokens, uint64_t seed);

}  // namespace oracle
