// SPDX-License-Identifier: Apache-2.0
// Files of TriAttention's own tool: they hold what ours hold, and what is damaged or hostile is refused with a
// sentence.

#include "kvlab/published_calibration.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <filesystem>

#include "calibration_case.h"
#include "kvkeep/core/dtype.h"
#include "kvkeep/core/error.h"
#include "temporary_folder.h"

namespace kvkeep::lm {
namespace {

using testing::content;
using testing::expect_same;
using testing::golden_calibration;
using testing::sample_calibration;

namespace fs = std::filesystem;
using Bytes = std::string;

class PublishedCalibration : public testing::TemporaryFolder {};

void expect_refused(const Bytes& bytes, const std::string& word) {
  testing::expect_refused_calibration(read_published_calibration, bytes, word);
}

TEST_F(PublishedCalibration, ComesBackAsItWasSaved) {
  const Calibration c = sample_calibration();
  const fs::path file = folder_ / "no extension that says which";
  save_published_calibration(file, c);
  const Bytes first = content(file);
  const Calibration back = read_published_calibration(first, "the file");
  expect_same(c, back);
  EXPECT_EQ(back.inv_freq, c.inv_freq);
  EXPECT_EQ(back.attention_scaling, c.attention_scaling);
  EXPECT_EQ(back.model_name, c.model_name);
  save_published_calibration(file, c);
  EXPECT_EQ(first, content(file)) << "the same numbers make the same bytes";
}

TEST_F(PublishedCalibration, HoldsWhatOurFilesHold) {
  use_published_calibrations();
  int both = 0;
  for (const auto& entry : fs::directory_iterator(golden_calibration(""))) {
    if (!fs::exists(entry.path() / "calibration.pt")) continue;
    SCOPED_TRACE(entry.path().string());
    expect_same(load_calibration(entry.path() / "calibration.pt"),
                load_calibration(entry.path() / "calibration.safetensors"));
    ++both;
  }
  EXPECT_GE(both, 10);
  EXPECT_EQ(load_calibration(golden_calibration("sample_std/calibration.pt")).inv_freq.size(), 16U)
      << "inv_freq as a tensor in the metadata";
  use_calibration_reader(nullptr, nullptr);
}

TEST_F(PublishedCalibration, IsNotSavedWhereItLacksAHead) {
  Calibration c = sample_calibration();
  c.heads.erase({4, 3});
  EXPECT_THROW(save_published_calibration(folder_ / "f", c), InvalidArgument);
  EXPECT_TRUE(fs::is_empty(folder_));
  EXPECT_THROW(save_published_calibration(folder_ / "no/f", sample_calibration()), InvalidArgument);
}

TEST_F(PublishedCalibration, TruncatedAnywhereIsRefused) {
  const Bytes strided = content(golden_calibration("group_mean/calibration.pt"));
  for (int part = 0; part < 50; ++part)
    expect_refused(strided.substr(0, strided.size() * static_cast<std::size_t>(part) / 50), "");
  expect_refused("", "not a zip archive");
  expect_refused("PK", "truncated");
  expect_refused(strided + "x", "directory");
}

TEST_F(PublishedCalibration, AFlippedBitOfAPublishedFileIsRefusedOrChangesNoNumber) {
  const Bytes whole = content(golden_calibration("per_layer_per_head_gaps/calibration.pt"));
  const Calibration right = read_published_calibration(whole, "the file");
  int refused = 0;
  for (std::size_t at = 0; at < whole.size(); at += 3) {
    Bytes damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 1 << (at % 8));
    try {
      expect_same(right, read_published_calibration(damaged, "the file"));
    } catch (const InvalidArgument& e) {
      ++refused;
    }
    if (HasFailure()) FAIL() << "byte " << at;
  }
  EXPECT_GT(refused, 500);
}

// ---- Archives as an enemy would write them --------------------------------------------------------------------------

Bytes little(std::uint64_t value, int bytes) {
  Bytes out;
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  return out;
}

std::uint32_t checksum(const Bytes& bytes) {
  std::uint32_t c = 0xffffffffU;
  for (const char byte : bytes) {
    c ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) c = (c & 1U) != 0 ? 0xedb88320U ^ (c >> 1U) : c >> 1U;
  }
  return c ^ 0xffffffffU;
}

/// A zip archive of stored records with checksums that are right.
Bytes zip_of(const std::vector<std::pair<Bytes, Bytes>>& records, int method = 0) {
  Bytes out, directory;
  for (const auto& [name, data] : records) {
    const Bytes about = little(static_cast<std::uint64_t>(method), 2) + little(0, 4) + little(checksum(data), 4) +
                        little(data.size(), 4) + little(data.size(), 4) + little(name.size(), 2);
    directory += little(0x02014b50, 4) + little(20, 2) + little(20, 2) + little(0, 2) + about + little(0, 2) +
                 little(0, 2) + little(0, 2) + little(0, 2) + little(0, 4) + little(out.size(), 4) + name;
    out += little(0x04034b50, 4) + little(20, 2) + little(0, 2) + about + little(0, 2) + name + data;
  }
  const std::size_t begin = out.size();
  return out + directory + little(0x06054b50, 4) + little(0, 4) + little(records.size(), 2) +
         little(records.size(), 2) + little(directory.size(), 4) + little(begin, 4) + little(0, 2);
}

Bytes word(const Bytes& text) { return "X" + little(text.size(), 4) + text; }
Bytes number(std::int32_t n) { return "J" + little(static_cast<std::uint32_t>(n), 4); }

/// A view of storage "0", which says that it has `held` numbers.
Bytes tensor(std::int32_t held, std::int32_t offset, std::int32_t size, std::int32_t stride,
             const Bytes& type = "FloatStorage") {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + word("storage") + "ctorch\n" + type + "\n" + word("0") +
         word("cpu") + number(held) + "tQ" + number(offset) + number(size) + "\x85" + number(stride) +
         "\x85\x89"
         "ccollections\nOrderedDict\n)RtR";
}

/// A pickle with head_dim 4 and one head, whose q_mean_real is given.
Bytes pickle_with(const Bytes& real, const Bytes& more_metadata = "") {
  const Bytes good = tensor(8, 0, 2, 1);
  return "\x80\x02}(" + word("metadata") + "}(" + word("head_dim") + number(4) + word("rope_style") + word("half") +
         more_metadata + "u" + word("stats") + "}(" + word("layer00_head00") + "}(" + word("q_mean_real") + real +
         word("q_mean_imag") + good + word("q_abs_mean") + good + "uuu.";
}

Bytes archive_of(const Bytes& pickle, const Bytes& storage = Bytes(32, '\0')) {
  return zip_of({{"a/data.pkl", pickle}, {"a/data/0", storage}});
}

TEST_F(PublishedCalibration, ViewsThatLeaveTheirStorageAreRefused) {
  EXPECT_EQ(read_published_calibration(archive_of(pickle_with(tensor(8, 1, 2, 6))), "x").heads.size(), 1U)
      << "the last element is the storage's last";
  expect_refused(archive_of(pickle_with(tensor(8, 1, 2, 7))), "outside its storage");
  expect_refused(archive_of(pickle_with(tensor(8, -1, 2, 1))), "outside its storage");
  expect_refused(archive_of(pickle_with(tensor(8, 3, 2, -2))), "outside its storage");
  expect_refused(archive_of(pickle_with(tensor(8, 0, 2, INT32_MAX))), "outside its storage");
  expect_refused(archive_of(pickle_with(tensor(800, 0, 2, 1))), "outside its storage");
  expect_refused(archive_of(pickle_with(tensor(8, 0, 3, 1))), "shape [2]");
  expect_refused(archive_of(pickle_with(tensor(8, 0, INT32_MAX, 1))), "shape [2]");
  expect_refused(archive_of(pickle_with(tensor(8, 0, 2, 1, "LongStorage"))), "LongStorage");
  expect_refused(zip_of({{"a/data.pkl", pickle_with(tensor(8, 0, 2, 1))}}), "a/data/0");
  expect_refused(zip_of({{"b/x", "y"}}), "data.pkl");
  expect_refused(zip_of({{"a/data.pkl", "."}, {"b/data.pkl", "."}}), "more than one");
  expect_refused(zip_of({{"a/data.pkl", "N."}, {"a/byteorder", "big"}}), "big-endian");
  expect_refused(zip_of({{"a/data.pkl", "N."}}, 8), "compressed");
}

TEST_F(PublishedCalibration, ReadsStoragesOfOtherWidths) {
  Bytes halves, brains, doubles;
  for (const double x : {1.5, -2.0, 0.25, 4.0, 0.0, 0.0, 0.0, 0.0}) {
    halves += little(Half(static_cast<float>(x)).bits, 2);
    brains += little(BFloat16(static_cast<float>(x)).bits, 2);
    doubles += little(std::bit_cast<std::uint64_t>(x), 8);
  }
  for (const auto& [type, storage] : {std::pair<const char*, Bytes>{"HalfStorage", halves},
                                      {"BFloat16Storage", brains},
                                      {"DoubleStorage", doubles}}) {
    Bytes pickle = pickle_with(tensor(8, 1, 2, 2));
    for (std::size_t at = 0; (at = pickle.find("FloatStorage", at)) != Bytes::npos; at += std::strlen(type))
      pickle.replace(at, std::strlen("FloatStorage"), type);
    const Calibration c = read_published_calibration(archive_of(pickle, storage), "x");
    EXPECT_EQ(c.heads.at({0, 0}).q_mean[0], std::complex<float>(-2, 1.5)) << type;
    EXPECT_EQ(c.heads.at({0, 0}).q_mean[1], std::complex<float>(4, -2)) << type;
  }
}

TEST_F(PublishedCalibration, MetadataOfAnyReleaseIsReadOver) {
  const Bytes more = word("a") + "N" + word("b") + "\x88" + word("c") + "\x89" + word("d") + word("") + word("e") +
                     "](" + number(1) + "e" + word("f") + "ctorch\nbfloat16\n" + word("g") + "G\x3f\xf0" +
                     Bytes(6, '\0') + word("h") + "\x8a" + Bytes(1, '\x02') + "\xff\xff" + word("i") + ")" +
                     word("inv_freq") + "N";
  const Calibration c = read_published_calibration(archive_of(pickle_with(tensor(8, 0, 2, 1), more)), "x");
  EXPECT_TRUE(c.inv_freq.empty());
  const Bytes frequencies = word("inv_freq") + "](" + "K\x01" + "G\x3f\xe0" + Bytes(6, '\0') + "e" +
                            word("sampled_heads") + "](" + "](" + number(0) + number(0) + "ee";
  EXPECT_EQ(read_published_calibration(archive_of(pickle_with(tensor(8, 0, 2, 1), frequencies)), "x").inv_freq,
            (std::vector<double>{1, .5}));
  expect_refused(archive_of(pickle_with(tensor(8, 0, 2, 1), word("inv_freq") + "](" + number(1) + "e")), "inv_freq");
  expect_refused(
      archive_of(pickle_with(tensor(8, 0, 2, 1), word("sampled_heads") + "](" + "](" + number(0) + number(7) + "ee")),
      "layer 0, head 7");
  expect_refused(archive_of(pickle_with(tensor(8, 0, 2, 1), word("head_dim") + number(7))), "head_dim");
}

TEST_F(PublishedCalibration, PicklesThatWantMoreThanDataAreRefused) {
  const auto object = [](const Bytes& pickle) { return archive_of(Bytes("\x80\x02") + pickle); };
  expect_refused(object("cos\nsystem\n(" + word("true") + "tR."), "os system");
  expect_refused(object("cbuiltins\neval\n(" + word("1") + "tR."), "builtins eval");
  expect_refused(object("}r" + little(0xfffffffe, 4) + "0."), "damaged");  // the index of a memo costs nothing
  expect_refused(object("j" + little(7, 4) + "."), "damaged");             // a memo that nothing was put in
  expect_refused(object("X" + little(0xffffffff, 4) + "a."), "ends in the middle");
  expect_refused(object("]q"), "ends in the middle");
  expect_refused(object(""), "ends in the middle");
  expect_refused(object("."), "damaged");
  expect_refused(object("R."), "damaged");
  expect_refused(object("u."), "damaged");
  expect_refused(object("}(K\x01u."), "damaged");
  expect_refused(object("](a."), "damaged");
  expect_refused(object("]]a.e"), "does not hold a dict");
  expect_refused(object("]q" + little(0, 1) + "h" + little(0, 1) + "a."),
                 "does not hold a dict");  // a list inside itself
  expect_refused(object("}}."), "damaged");
  expect_refused(object("\x8a" + Bytes(1, '\x09') + "123456789."), "9 bytes");
  expect_refused(object("N" + word("x") + "Q."), "damaged");
  expect_refused(object("iposix\nsystem\n."), "instruction 105");
  expect_refused(object(Bytes(100000, ']') + "."), "damaged");
  Bytes nested;
  for (int i = 0; i < 200000; ++i) nested += "](";
  expect_refused(object(nested + "K\x01" + Bytes(200000, 'e') + "."), "does not hold a dict");
  expect_refused(object("}(" + word("metadata") + "}" + word("stats") + "}u."), "head_dim");
  expect_refused(archive_of(pickle_with("N")), "layer00_head00.q_mean_real");
}

TEST_F(PublishedCalibration, KeysOfStatsAreLayersAndHeads) {
  const Bytes good = pickle_with(tensor(8, 0, 2, 1));
  for (const char* key :
       {"layer0_head0x", "layer-1_head00", "layer00_heads0", "head00_layer00", "layer99999_head0", "layer_head"}) {
    Bytes pickle = good;
    const std::size_t at = pickle.find(word("layer00_head00"));
    pickle.replace(at, word("layer00_head00").size(), word(key));
    expect_refused(archive_of(pickle), "layer<number>_head<number>");
  }
}

}  // namespace
}  // namespace kvkeep::lm
