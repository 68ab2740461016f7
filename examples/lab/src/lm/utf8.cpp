// SPDX-License-Identifier: Apache-2.0
#include "utf8.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

namespace kvkeep::lm::detail {

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8Step step = first_step(text);
    if (step.state != Utf8State::good) return false;
    text.remove_prefix(step.bytes);
  }
  return true;
}

std::string replaced_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Step step = first_step(text);
    out += step.state == Utf8State::good ? text.substr(0, step.bytes) : "\xef\xbf\xbd";
    text.remove_prefix(step.bytes);
  }
  return out;
}

void append_utf8(std::string& out, char32_t code) {
  std::array<utf8proc_uint8_t, 4> bytes;
  const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes.data());
  out.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(length));
}

CharClass class_beyond_ascii(char32_t code) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return CharClass::letter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return CharClass::number;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return CharClass::space;
    default:
      return code == 0x85 ? CharClass::space
                          : CharClass::other;  // of the control characters beyond ASCII, only next line
  }
}

bool is_word_character(char32_t code) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code))) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    case UTF8PROC_CATEGORY_SO:  // circled and squared Latin letters: alphabetic, though symbols
      return (code >= 0x24b6 && code <= 0x24e9) || (code >= 0x1f130 && code <= 0x1f149) ||
             (code >= 0x1f150 && code <= 0x1f169) || (code >= 0x1f170 && code <= 0x1f189);
    case UTF8PROC_CATEGORY_CF:
      return code == 0x200c || code == 0x200d;
    default:
      return class_of(code) == CharClass::letter;
  }
}

namespace {

int combining_class(utf8proc_int32_t code) { return utf8proc_get_property(code)->combining_class; }

// utf8proc_decompose would sort marks by swapping neighbours: quadratic in the length of a run of them.
void sort_marks(std::vector<utf8proc_int32_t>& codes) {
  const auto is_mark = [](utf8proc_int32_t code) { return combining_class(code) != 0; };
  for (auto run = std::find_if(codes.begin(), codes.end(), is_mark); run != codes.end();
       run = std::find_if(run, codes.end(), is_mark)) {
    const auto end = std::find_if_not(run, codes.end(), is_mark);
    std::stable_sort(run, end, [](auto a, auto b) { return combining_class(a) < combining_class(b); });
    run = end;
  }
}

std::vector<utf8proc_int32_t> decomposed(std::string_view text) {
  std::vector<utf8proc_int32_t> codes;
  codes.reserve(text.size());
  std::array<utf8proc_int32_t, 32> parts;  // the longest canonical decomposition has 4
  int boundary = 0;
  for (std::size_t at = 0; at < text.size();) {
    const Character c = character_at(text, at);
    const auto count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c.code), parts.data(), parts.size(),
                                static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE), &boundary);
    codes.insert(codes.end(), parts.begin(), parts.begin() + count);
    at += c.bytes;
  }
  return codes;
}

}  // namespace

std::string nfc(std::string_view text) {
  constexpr unsigned char kFirstByteOf300 = 0xcc;  // no character below U+0300 combines or changes
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < kFirstByteOf300; }))
    return std::string(text);
  std::vector<utf8proc_int32_t> codes = decomposed(text);
  sort_marks(codes);
  const auto count = utf8proc_normalize_utf32(codes.data(), static_cast<utf8proc_ssize_t>(codes.size()),
                                              static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  std::string out;
  out.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < count; ++i)
    append_utf8(out, static_cast<char32_t>(codes[static_cast<std::size_t>(i)]));
  return out;
}

}  // namespace kvkeep::lm::detail
