// SPDX-License-Identifier: Apache-2.0
// Values of options are written as nlohmann's JSON writes them, and read from text as its reader reads them.

#include "kvkeep/policy/option_value.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kvkeep/io/untrusted_json.h"
#include "oracle/random_case.h"

namespace kvkeep::option_value_test {
namespace {

using Json = nlohmann::json;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(OptionValue, WritesNumbersAsNlohmannDoes) {
  for (const double value :
       {0.0,  -0.0,         1.0,   16.0,     0.5,    0.1,       1e-4,         9.999e-5, 1e-5, 1e-6,  1e14,
        1e15, 123456789.25, 1e100, -2.5e300, 5e-324, kInfinity, std::nan(""), 0.125,    1e16, 1e-11, 999999999999999.0})
    EXPECT_EQ(OptionValue(value).json(), Json(value).dump());
  oracle::Random random(1);
  for (int i = 0; i < 3000; ++i) {  // whose digits are not always the fewest
    const double value = (random.unit() - 0.5) * std::pow(10.0, std::floor(random.unit() * 60) - 30);
    const std::string own = OptionValue(value).json(), other = Json(value).dump();
    EXPECT_EQ(Json::parse(own).get<double>(), value);
    EXPECT_LE(own.size(), other.size());
    EXPECT_EQ(own.find_first_of(".e"), other.find_first_of(".e")) << own << " and " << other;
  }
  EXPECT_EQ(OptionValue(INT64_MIN).json(), "-9223372036854775808");
  EXPECT_EQ(OptionValue(true).json(), "true");
  EXPECT_EQ(OptionValue().json(), "null");
}

TEST(OptionValue, WritesStringsAsTheReaderOfJsonWritesThem) {
  std::string every;
  for (int c = 0; c < 256; ++c) every += static_cast<char>(c);
  for (const std::string& words :
       {std::string("plain"), std::string("\"quoted\" \\ and / more"),
        std::string("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"), std::string("\xc2\x80 \xc2\x9f \xc2\xa0 \x7f"),
        std::string("bad\xff"), std::string("cut\xe2\x82"), std::string("\xed\xa0\x80 \xc0\x80"),
        std::string("\0in it", 6), every})
    EXPECT_EQ(OptionValue(words).json(), io::written(Json(words)));
}

TEST(OptionValue, WritesObjectsInTheOrderOfTheirMembers) {
  OptionValue all;
  all.give("policy", "tova");
  all.give("allocator.window", 64);
  all.give("budget", 3);
  all.give("allocator.pool", 0.5);
  all["raw"] = OptionValue::Json{"[1,null]"};
  all["empty"] = OptionValue::object();
  EXPECT_EQ(all.json(),
            R"({"policy":"tova","allocator":{"window":64,"pool":0.5},"budget":3,"raw":[1,null],"empty":{}})");
  EXPECT_THROW(all.give("allocator.pool", 1), InvalidArgument);
  EXPECT_THROW(all.give("budget.slots", 1), InvalidArgument);
}

TEST(OptionValue, ReadsTextAsANumberOrABooleanWhereItIsOne) {
  for (const char* words :
       {"0", "-7", "64", "0.5", "1e5", "1e+5", "-2.5E-3", "9223372036854775807", " 5 ", "true", "false"})
    EXPECT_EQ(OptionValue::of_text(words).json(), Json::parse(words).dump()) << words;
  for (const char* words :
       {"", " ", "tova", "nan", "inf", "-inf", "-", "5 slots", "1e999", "true1", "0x10", "1,5", "+5"})
    EXPECT_EQ(*OptionValue::of_text(words).get<std::string>(), words);
  EXPECT_EQ(OptionValue::of_text("9223372036854775808").json(), "9.223372036854776e+18") << "no integer that wraps";
}

}  // namespace
}  // namespace kvkeep::option_value_test
