#pragma once
// Bodies of calibration.h that no file is needed for: compiled by src/io, or where they are included under
// KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <iterator>

#include "kvkeep/core/header_only.h"
#include "kvkeep/core/text.h"
#include "kvkeep/io/calibration.h"

namespace kvkeep {

KVKEEP_INLINE std::int32_t Calibration::query_heads(const std::vector<std::int32_t>& layers) const {
  std::int32_t most = 0;
  for (const std::int32_t l : layers) {
    const auto behind = heads.lower_bound({l + 1, 0});
    if (behind != heads.begin() && std::prev(behind)->first.first == l)
      most = std::max(most, std::prev(behind)->first.second + 1);
  }
  return most;
}

KVKEEP_INLINE std::vector<std::string> Calibration::problems(const ModelSpec& spec) const {
  constexpr double kTolerance = 1e-4;
  std::vector<std::string> found;
  const auto say = [&](const auto&... parts) { found.push_back(text("calibration: ", parts...)); };
  if (head_dim < 2 || head_dim % 2 != 0) {
    say("head_dim is ", head_dim, "; allowed an even number from 2");
    return found;
  }
  const std::vector<std::int32_t> layers = spec.full_layers();
  if (head_dim != spec.key_dim) say("head_dim is ", head_dim, "; allowed the model's ", spec.key_dim);
  for (const std::int32_t l : layers) {
    const RopeSpec& rope = spec.rope_of(l);
    const std::size_t before = found.size();
    if (head_dim == spec.key_dim && pairs() != static_cast<std::int64_t>(rope.inv_freq.size()))
      say("F = head_dim / 2 is ", pairs(), "; allowed the number of rotary pairs of layer ", l, ", ",
          rope.inv_freq.size());
    if (rope_style != rope.style)
      say("rope_style is ", name_of(rope_style), "; allowed that of layer ", l, ", ", name_of(rope.style));
    for (std::size_t f = 0; inv_freq.size() == rope.inv_freq.size() && f < inv_freq.size(); ++f) {
      const double own = rope.inv_freq[f];
      if (std::abs(inv_freq[f] - own) <= kTolerance * std::abs(own)) continue;
      say("inv_freq[", f, "] is ", inv_freq[f], "; allowed that of layer ", l, ", ", own, ", within ", kTolerance,
          " of it");
      break;
    }
    if (found.size() > before) break;  // the other layers lack the same
  }
  const std::int32_t given = query_heads(layers),
                     wanted = spec.query_heads > 0 ? spec.group() * spec.whole_heads() : given;
  if (given == 0) {
    say("it holds none of the model's layers (", layers.empty() ? -1 : layers.front(), " to ",
        layers.empty() ? -1 : layers.back(), ")");
    return found;
  }
  if (given % spec.whole_heads() != 0)
    say("it has ", given, " query heads; allowed a multiple of the model's ", spec.whole_heads(), " KV heads");
  else if (given != wanted)
    say("it has ", given, " query heads; allowed the model's ", wanted);
  std::string missing, infinite;
  std::int64_t lacking = 0, bad = 0;
  for (const std::int32_t l : layers)
    for (std::int32_t h = 0; h < wanted; ++h) {
      const auto head = heads.find({l, h});
      if (head == heads.end()) {
        if (lacking++ == 0) missing = text("layer ", l, ", head ", h);
        continue;
      }
      const Head& s = head->second;
      const bool finite =
          std::all_of(s.q_mean.begin(), s.q_mean.end(),
                      [](const auto& z) { return std::isfinite(z.real()) && std::isfinite(z.imag()); }) &&
          std::all_of(s.q_abs_mean.begin(), s.q_abs_mean.end(), [](float x) { return std::isfinite(x); });
      if (!finite && bad++ == 0) infinite = text("layer ", l, ", head ", h);
      if (static_cast<std::int64_t>(s.q_mean.size()) != pairs() ||
          static_cast<std::int64_t>(s.q_abs_mean.size()) != pairs())
        say("layer ", l, ", head ", h, " has ", s.q_mean.size(), " means and ", s.q_abs_mean.size(),
            " moduli; allowed F = ", pairs());
    }
  if (lacking > 0)
    say(missing, " is missing", lacking > 1 ? text(" (and ", lacking - 1, " more)") : "",
        "; allowed every query head of every layer that is cut");
  if (bad > 0)
    say(infinite, bad > 1 ? text(" (and ", bad - 1, " more)") : "",
        " holds a number that is not finite; allowed finite numbers");
  return found;
}

}  // namespace kvkeep
