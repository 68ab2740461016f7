// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <array>

#include "kvkeep/core/error.h"

namespace kvkeep::text_test {
namespace {

TEST(Text, EscapesWhatATerminalWouldActUpon) {
  EXPECT_EQ(escaped("\x1b[2Jphi"), "\\x1b[2Jphi");
  EXPECT_EQ(escaped("one\r\ntwo\t"), "one\\r\\ntwo\\t");
  EXPECT_EQ(escaped(std::string_view("x\0y\x7F", 4)), "x\\x00y\\x7f");
  EXPECT_EQ(escaped("\xC2\x9B"
                    "31m"),
            "\\u009b31m")
      << "a control sequence of one character";
  EXPECT_EQ(escaped("\x9B"
                    "31m"),
            "\\x9b31m")
      << "no UTF-8";
  for (const char* whole : {"", "tova,budget=64", "ä ß 中文 \xF0\x9F\x90\x88", "C:\\n"})
    EXPECT_EQ(escaped(whole), whole);
  for (const auto& [bytes, shown] : {std::pair("\xC0\xAF", "\\xc0\\xaf"), std::pair("\xED\xA0\x80", "\\xed\\xa0\\x80"),
                                     std::pair("\xF4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"),
                                     std::pair("\xE4\xB8", "\\xe4\\xb8"), std::pair("\xFF", "\\xff")})
    EXPECT_EQ(escaped(bytes), shown) << "longer than needed, a surrogate, above the last, cut, never a beginning";
  EXPECT_EQ(escaped("a\tb\nc\rd", "\n\t"), "a\tb\nc\\rd");
  EXPECT_EQ(escaped(escaped("\x1b\n\xFF")), escaped("\x1b\n\xFF"));
}

TEST(Text, ShortensWhatIsEscaped) {
  EXPECT_EQ(shortened("\x1b[31m"), "\\x1b[31m");
  EXPECT_EQ(shortened(std::string(80, 'x')), std::string(80, 'x'));
  EXPECT_EQ(shortened(std::string(81, 'x')), std::string(80, 'x') + "...");
  EXPECT_EQ(shortened(std::string(1000, '\x01')).size(), 83U);
}

TEST(Text, AnErrorIsOneLineWithoutANul) {
  try {
    refuse("read: '", std::string("x\0\x1b[2J\r\nkvkeep: all is fine", 27), "' is none; allowed others");
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "read: 'x\\x00\\x1b[2J\\r\\nkvkeep: all is fine' is none; allowed others");
  }
}

TEST(Nearest, CountsLettersAndNeighboursThatAreSwapped) {
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("budgt", "budget"), 1U);
  EXPECT_EQ(edit_distance("bugdet", "budget"), 1U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(edit_distance("TOVA", "tova"), 0U);
  EXPECT_EQ(edit_distance("TVOA", "tova"), 1U);
  EXPECT_EQ(edit_distance("[", "{"), 1U) << "only letters have capitals";
  EXPECT_EQ(edit_distance(std::string(100, 'x'), std::string(200, 'x')), 0U) << "the first 64";
}

TEST(Nearest, OffersANameThatIsNearEnough) {
  constexpr std::array kNames{"budget", "ratio", "memory.rest", "trigger"};
  EXPECT_EQ(did_you_mean("budgt", kNames), " (did you mean \"budget\"?)");
  EXPECT_EQ(did_you_mean("rst", kNames), " (did you mean \"memory.rest\"?)");
  EXPECT_EQ(did_you_mean("colour", kNames), "");
  EXPECT_EQ(did_you_mean("", kNames), "");
  EXPECT_EQ(did_you_mean("budgt", std::array<const char*, 0>{}), "");
}

}  // namespace
}  // namespace kvkeep::text_test
