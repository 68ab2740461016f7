// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/run_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <functional>

#include "message_of.h"
#include "temporary_folder.h"

namespace kvkeep::run_files_test {
namespace {

namespace fs = std::filesystem;
using io::RunFiles;

class RunFilesTest : public testing::TemporaryFolder {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(TemporaryFolder::SetUp());
    fs::create_directories(folder_ / "model" / "sub");
    for (const char* name : {"in", "other", "model/config.json", "model/sub/weights"})
      std::ofstream(folder_ / name) << "x";
    fs::create_symlink("in", folder_ / "link");
    fs::create_symlink("link", folder_ / "link_to_link");
    fs::create_hard_link(folder_ / "in", folder_ / "hard");
    fs::create_symlink(folder_ / "other", folder_ / "model" / "blob");
    fs::create_hard_link(folder_ / "model" / "config.json", folder_ / "config");
    fs::create_directory_symlink(folder_ / "model", folder_ / "same_model");
  }

  [[nodiscard]] bool refused(const fs::path& input, const fs::path& output) const {
    bool first = false, second = false;
    RunFiles files, turned;
    files.reads("--in", folder_ / input);
    turned.writes("--out", folder_ / output);
    try {
      files.writes("--out", folder_ / output);
    } catch (const InvalidArgument&) {
      first = true;
    }
    try {
      turned.reads("--in", folder_ / input);
    } catch (const InvalidArgument&) {
      second = true;
    }
    EXPECT_EQ(first, second) << "in any order";
    return first;
  }
};

TEST_F(RunFilesTest, NothingIsWrittenOverWhatIsReadByWhateverName) {
  const std::string through = "../" + folder_.filename().string() + "/in";
  for (const char* input : {"in", "link", "hard"})
    for (const std::string& output : {std::string("in"), std::string("./model/../in"), through, std::string("link"),
                                      std::string("link_to_link"), std::string("hard")})
      EXPECT_TRUE(refused(input, output)) << input << ' ' << output;
  for (const char* output : {"other", "new", "model/config.json"}) EXPECT_FALSE(refused("in", output)) << output;
}

TEST_F(RunFilesTest, AFolderIsReadWithEveryFileInIt) {
  for (const char* model : {"model", "model/", "same_model", "model/sub/.."}) {
    for (const char* output :
         {"model/config.json", "same_model/config.json", "config", "other", "model/blob", "model/sub/weights", "model"})
      EXPECT_TRUE(refused(model, output)) << model << ' ' << output;
    for (const char* output : {"model/new", "in", "new"})
      EXPECT_FALSE(refused(model, output)) << model << ' ' << output;
  }
}

TEST_F(RunFilesTest, TwoOutputsAreTwoFiles) {
  for (const auto& [one, other] : {std::pair("new", "./new"), std::pair("new", "same_model/../new"),
                                   std::pair("in", "hard"), std::pair("model/new", "same_model/new")}) {
    RunFiles files;
    files.writes("--out", folder_ / one);
    EXPECT_THROW(files.writes("--ranks", folder_ / other), InvalidArgument) << other;
  }
  fs::create_symlink("target", folder_ / "to_new");
  RunFiles files;
  files.writes("--out", folder_ / "target");
  EXPECT_EQ(testing::message_of([&] { files.writes("--ranks", folder_ / "to_new"); }),
            "--out and --ranks both name '" + (folder_ / "to_new").string() + "'; allowed two files");
}

TEST_F(RunFilesTest, SaysWhichOptionReadsIt) {
  RunFiles files;
  files.reads("--model", folder_ / "model");
  EXPECT_EQ(testing::message_of([&] { files.writes("--html", folder_ / "config"); }),
            "--html names '" + (folder_ / "config").string() + "', which --model reads; allowed another file");
}

TEST_F(RunFilesTest, AnOpenFileIsTheFile) {
  const int descriptor = ::open((folder_ / "in").c_str(), O_RDONLY);
  ASSERT_GE(descriptor, 0);
  RunFiles files;
  files.reads("--in", "/dev/fd/" + std::to_string(descriptor));
  EXPECT_THROW(files.writes("--out", folder_ / "hard"), InvalidArgument);
  ::close(descriptor);
}

// The shell makes the file before the program starts.
TEST_F(RunFilesTest, AStreamMayLeadToANewFileInAFolderThatIsRead) {
  const auto refused = [&](const char* file, const char* input) {
    const int before = ::dup(STDOUT_FILENO), target = ::open((folder_ / file).c_str(), O_WRONLY | O_CREAT, 0600);
    ::dup2(target, STDOUT_FILENO);
    bool thrown = false;
    try {
      RunFiles files;
      files.reads("--in", folder_ / input);
      files.writes_streams();
    } catch (const InvalidArgument&) {
      thrown = true;
    }
    ::dup2(before, STDOUT_FILENO);
    ::close(before);
    ::close(target);
    return thrown;
  };
  EXPECT_FALSE(refused("model/new", "model"));
  EXPECT_TRUE(refused("model/new", "model/new")) << "it is the input itself";
  EXPECT_TRUE(refused("model/config.json", "model")) << "as >> leaves it";
}

TEST_F(RunFilesTest, WhatIsNotThereIsNotTheSame) {
  EXPECT_FALSE(refused("none", "none_else"));
  EXPECT_TRUE(refused("none", "./none"));
  EXPECT_FALSE(refused("no/folder", "no/other"));
  EXPECT_TRUE(refused("no/folder", "no/./folder"));
  fs::create_symlink("loop", folder_ / "loop");
  EXPECT_TRUE(refused("loop", "loop"));
}

}  // namespace
}  // namespace kvkeep::run_files_test
