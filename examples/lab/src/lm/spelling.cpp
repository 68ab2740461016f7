// SPDX-License-Identifier: Apache-2.0
#include "spelling.h"

#include <algorithm>
#include <utility>

#include "utf8.h"

namespace kvkeep::lm::detail {

std::string with_blanks(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t found = std::min(text.find(Spelling::kBlank, at), text.size());
    out.append(text.substr(at, found - at));
    if (found < text.size()) out += ' ';
    at = found + Spelling::kBlank.size();
  }
  return out;
}

std::string_view Spelling::of(std::string_view text, Before before, std::string& room) const {
  if (nfc) text = room = detail::nfc(text);
  if (blanks && text.find(kBlank) != std::string_view::npos) text = room = with_blanks(text);
  const bool wanted = before == Before::nothing || (before == Before::token && prefix != Prefix::first);
  if (prefix == Prefix::none || !wanted || (prefix != Prefix::always && text.starts_with(' '))) return text;
  std::string prefixed(" ");
  prefixed += text;
  return room = std::move(prefixed);
}

}  // namespace kvkeep::lm::detail
