// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/safetensors.h"
#include "arrays.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <thread>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/state/state_file.h"

namespace kvkeep::io::safetensors_test {
namespace {

using testing::Array;

namespace fs = std::filesystem;

class Safetensors : public ::testing::Test {
 protected:
  Safetensors()
      : folder_(fs::temp_directory_path() / text("kvkeep_safetensors_", ::getpid(), "_",
                                                 ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::create_directories(folder_);
  }
  ~Safetensors() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  [[nodiscard]] std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
};

// A file by its header and its number of data bytes, length field as it should be.
std::string file_of(const std::string& header, std::size_t data_bytes) {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header + std::string(data_bytes, '\1');
}

// What the reader says when it refuses; empty where it accepts.
std::string refusal(const std::string& bytes) {
  try {
    (void)SafetensorsFile::from_bytes(bytes, "lying.safetensors");
    return {};
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

void expect_refused(const std::string& bytes, std::initializer_list<const char*> named) {
  const std::string message = refusal(bytes);
  EXPECT_FALSE(message.empty()) << "accepted";
  for (const char* word : named) EXPECT_NE(message.find(word), std::string::npos) << message;
  EXPECT_NE(message.find("lying.safetensors"), std::string::npos) << message;
}

TEST_F(Safetensors, ComeBackBitForBitInEveryDtype) {
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const Dtype dtype : {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::i64, Dtype::i32, Dtype::i16,
                            Dtype::i8, Dtype::u8, Dtype::boolean, Dtype::u16, Dtype::u32, Dtype::u64}) {
    const Array all = Array::empty({3, 7}, dtype);
    for (std::int64_t i = 0; i < all.nbytes(); ++i)
      all.bytes()[i] = static_cast<std::byte>(dtype == Dtype::boolean ? i % 2 : 7 * i);
    tensors.emplace_back(name_of(dtype), all);
  }
  tensors.emplace_back("empty", Array::zeros({0, 4}, Dtype::f16));
  tensors.emplace_back("scalar", Array::full({}, 1));
  const fs::path path = folder_ / "all.safetensors";
  write_safetensors(path, tensors, {{"kind", "event"}, {"quote\"", "line\nbreak"}});

  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.metadata().at("kind"), "event");
  EXPECT_EQ(file.metadata().at("quote\""), "line\nbreak");
  EXPECT_EQ(file.names().size(), tensors.size());
  for (const auto& [name, written] : tensors) {
    const Tensor read = file.tensor(name);
    ASSERT_EQ(read.dtype(), written.dtype()) << name;
    ASSERT_EQ(read.sizes(), written.sizes()) << name;
    EXPECT_TRUE(read.numel() == 0 ||
                std::memcmp(read.bytes(), written.bytes(), static_cast<std::size_t>(read.nbytes())) == 0)
        << name;
  }
}

TEST_F(Safetensors, AreWrittenTheSameTwiceWithAnAlignedHeader) {
  const std::vector<std::pair<std::string, Tensor>> tensors{{"b", Array::full({3}, 1, Dtype::u8)},
                                                            {"a", Array::full({2, 2}, 1).permute({1, 0})}};
  write_safetensors(folder_ / "1", tensors);
  write_safetensors(folder_ / "2", tensors);
  const auto bytes = [](const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string{std::istreambuf_iterator<char>(in), {}};
  };
  EXPECT_EQ(bytes(folder_ / "1"), bytes(folder_ / "2"));
  EXPECT_EQ(static_cast<unsigned char>(bytes(folder_ / "1")[0]) % 8, 0);
  EXPECT_EQ(SafetensorsFile::open(folder_ / "1").names(), (std::vector<std::string>{"b", "a"}));
}

TEST_F(Safetensors, TensorsOutliveTheFileObjectAndMisalignedDataIsCopied) {
  const std::string header =
      R"({"odd":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})";
  Tensor x;
  {
    const SafetensorsFile file = SafetensorsFile::from_bytes(file_of(header, 9));
    x = file.tensor("x");
  }
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(x.bytes()) % 4, 0U);
  EXPECT_EQ(std::to_integer<int>(*x.bytes()), 1);
}

TEST_F(Safetensors, RefuseAHeaderThatIsNotOne) {
  expect_refused("", {"0 bytes"});
  expect_refused(std::string(7, '\0'), {"7 bytes"});
  expect_refused(std::string(8, '\0'), {"'{'"});
  expect_refused(std::string(8, '\xff') + "{}", {"100000000"});
  expect_refused(file_of("{}", 0).substr(0, 9), {"truncated"});
  expect_refused(file_of("[]", 0), {"'{'"});
  expect_refused(file_of(" {}", 0), {"'{'"});
  expect_refused(file_of("{\"a\":", 0), {"JSON"});
  expect_refused(file_of("{\"\xff\":1}", 0), {"UTF-8"});
  EXPECT_EQ(refusal(file_of("{}", 0)), "");
  EXPECT_EQ(refusal(file_of("{}      ", 0)), "");
}

TEST_F(Safetensors, RefuseALyingTensorByName) {
  const auto one = [](const std::string& described, std::size_t bytes = 8) {
    return file_of("{\"w\":" + described + "}", bytes);
  };
  EXPECT_EQ(refusal(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})")), "");
  expect_refused(one(R"({"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]})"), {"'w'", "F8_E4M3", "BF16"});
  expect_refused(one(R"({"dtype":7,"shape":[8],"data_offsets":[0,8]})"), {"'w'", "dtype"});
  expect_refused(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), {"'w'", "8 bytes", "12"});
  expect_refused(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,12]})"), {"'w'", "12", "truncated"});
  expect_refused(one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), {"'w'", "data_offsets"});
  expect_refused(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})"), {"'w'", "data_offsets"});
  expect_refused(one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), {"'w'", "-2", "shape"});
  expect_refused(one(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"), {"'w'", "shape"});
  expect_refused(one(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})"), {"'w'", "shape"});
  expect_refused(one(R"({"dtype":"F32","shape":[2]})"), {"'w'", "data_offsets"});
  expect_refused(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1})"), {"'w'"});
  expect_refused(one("[]"), {"'w'"});
  expect_refused(one(R"({"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]})"), {"'w'", "overflow"});
  expect_refused(one(R"({"dtype":"U8","shape":[0,4611686018427387904,4611686018427387904],"data_offsets":[0,0]})", 0),
                 {"'w'", "overflow"});
  expect_refused(one(R"({"dtype":"F32","shape":[18446744073709551615,0],"data_offsets":[0,0]})", 0), {"'w'"});
}

TEST_F(Safetensors, RefuseOverlapsHolesAndBytesOfNobody) {
  const auto two = [](const char* a, const char* b, std::size_t bytes) {
    return file_of(std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + a +
                       R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}",
                   bytes);
  };
  EXPECT_EQ(refusal(two("[4,8]", "[0,4]", 8)), "");
  expect_refused(two("[0,4]", "[2,6]", 6), {"'b'", "overlap"});
  expect_refused(two("[0,4]", "[0,4]", 4), {"'b'", "overlap"});
  expect_refused(two("[0,4]", "[5,9]", 9), {"'b'", "hole"});
  expect_refused(two("[1,5]", "[5,9]", 9), {"'a'", "hole"});
  expect_refused(two("[0,4]", "[4,8]", 9), {"belong to a tensor"});
}

TEST_F(Safetensors, RefuseNamesAndFieldsSaidTwice) {
  const std::string w = R"("w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  expect_refused(file_of("{" + w + "," + w + "}", 0), {"'w'", "twice"});
  expect_refused(file_of(R"({"w":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}})", 0),
                 {"'dtype'", "twice"});
  expect_refused(file_of(R"({"__metadata__":{"a":"1","a":"2"}})", 0), {"'a'", "twice"});
  expect_refused(file_of(R"({"__metadata__":{"a":1}})", 0), {"__metadata__", "'a'"});
  expect_refused(file_of(R"({"__metadata__":[]})", 0), {"__metadata__"});
}

TEST_F(Safetensors, EveryTruncationOfAFileIsRefused) {
  const fs::path path = folder_ / "whole.safetensors";
  write_safetensors(path, {{"a", Array::full({5}, 1)}, {"b", Array::full({3, 3}, 1, Dtype::f16)}}, {{"k", "v"}});
  std::ifstream in(path, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  ASSERT_EQ(refusal(whole), "");
  for (std::size_t n = 0; n < whole.size(); ++n) EXPECT_NE(refusal(whole.substr(0, n)), "") << n;
}

TEST_F(Safetensors, NamesTheFileAndTheTensorThatIsNotThere) {
  EXPECT_THROW((void)SafetensorsFile::open(folder_ / "absent"), InvalidArgument);
  EXPECT_THROW((void)SafetensorsFile::open(folder_), InvalidArgument);
  const SafetensorsFile file = SafetensorsFile::from_bytes(file_of("{}", 0), "small");
  EXPECT_FALSE(file.has("w"));
  try {
    (void)file.tensor("w");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("small has no tensor 'w'"), std::string::npos) << error.what();
  }
}

TEST_F(Safetensors, WritingRefusesWithoutLeavingAnythingBehind) {
  const Array x = Array::full({2}, 1);
  EXPECT_THROW(write_safetensors(folder_ / "f", {{"a", x}, {"a", x}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(folder_ / "f", {{"__metadata__", x}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(folder_ / "f", {{"\xff", x}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(folder_ / "f", {{"a", Array()}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(folder_ / "f", {{"a", Array::empty({1}, Dtype::complex64)}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(folder_ / "absent" / "f", {{"a", x}}), InvalidArgument);
  EXPECT_THROW(write_safetensors(folder_, {{"a", x}}), InvalidArgument);
  EXPECT_EQ(files(), 0U);
}

TEST_F(Safetensors, AnAtomicFileAppearsAtCommitAndNeverHalf) {
  const fs::path path = folder_ / "result.json";
  write_text_atomically(path, "old");
  {
    AtomicFile file(path);
    file.write("half of the new te");
  }
  EXPECT_EQ(files(), 1U);
  {
    AtomicFile file(path);
    file.write("new");
    EXPECT_EQ(files(), 2U);
    file.commit();
  }
  EXPECT_EQ(files(), 1U);
  std::ifstream in(path);
  EXPECT_EQ((std::string{std::istreambuf_iterator<char>(in), {}}), "new");
}

TEST_F(Safetensors, AnInterruptedProcessCanRemoveItsUnfinishedFiles) {
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicFile first(folder_ / "a"), second(folder_ / "b");
    first.write("half");
    remove_unfinished_files();  // what a SIGINT handler calls
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(files(), 0U);
}

TEST_F(Safetensors, ManyFilesMayBeWrittenOneAfterAnother) {
  for (int i = 0; i < 100; ++i) write_text_atomically(folder_ / "same", text(i));
  EXPECT_EQ(files(), 1U);
}

// An earlier version refused the 33rd.
TEST_F(Safetensors, ManyFilesMayBeWrittenAtOnce) {
  std::vector<std::thread> writers;
  std::atomic<int> wrong{0};
  std::barrier all_open(64);
  for (int i = 0; i < 64; ++i)
    writers.emplace_back([&, i] {
      std::unique_ptr<AtomicFile> file;
      try {
        file = std::make_unique<AtomicFile>(folder_ / text(i));
      } catch (const Error&) {
        ++wrong;
      }
      all_open.arrive_and_wait();
      if (file == nullptr) return;
      file->write("whole");
      file->commit();
    });
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(files(), 64U);
  std::vector<std::unique_ptr<RemovedOnSignal>> spills;
  for (int i = 0; i < 200; ++i) spills.push_back(std::make_unique<RemovedOnSignal>(folder_ / "none"));
  write_text_atomically(folder_ / "beside", "them");
}

// In an earlier version a file that a killed process of the same number had left stood in the way for ever.
TEST_F(Safetensors, WhatAKilledProcessLeftIsInNobodysWay) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (int i = 0; i < 1000; ++i)
      std::ofstream(folder_ / text(".result.", ::getpid(), "-", i, ".unfinished")) << "left";
    write_text_atomically(folder_ / "result", "new");
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(files(), 1001U) << "what was left stays";
}

// An earlier version put a file in the place of a relative link whose target was not there yet.
TEST_F(Safetensors, AFileIsMadeWhereALinkPointsTo) {
  fs::create_directory(folder_ / "sub");
  fs::create_symlink("sub/target", folder_ / "link");
  fs::create_symlink("link", folder_ / "second");
  write_text_atomically(folder_ / "second", "text");
  EXPECT_TRUE(fs::is_symlink(folder_ / "second") && fs::is_symlink(folder_ / "link"));
  EXPECT_TRUE(fs::is_regular_file(folder_ / "sub" / "target"));
  write_text_atomically(folder_ / "second", "other text");
  EXPECT_EQ(fs::file_size(folder_ / "sub" / "target"), 10U);
  fs::create_symlink("loop", folder_ / "loop");
  EXPECT_THROW(write_text_atomically(folder_ / "loop", "text"), InvalidArgument);
}

// What is put around the name while the file is written made it too long in an earlier version.
TEST_F(Safetensors, ANameMayBeAsLongAsTheSystemAllows) {
  write_text_atomically(folder_ / std::string(255, 'n'), "text");
  EXPECT_TRUE(fs::exists(folder_ / std::string(255, 'n')));
  EXPECT_THROW(write_text_atomically(folder_ / std::string(256, 'n'), "text"), InvalidArgument);
}

// An earlier version waited for somebody who writes into the pipe.
TEST_F(Safetensors, APipeIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_THROW((void)SafetensorsFile::open(folder_ / "pipe"), InvalidArgument);
  EXPECT_THROW((void)SafetensorsFile::read(folder_ / "pipe"), InvalidArgument);
}

// An earlier version mapped every file: to cut it ended the process (SIGBUS).
TEST_F(Safetensors, ACopyOutlivesItsFile) {
  const fs::path path = folder_ / "cut.safetensors";
  const Array values = Array::range(0, 100000);
  write_safetensors(path, {{"values", values}});
  const SafetensorsFile file = SafetensorsFile::read(path);
  const Array before = file.tensor("values");
  fs::resize_file(path, 100);
  EXPECT_TRUE(before.equal(values));
  EXPECT_TRUE(Array(file.tensor("values")).equal(values));
  EXPECT_THROW((void)SafetensorsFile::read(path), InvalidArgument);
}

TEST_F(Safetensors, AStateIsReadFromACopy) {
  const fs::path path = folder_ / "state";
  const Array values = Array::range(0, 100000);
  write_state(path, {{{"values", values}}, {{"policy", "{}"}}});
  const StateFile state = StateFile::open(path);
  fs::resize_file(path, 100);
  EXPECT_TRUE(Array(state.tensor("values", Dtype::f32, {-1})).equal(values));
  EXPECT_THROW((void)StateFile::open(path), InvalidArgument);
}

}  // namespace
}  // namespace kvkeep::io::safetensors_test
