// SPDX-License-Identifier: Apache-2.0
// The whole event against the slow second implementation: the input seeds a random event and bends its numbers.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "library_event.h"
#include "oracle/invariants.h"
#include "oracle/random_case.h"

namespace {

/// Bytes of the input, one after the other; zeros when they run out.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}
  std::uint8_t next() { return left_ == 0 ? 0 : (--left_, *data_++); }
  [[nodiscard]] bool empty() const { return left_ == 0; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

void fail(const std::string& what, const std::string& where) {
  std::fprintf(stderr, "%s: %s\n", where.c_str(), what.c_str());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 8) return 0;
  std::uint64_t seed;
  std::memcpy(&seed, data, 8);
  Bytes bytes(data + 8, size - 8);
  oracle::RandomCase c = oracle::random_case(seed);
  while (!bytes.empty()) {  // small integers in keys and queries make ties, the interesting place
    const auto value = static_cast<float>(static_cast<std::int8_t>(bytes.next())) / 16.0F;
    auto& numbers = bytes.next() % 2 == 0 ? c.sequence.keys : c.sequence.queries;
    if (!numbers.empty())
      numbers[(static_cast<std::size_t>(bytes.next()) * 256 + bytes.next()) % numbers.size()] = value;
  }
  const auto want = oracle::event(c.options, c.sequence);
  auto got = kvkeep::testing::library_event(c.options, {c.sequence})[0];
  const bool rounding_decides = oracle::near_tie(want);
  for (std::size_t h = 0; h < want.size(); ++h) {
    if (c.sequence.T > c.options.budget) {
      got[h].scores.clear();  // ranks are compared by their outcome
      const auto wrong = oracle::violations(c.options, c.sequence, static_cast<int>(h), got[h]);
      if (!wrong.empty()) fail(wrong.front(), c.description);
    }
    if (!rounding_decides && got[h].slots != want[h].slots)
      fail("other slots than the second implementation", c.description);
  }
  return 0;
}
