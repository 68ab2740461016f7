// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes of their own, over Gloo: they keep what one machine keeps, and one that is killed in the
// middle of an event is an error on the others, before anything moves.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "kvkeep/torch_ranks.h"
#include "rank_engine.h"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace kvkeep::processes_test {
namespace {

using testing::RankEngine;
namespace fs = std::filesystem;

/// Budget and events of these runs, with few protected slots, so that scores decide.
constexpr const char* kSmall = "budget=24,interval=6,sink=2,recent=4";

/// Kills its process, or stops it for a while, in the middle of gather number `at`.
class Mortal final : public Collective {
 public:
  Mortal(std::shared_ptr<Collective> ranks, int at, int signal) : ranks_(std::move(ranks)), at_(at), signal_(signal) {}
  [[nodiscard]] std::int32_t rank() const override { return ranks_->rank(); }
  [[nodiscard]] std::int32_t size() const override { return ranks_->size(); }
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    if (++gathers_ == at_) ::kill(::getpid(), signal_);
    ranks_->all_gather(mine, all);
  }

 private:
  std::shared_ptr<Collective> ranks_;
  int at_, signal_, gathers_ = 0;
};

std::string digest(const RankEngine& engine) {
  std::uint64_t all = 0;
  for (const LayerKv& layer : engine.layers)
    for (const Tensor& side : {std::get<DenseKv>(layer).keys, std::get<DenseKv>(layer).values})
      for (std::int64_t i = 0; i < side.numel(); ++i)
        all = mixed_bits(all ^ std::bit_cast<std::uint32_t>(side.data<float>()[i]));
  return std::to_string(all);
}

/// Steps of a run, and a line for each row at its end. An event that fails: its error, and whether anything moved.
void run(RankEngine& engine, std::ostream& out) {
  engine.join(1);
  engine.join(2, 30);
  for (int n = 0; n < 30; ++n) {
    engine.observe(n == 0 ? std::vector<std::pair<SequenceId, std::int32_t>>{{1, 40}, {2, 30}}
                          : std::vector<std::pair<SequenceId, std::int32_t>>{{1, 1}, {2, 1}});
    const std::string before = digest(engine);
    const std::vector<std::int32_t> lengths = engine.flat;
    try {
      static_cast<void>(engine.keeper.step(engine.view()));
    } catch (const RankError& error) {
      out << "failed in step " << n << ": " << error.what() << "\n"
          << (before == digest(engine) && lengths == engine.flat ? "nothing moved" : "something moved") << "\n";
      return;
    }
    engine.settle();
  }
  for (const SequenceId id : {1, 2})
    for (std::int32_t l = 0; l < RankEngine::kLayers; ++l)
      for (std::int32_t h = 0; h < RankEngine::kHeads; ++h) {
        if (!engine.has(h)) continue;
        out << id << " " << l << " " << h << ":";
        for (const std::int32_t position : engine.positions(id, l, h)) out << " " << position;
        out << "\n";
      }
}

/// What a process with these arguments does: --rank R SIZE FOLDER POLICY [GATHER SIGNAL]
int be_a_rank(std::span<char*> words) {
  const int rank = std::stoi(words[0]), size = std::stoi(words[1]);
  const fs::path folder = words[2];
  const auto options = c10d::ProcessGroupGloo::Options::create_default(std::chrono::seconds(60));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  const auto store = c10::make_intrusive<c10d::FileStore>((folder / "store").string(), size);
  std::shared_ptr<Collective> ranks = std::make_shared<TorchRanks>(
      c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options), std::chrono::seconds(5));
  if (words.size() > 4) ranks = std::make_shared<Mortal>(ranks, std::stoi(words[4]), std::stoi(words[5]));
  std::ofstream out(folder / words[0]);
  RankEngine engine(words[3], ranks);
  run(engine, out);
  out.flush();
  ::_exit(0);  // a group whose ranks are gone may wait for them when it ends
}

/// A folder of a test, with what ranks wrote.
class Ranks {
 public:
  explicit Ranks(int size) : size_(size), folder_(fs::path(::testing::TempDir()) / text("kvkeep-ranks-", ::getpid())) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~Ranks() { fs::remove_all(folder_); }
  Ranks(const Ranks&) = delete;

  /// Starts all ranks and waits for them; `last` is given to the last one.
  void run(const std::string& policy, const std::vector<std::string>& last = {}) {
    std::vector<pid_t> children;
    for (int r = 0; r < size_; ++r) {
      std::vector<std::string> words{"/proc/self/exe",      "--rank",         std::to_string(r),
                                     std::to_string(size_), folder_.string(), policy};
      if (r == size_ - 1) words.insert(words.end(), last.begin(), last.end());
      std::vector<char*> arguments;
      for (std::string& word : words) arguments.push_back(word.data());
      arguments.push_back(nullptr);
      pid_t child = 0;
      ASSERT_EQ(::posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments.data(), environ), 0);
      children.push_back(child);
    }
    for (int r = 0; r < size_; ++r) {
      int status = 0;
      const bool stops = r == size_ - 1 && last.size() == 2 && last[1] == std::to_string(SIGSTOP);
      ASSERT_EQ(::waitpid(children[static_cast<std::size_t>(r)], &status, stops ? WUNTRACED : 0),
                children[static_cast<std::size_t>(r)]);
      if (stops) {
        ::kill(children[static_cast<std::size_t>(r)], SIGKILL);
        ::waitpid(children[static_cast<std::size_t>(r)], &status, 0);
      }
    }
  }
  [[nodiscard]] std::vector<std::string> lines(int rank) const {
    std::ifstream in(folder_ / std::to_string(rank));
    std::vector<std::string> all;
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
  }

 private:
  int size_;
  fs::path folder_;
};

std::vector<std::string> alone(const std::string& policy) {
  RankEngine engine(policy);
  std::stringstream out;
  run(engine, out);
  std::vector<std::string> all;
  for (std::string line; std::getline(out, line);) all.push_back(line);
  std::ranges::sort(all);
  return all;
}

TEST(RankProcesses, KeepWhatOneMachineKeeps) {
  for (const std::string& policy :
       {text("tova,", kSmall), text("keydiff,share=union,", kSmall), text("adakv-tova,", kSmall),
        text("threshold-knorm,threshold=-2,", kSmall), text("ams-tova,allocator.window=6,", kSmall),
        text("rpc,heads=all,window=6,", kSmall),
        text("ams-keydiff,variant=official,allocator.window=6,min_segment=2,max_segment=12,", kSmall)})
    for (const int size : {2, 4}) {
      Ranks ranks(size);
      ranks.run(policy);
      std::vector<std::string> together;
      for (int r = 0; r < size; ++r) {
        const auto lines = ranks.lines(r);
        together.insert(together.end(), lines.begin(), lines.end());
      }
      std::ranges::sort(together);
      EXPECT_EQ(together, alone(policy)) << policy << " on " << size;
    }
}

TEST(RankProcesses, OneThatIsKilledInAnEventIsAnErrorOnTheOthersAndNothingMoved) {
  for (const int size : {2, 4})
    for (const std::string& policy : {text("tova,", kSmall), text("adakv-tova,", kSmall)}) {
      Ranks ranks(size);
      ranks.run(policy, {"3", std::to_string(SIGKILL)});
      EXPECT_TRUE(ranks.lines(size - 1).empty());
      for (int r = 0; r + 1 < size; ++r) {
        const auto lines = ranks.lines(r);
        ASSERT_EQ(lines.size(), 2U) << policy << ", rank " << r << " of " << size;
        EXPECT_NE(lines[0].find(text("ranks: rank ", r, " of ", size, " gathered nothing: ")), std::string::npos)
            << lines[0];
        EXPECT_EQ(lines[1], "nothing moved");
      }
    }
}

TEST(RankProcesses, OneThatLagsIsAnErrorOnTheOthersOnceTheirTimeIsOver) {
  Ranks ranks(2);
  ranks.run(text("tova,", kSmall), {"2", std::to_string(SIGSTOP)});
  const auto lines = ranks.lines(0);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_NE(lines[0].find("gathered nothing"), std::string::npos) << lines[0];
  EXPECT_EQ(lines[1], "nothing moved");
}

}  // namespace
}  // namespace kvkeep::processes_test

int main(int argc, char** argv) {
  if (argc > 2 && std::string_view(argv[1]) == "--rank")
    return kvkeep::processes_test::be_a_rank(std::span(argv + 2, static_cast<std::size_t>(argc - 2)));
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
