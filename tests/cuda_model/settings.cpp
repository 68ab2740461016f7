// SPDX-License-Identifier: Apache-2.0
// The harsher ways to run of the execution model, and what they do to numbers.

#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>

#include "cuda_model.h"

namespace kvkeep::cuda::model {
namespace {

Settings from_environment() {
  Settings chosen;
  const char* const given = std::getenv("KVKEEP_CUDA_MODEL");
  for (std::string_view words = given == nullptr ? "" : given; !words.empty();) {
    const std::string_view word = words.substr(0, words.find(','));
    words.remove_prefix(std::min(words.size(), word.size() + 1));
    const std::string_view number = word.substr(std::min(word.size(), word.find('=') + 1));
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    const bool whole = error == std::errc() && end == number.data() + number.size();
    if (word == "truncate")
      chosen.truncate = true;
    else if (word == "exp2")
      chosen.exp2 = true;
    else if (word == "guard")
      chosen.guard = true;
    else if (word == "host")
      chosen.host = true;
#if defined(KVKEEP_WATCHED)  // else the compiler was not told to report accesses
    else if (word == "races")
      chosen.races = true;
#endif
    else if (word.starts_with("seed=") && whole && value > 0)
      chosen.seed = value;
    else if (word.starts_with("shared=") && whole && value > 0)
      chip().shared_bytes = static_cast<int>(value) << 10;
    else
      throw std::invalid_argument("KVKEEP_CUDA_MODEL: '" + std::string(word) +
                                  "'; allowed truncate, exp2, guard, races, host, seed=N, shared=KIB");
  }
  return chosen;
}

/// Towards zero, to a multiple of 2^exponent.
double cut(double x, int exponent) { return std::ldexp(std::trunc(std::ldexp(x, -exponent)), exponent); }

}  // namespace

Settings& settings() {
  static Settings chosen = from_environment();
  return chosen;
}

float approximate(float exact) {
  if (!settings().exp2 || !std::isfinite(exact) || exact == 0) return exact;
  // The same number is always off by as much, as with hardware.
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(exact) * 2654435761U;
  float y = exact;
  for (int ulps = static_cast<int>(bits >> 16U) % 5 - 2; ulps != 0; ulps += ulps < 0 ? 1 : -1)
    y = std::nextafter(y, ulps < 0 ? -HUGE_VALF : HUGE_VALF);
  return std::isfinite(y) ? y : exact;
}

float matrix_sum(float sum, const std::array<float, 16>& products) {
  if (!settings().truncate) {
    for (const float product : products) sum += product;
    return sum;
  }
  // Eight at a time, as an A100 does; an H100 takes 16, and keeps a bit or two more than the 24 that are kept here.
  for (std::size_t first = 0; first < products.size(); first += 8) {
    float largest = std::abs(sum);
    bool finite = std::isfinite(sum);
    for (std::size_t k = first; k < first + 8; ++k) {
      largest = std::max(largest, std::abs(products[k]));
      finite = finite && std::isfinite(products[k]);
    }
    if (!finite || largest == 0) {
      for (std::size_t k = first; k < first + 8; ++k) sum += products[k];
      continue;
    }
    const int last = std::max(std::ilogb(largest) - 23, -149);
    double all = cut(static_cast<double>(sum), last);
    for (std::size_t k = first; k < first + 8; ++k) all += cut(static_cast<double>(products[k]), last);
    sum = all == 0 ? 0.0F : static_cast<float>(cut(all, std::max(std::ilogb(all) - 23, -149)));
  }
  return sum;
}

}  // namespace kvkeep::cuda::model
