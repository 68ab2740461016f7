// SPDX-License-Identifier: Apache-2.0
// Sequences that are saved from a device or come back to one: they go on there, and on the CPU, as if they had never
// left, and a file that does not fit changes nothing.

#include "captured_graph.h"
#include "engines.h"
#include "forked.h"
#include "fresh_accelerator.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/state/state_file.h"
#include "message_of.h"
#include "restored.h"

namespace kvkeep::cuda::restore_test {
namespace {

using testing::Array;
using namespace engines;
using File = testing::StateFileOfATest;
using testing::message_of;

class DeviceRestore : public ::testing::TestWithParam<EngineCase> {
 protected:
  void SetUp() override {
    if (!has_machine()) GTEST_SKIP() << "no GPU here";
  }
};

std::unique_ptr<Engine> engine_of(const EngineCase& stay, bool paged, bool device) {
  return engines::engine_of(stay, paged, PageLayout::slot_head, device ? fresh_accelerator() : nullptr);
}

void expect_same_slots(const Engine& a, const Engine& b, SequenceId id) {
  ASSERT_EQ(a.lengths.at(id), b.lengths.at(id));
  ASSERT_EQ(a.keeper.logical_length(id), b.keeper.logical_length(id));
  for (std::int32_t r = 0; r < kRows; ++r) {
    const auto x = a.keeper.positions(id, r / kHeads, r % kHeads), y = b.keeper.positions(id, r / kHeads, r % kHeads);
    ASSERT_TRUE(std::equal(x.begin(), x.end(), y.begin(), y.end())) << "positions of row " << r;
    const auto c = a.keeper.credit(id, r / kHeads, r % kHeads), d = b.keeper.credit(id, r / kHeads, r % kHeads);
    ASSERT_EQ(c.size(), d.size());
    for (std::size_t t = 0; t < c.size(); ++t) ASSERT_NEAR(c[t], d[t], 1e-6 + 1e-4 * std::abs(c[t]));
  }
}

void take_back(Engine& engine, SequenceId id, std::int32_t tokens) {
  engine.keeper.truncate(id, engine.keeper.logical_length(id) - tokens);
  Ints& lengths = engine.lengths.at(id);
  for (std::int32_t& length : lengths) length -= tokens;
  if (auto* paged = dynamic_cast<PagedEngine*>(&engine))
    paged->sequences.truncate(id, *std::ranges::max_element(lengths));
}

/// A sequence lives here, moves there, and goes on in both with the same numbers.
void expect_goes_on(Engine& here, Engine& there) {
  const File file("device");
  oracle::Random random(31);
  here.join(1), here.join(3);
  there.join(2);
  here.step(numbers_of(random, {{1, 70}, {3, 20}}));
  there.step(numbers_of(random, {{2, 40}}));
  for (int i = 0; i < 20; ++i) here.step(numbers_of(random, {{1, 1}, {3, 1 + i % 2}}));
  const std::int64_t events = here.keeper.totals().events;
  ASSERT_GT(events, 0);
  ASSERT_NO_FATAL_FAILURE(testing::bring_over(here, there, 3, file.path));
  ASSERT_NO_FATAL_FAILURE(expect_same_slots(here, there, 3));
  for (int i = 0; i < 24; ++i) {
    const std::int32_t tokens = 1 + i % 3;
    const Numbers numbers = numbers_of(random, {{3, tokens}});
    const Report a = here.step(numbers), b = there.step(numbers);
    ASSERT_EQ(a.slots_dropped, b.slots_dropped) << "step " << i;
    if (a.cuts.empty() && tokens == 3)  // speculative tokens that are taken back
      for (Engine* engine : {&here, &there}) take_back(*engine, 3, 2);
    ASSERT_NO_FATAL_FAILURE(expect_same_slots(here, there, 3)) << "step " << i;
  }
  EXPECT_GE(here.keeper.totals().events, events + 3);
}

TEST_P(DeviceRestore, GoesOnWhereverItWasSavedAndIsRestored) {
  for (const bool paged : {false, true})
    for (const auto& [from, to] : {std::pair{true, true}, {true, false}, {false, true}}) {
      SCOPED_TRACE(text(paged ? "pages" : "dense", from ? ", from a device" : ", from the CPU",
                        to ? " to a device" : " to the CPU"));
      const auto here = engine_of(GetParam(), paged, from), there = engine_of(GetParam(), paged, to);
      ASSERT_NO_FATAL_FAILURE(expect_goes_on(*here, *there));
    }
}

INSTANTIATE_TEST_SUITE_P(
    Policies, DeviceRestore,
    ::testing::Values(EngineCase{"amstova", "ams-tova,budget=32,interval=8,sink=2,recent=8,window=4,min_segment=2"},
                      EngineCase{"credit", "ams-tova,credit=true,budget=32,interval=8,recent=8,window=4"},
                      EngineCase{"h2o", "h2o,budget=32,interval=8,sink=2,recent=8"},
                      EngineCase{"rkv", "rkv,budget=32,interval=8,recent=8,sink=2"},
                      EngineCase{"snapkv", "snapkv,budget=32,interval=8,sink=2,window=6"},
                      EngineCase{"expected", "expected,budget=32,interval=8,sink=2,recent=8"},
                      EngineCase{"given", "given,budget=32,interval=8,sink=2"},
                      EngineCase{"prompt", "tova,budget=32,interval=8,recent=4,protect_prompt=true"},
                      EngineCase{"pyramidkv", "pyramidkv-knorm,budget=32,interval=8,recent=4", true}),
    [](const auto& p) { return std::string(p.param.name); });

using DeviceState = OnDevice;

TEST_F(DeviceState, ComesBackBeforeItsFirstEventWithItsPrefixAndPins) {
  const EngineCase stay{"tova", "tova,budget=32,interval=8,sink=2,recent=4"};
  for (const auto& [from, to] : {std::pair{true, true}, {true, false}, {false, true}}) {
    const File file("prefix");
    const auto here = engine_of(stay, false, from), there = engine_of(stay, false, to);
    oracle::Random random(7);
    here->join(1);
    here->step(numbers_of(random, {{1, 12}}));
    here->fork(3, 1, 9);
    here->step(numbers_of(random, {{3, 4}}));
    here->keeper.part<parts::Pins>().pin(3, 5, 11);
    ASSERT_NO_FATAL_FAILURE(testing::bring_over(*here, *there, 3, file.path));
    for (int i = 0; i < 40; ++i) {
      const Numbers numbers = numbers_of(random, {{3, 1}});
      here->step(numbers), there->step(numbers);
      ASSERT_NO_FATAL_FAILURE(expect_same_slots(*here, *there, 3)) << "step " << i;
    }
    EXPECT_GE(there->keeper.totals().events, 2);
    ASSERT_EQ(there->keeper.part<parts::Pins>().pinned(3).size(), 1U);
    for (std::int32_t p = 5; p < 11; ++p)
      EXPECT_TRUE(std::ranges::binary_search(there->keeper.positions(3, 1, 1), p)) << p;
  }
}

TEST_F(DeviceState, GoesOnWithoutTheLogSumExpsThatItLeaves) {
  const EngineCase stay{"amstova", "ams-tova,budget=32,interval=8,sink=2,recent=8,window=4,min_segment=2"};
  const auto here = engine_of(stay, false, true), there = engine_of(stay, true, true);
  here->gives_log_sum_exp = there->gives_log_sum_exp = true;
  ASSERT_NO_FATAL_FAILURE(expect_goes_on(*here, *there));
}

TEST_F(DeviceState, IsNeitherSavedNorRestoredWhereAFileDoesNotFit) {
  const File whole("whole"), broken("broken");
  const EngineCase stay{"amsgiven", "ams-given,credit=true,budget=32,interval=8,recent=8,window=4"};
  const auto here = engine_of(stay, false, true);
  oracle::Random random(11);
  here->join(1);
  here->step(numbers_of(random, {{1, 60}}));
  for (int i = 0; i < 12; ++i) here->step(numbers_of(random, {{1, 1}}));
  here->keeper.save(1, whole.path);
  const std::string bytes = whole.bytes();
  const auto there = engine_of(stay, false, true);
  for (std::size_t at = 3; at < bytes.size(); at += 211) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 4);
    if (changed.substr(at - at % 8, 8).find_first_not_of(' ') == std::string::npos) continue;
    broken.write(changed);
    EXPECT_NE(message_of<InvalidArgument>([&] { there->keeper.restore(1, broken.path); }).find(broken.path.string()),
              std::string::npos)
        << at;
    EXPECT_FALSE(there->keeper.knows(1)) << at;
  }

  // Right by its checksum and wrong by its numbers: refused, or a sequence that can go on.
  const io::SafetensorsFile honest = io::SafetensorsFile::open(whole.path);
  int refused = 0, taken = 0;
  for (int round = 0; round < 150; ++round) {
    StateTensors tensors;
    for (const std::string& name : honest.names()) tensors.emplace_back(name, clone(honest.tensor(name)));
    Tensor& t = tensors[static_cast<std::size_t>(random.between(0, static_cast<int>(tensors.size()) - 1))].second;
    if (random.between(0, 4) == 0 && t.dim() > 0 && t.size(0) > 0) {
      t = random.between(0, 1) == 0 ? clone(t.narrow(0, 0, t.size(0) - 1))
                                    : Tensor(Array::cat({t, t.narrow(0, 0, 1)}, 0));
    } else if (t.nbytes() >= 4) {
      const std::int32_t values[] = {-1, 0, 1, 7, 100, 1 << 30, INT32_MAX, INT32_MIN};
      const std::int32_t value = values[random.between(0, 7)];
      const auto at = static_cast<std::size_t>(random.between(0, static_cast<int>(t.nbytes() / 4) - 1)) * 4;
      std::memcpy(t.bytes() + at, &value, 4);
    }
    write_state(broken.path, {tensors, honest.metadata()});
    const auto other = engine_of(stay, false, true);
    try {
      other->keeper.restore(1, broken.path);
    } catch (const Error& e) {
      ++refused;
      EXPECT_NE(std::string(e.what()).find(broken.path.string()), std::string::npos) << e.what();
      EXPECT_FALSE(other->keeper.knows(1));
      continue;
    }
    ++taken;
    Ints& lengths = other->lengths[1];
    for (std::int32_t r = 0; r < kRows; ++r)
      lengths.push_back(other->keeper.physical_length(1, r / kHeads, r % kHeads));
    try {
      for (int i = 0; i < 10; ++i) other->step(numbers_of(random, {{1, 1}}));
      other->keeper.truncate(1, other->keeper.logical_length(1) - 1);
    } catch (const Error&) {
    }
    other->keeper.leave(1);
  }
  EXPECT_GT(refused, 30);
  EXPECT_GT(taken, 10);
}

TEST_F(DeviceState, IsNotSavedOrRestoredWhileTheStreamIsCaptured) {
  const EngineCase stay{"tova", "tova,budget=32,interval=8,sink=2,recent=4"};
  const File file("captured");
  const c10::Stream side = side_stream(fresh_accelerator()->device());
  const c10::StreamGuard guard(side);
  const auto engine = engine_of(stay, false, true);
  oracle::Random random(2);
  engine->join(1);
  engine->step(numbers_of(random, {{1, 30}}));
  std::string save, restore;
  const CapturedGraph graph(side, [&] {
    save = message_of<StateError>([&] { engine->keeper.save(1, file.path); });
    restore = message_of<StateError>([&] { engine->keeper.restore(2, file.path); });
  });
  EXPECT_EQ(save, "save: the stream is being captured; allowed before and after");
  EXPECT_EQ(restore, "restore: the stream is being captured; allowed before and after");
  EXPECT_FALSE(std::filesystem::exists(file.path));
  engine->keeper.save(1, file.path);
  engine->keeper.restore(2, file.path);
}

}  // namespace
}  // namespace kvkeep::cuda::restore_test
